"""The console script's entry: an interrupt ends without a traceback, also while modules are being imported."""

import os


def main() -> None:
    """Import the commands and run the one that was asked for."""
    try:
        from labkit.cli import main as run

        run()
    except KeyboardInterrupt:
        os._exit(130)  # the shell's code for an end by Ctrl-C; half-imported modules have nothing to flush


if __name__ == "__main__":
    main()

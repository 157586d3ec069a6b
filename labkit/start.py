"""The console script's entry: an interrupt that comes while modules are being imported ends without a traceback too."""

from __future__ import annotations

import os


def main() -> None:
    """Import the commands and run the one that was asked for."""
    try:
        from labkit.cli import main as run
    except KeyboardInterrupt:
        os._exit(130)  # the shell's code for an end by Ctrl-C; half-imported modules have nothing to flush
    run()


if __name__ == "__main__":
    main()

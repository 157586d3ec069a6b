"""Writes records until it is killed. Run as a script; it needs no MLX, so that a kill costs milliseconds.

Each line on standard input, `FOLDER LIMIT FIRST STEP SECONDS`, starts one writer (a fork). It writes records FIRST,
FIRST + 1 ... and says each number on standard output once it is on the disk; it kills itself in step STEP of its work
on the disk (in the middle of it, if the step is a write), or is killed after SECONDS.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import types
from pathlib import Path

ROOT = "a" * 64
WHOLE = Path(__file__).resolve().parents[3]


def light() -> None:
    """Let the modules below be imported without the engine around them."""
    sys.path.insert(0, str(WHOLE))
    engine = types.ModuleType("labkit.engine")
    engine.__path__ = [str(WHOLE / "labkit" / "engine")]
    sys.modules["labkit.engine"] = engine


def name(number: int) -> str:
    return f"{number:064x}.columns"


def record(number: int):
    from labkit.engine.prefix.record import Record, Tensor

    data = random.Random(number).randbytes(1 + (number * 7919) % 30_000)
    about = {
        "root": ROOT,
        "key": f"{number:064x}",
        "part": "columns",
        "parent": ROOT,
        "depth": "1",
        "bytes": str(len(data)),
    }
    return Record({"0.keys": Tensor("uint8", (len(data),), data)}, about)


def write_until_killed(folder: str, limit: int, first: int, step: int, out: int) -> None:
    from labkit.engine.prefix.disk import DiskTier
    from labkit.engine.prefix.folder import Folder
    from tests.engine.deadly import Deadly

    tier = DiskTier(Folder(Path(folder), ROOT), limit_bytes=limit, system=Deadly(step))
    tier.sweep()
    for number in range(first, first + 100_000):
        tier.write(name(number), record(number), pin=number % 3 == 0)
        os.write(out, f"{number}\n".encode())


def main() -> None:
    light()
    import labkit.engine.prefix.disk  # noqa: F401  # before the forks
    import tests.engine.deadly  # noqa: F401

    assert "mlx" not in sys.modules
    for line in sys.stdin:
        folder, limit, first, step, seconds = line.split()
        read, written = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                write_until_killed(folder, int(limit), int(first), int(step), written)
            finally:
                os._exit(3)  # never reached by a writer that works
        os.close(written)
        if float(seconds):
            select.select([], [], [], float(seconds))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with os.fdopen(read) as said:
            durable = said.read().split("\n")[:-1]
        print(os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status), *durable, flush=True)


if __name__ == "__main__":
    main()

"""A file system that kills its process in the middle of one step: what both crash tests' children write through."""

from __future__ import annotations

import os
import random
import signal

from labkit.engine.prefix.filesystem import FileSystem


class Deadly(FileSystem):
    """Dies in call number `step`; in a write, after a random part of the bytes.

    Args:
        step: counts from 1; 0 never dies.
    """

    def __init__(self, step: int):
        self._left = step

    def __getattribute__(self, called: str):
        found = super().__getattribute__(called)
        if called.startswith("_") or not callable(found):
            return found
        self._left -= 1
        if self._left:
            return found

        def die(*arguments):
            if called == "write":
                descriptor, parts, offset = arguments
                data = b"".join(parts)
                os.pwrite(descriptor, data[: random.randrange(len(data) + 1)], offset)
            os.kill(os.getpid(), signal.SIGKILL)

        return die

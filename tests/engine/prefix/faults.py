"""File systems that fail."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from labkit.engine.prefix.filesystem import FileSystem, Parts

STEPS = ("create", "write", "sync", "close", "replace", "sync_folder", "link", "unlink", "touch", "read", "free_bytes")


class Failing(FileSystem):
    """Fails at the steps named in `failing`: name -> errno. `half` lets a failing write put down half of its bytes.

    Attributes:
        calls: every step, in order.
        threads: the threads that wrote.
    """

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.half = False

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            code = self.failing[name]
            raise OSError(code, os.strerror(code))

    def create(self, path: Path, size: int) -> int:
        self._step("create")
        self.threads.add(threading.current_thread().name)
        return super().create(path, size)

    def write(self, descriptor: int, parts: Parts, offset: int) -> None:
        assert all(isinstance(part, (bytes, memoryview)) for part in parts), "a writer sees bytes only"
        if self.half and "write" in self.failing:
            data = b"".join(parts)
            super().write(descriptor, [data[: len(data) // 2]], offset)
        self._step("write")
        super().write(descriptor, parts, offset)

    def sync(self, descriptor: int) -> None:
        self._step("sync")
        super().sync(descriptor)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._step("close")

    def sync_folder(self, folder: Path) -> None:
        self._step("sync_folder")
        super().sync_folder(folder)

    def replace(self, source: Path, target: Path) -> None:
        self._step("replace")
        super().replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        self._step("link")
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self._step("unlink")
        super().unlink(path)

    def touch(self, path: Path, nanoseconds: int) -> None:
        self._step("touch")
        super().touch(path, nanoseconds)

    def read(self, path: Path, limit: int) -> bytes:
        self._step("read")
        return super().read(path, limit)

    def reading(self, path: Path):
        self._step("read")
        return super().reading(path)

    def free_bytes(self, folder: Path) -> int:
        self._step("free_bytes")
        return super().free_bytes(folder)


FULL, BROKEN = errno.ENOSPC, errno.EIO

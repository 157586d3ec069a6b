"""What the store asks of the operating system, one method a request, so that a test can make any of them fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

LARGE = 4 << 20  # bytes from which on new memory is in large pages


class FileSystem:
    """POSIX, with flushing that reaches the disk. All methods raise OSError."""

    def create(self, path: Path, size: int) -> int:
        """A new file of `size` bytes (sparse: the size is what others who measure the folder see at once)."""
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def write(self, descriptor: int, data: bytes | memoryview, offset: int) -> None:
        """All of `data`, from `offset` on."""
        view = memoryview(data)
        while len(view):
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written

    def sync(self, descriptor: int) -> None:
        """Until it is on the disk."""
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync stops at the drive's own cache
            with contextlib.suppress(OSError):  # a file system that has no such request
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def sync_folder(self, folder: Path) -> None:
        """Until the names in it are on the disk."""
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def touch(self, path: Path, nanoseconds: int) -> None:
        """Set the time of last use."""
        os.utime(path, ns=(nanoseconds, nanoseconds))

    def read(self, path: Path, limit: int) -> bytes:
        """The file's first `limit` bytes."""
        with path.open("rb") as file:
            return file.read(limit)

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[tuple[int, Callable[[memoryview, int], None]]]:
        """(the file's bytes, a function that fills a buffer from a place in it on, which several threads may call)."""
        descriptor = os.open(path, os.O_RDONLY)

        def fill(buffer: memoryview, offset: int) -> None:
            while len(buffer):
                got = _read_at(descriptor, buffer, offset)
                if not got:
                    raise OSError(errno.EIO, f"{path.name} ends at byte {offset}")
                buffer, offset = buffer[got:], offset + got

        try:
            yield os.fstat(descriptor).st_size, fill
        finally:
            os.close(descriptor)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that the volume still takes."""
        return shutil.disk_usage(folder).free


def _read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer as far as one read does; the bytes read. `preadv` copies nothing, but not every Python has it."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    data = os.pread(descriptor, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)


def pages(size: int) -> memoryview:
    """New memory: in large pages where it is much and the system has them, since to touch new small ones costs more
    than reading a file into them."""
    if size < LARGE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)

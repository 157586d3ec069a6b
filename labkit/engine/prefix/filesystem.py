"""What the store asks of the operating system, one method a request, so that a test can make any of them fail."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LARGE = 4 << 20  # bytes from which on new memory is in large pages
MOST_PARTS = 1024  # that one request takes (IOV_MAX)

Parts = Sequence[bytes | memoryview]
"""Bytes that lie end to end in a file, and wherever in memory."""
Fill = Callable[[Sequence[memoryview], int], None]
"""Fills buffers from a place in a file on, one behind the other."""


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

    def write(self, descriptor: int, parts: Parts, offset: int) -> None:
        """All of `parts`, from `offset` on. Where the system can be asked to, it begins at once to bring them to the
        disk: whoever flushes later waits for less."""
        begin = offset
        while parts := [part for part in parts if len(part)]:
            written = _write_at(descriptor, parts, offset)
            parts, offset = _behind(parts, written), offset + written
        if (bring := _sync_file_range()) is not None:
            bring(descriptor, begin, offset - begin, 2)  # SYNC_FILE_RANGE_WRITE; a file system that cannot does not

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
        with open(_opened(path), "rb") as file:
            return file.read(limit)

    @contextlib.contextmanager
    def reading(self, path: Path) -> Iterator[tuple[int, Fill]]:
        """(the file's bytes, what fills buffers from it: several threads may call it)."""
        descriptor = _opened(path)

        def fill(buffers: Sequence[memoryview], offset: int) -> None:
            while buffers := [buffer for buffer in buffers if len(buffer)]:
                got = _read_at(descriptor, buffers, offset)
                if not got:
                    raise OSError(errno.EIO, f"{path.name} ends at byte {offset}")
                buffers, offset = _behind(buffers, got), offset + got

        try:
            yield os.fstat(descriptor).st_size, fill
        finally:
            os.close(descriptor)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that the volume still takes."""
        return shutil.disk_usage(folder).free


def _opened(path: Path) -> int:
    """A file to read. Anything else of that name is an error, and not a wait for whoever writes to a pipe."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path.name} is no file")
    return descriptor


# One request for many parts, where Python has it: each lets go of Python's lock, and waits for it afterwards.


def _write_at(descriptor: int, parts: Parts, offset: int) -> int:
    """Write parts as far as one request does; the bytes written."""
    if hasattr(os, "pwritev"):
        return os.pwritev(descriptor, parts[:MOST_PARTS], offset)
    return os.pwrite(descriptor, parts[0], offset)


def _read_at(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill buffers as far as one request does; the bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers[:MOST_PARTS], offset)
    data = os.pread(descriptor, len(buffers[0]), offset)
    buffers[0][: len(data)] = data
    return len(data)


def _behind(parts: Parts, done: int) -> list[memoryview]:
    """What is left of parts behind their first bytes."""
    left = []
    for part in parts:
        left.append(memoryview(part)[min(done, len(part)) :])
        done -= min(done, len(part))
    return left


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's request for a part of a file, which Python does not have; None on other systems."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


def pages(size: int) -> memoryview:
    """New memory: in large pages where it is much and the system has them, since to touch new small ones costs more
    than reading a file into them."""
    if size < LARGE:
        return memoryview(bytearray(size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)

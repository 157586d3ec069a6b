"""What the store asks of the operating system, one method a request, so that a test can make any of them fail."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
from pathlib import Path

LARGE = 4 << 20  # bytes of a file that is read into large pages


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

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        """All of `data`."""
        view = memoryview(data)
        while len(view):
            view = view[os.write(descriptor, view) :]

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

    def read(self, path: Path, limit: int = -1) -> bytes | memoryview:
        """The file's bytes, or its first `limit`."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if limit >= 0 or size < LARGE:
                return file.read(limit)
            # Large pages where the system has them: to touch new small ones costs more than the reading.
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            return memoryview(pages)[: file.readinto(pages)].toreadonly()

    def free_bytes(self, folder: Path) -> int:
        """Bytes that the volume still takes."""
        return shutil.disk_usage(folder).free

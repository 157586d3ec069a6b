"""Compiled kernels on disk: found by content, safe for processes that build at once, within a size limit."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

DEFAULT_LIMIT_BYTES = 1 << 30


def content_key(*parts: str | bytes) -> str:
    """A name for what was built from `parts` and nothing else."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


class ArtefactCache:
    """A folder of built files, one sub-folder a key, the least recently used removed first.

    Args:
        folder: where it lies; made when missing. By default labkit's cache folder for kernels.
        limit_bytes: what all entries together may take; checked after a process's first build, and whenever it has
            built a 64th of that much.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int = DEFAULT_LIMIT_BYTES):
        if limit_bytes <= 0:
            raise ValueError(f"limit_bytes must be positive, not {limit_bytes}")
        if folder is None:
            from labkit.devices import cache_folder

            folder = cache_folder("kernels")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.limit_bytes = limit_bytes
        self._until_a_look = 0  # bytes

    def get(self, key: str, build: Callable[[Path], None]) -> Path:
        """The folder of the entry `key`; `build(folder)` fills it if it is not there yet.

        Of several processes that ask at once, one builds and the others wait. A build that raises leaves nothing.
        """
        entry = self.folder / key
        if not entry.exists():
            with self._locked(key):
                if not entry.exists():
                    self._build(entry, build)
                    self._trim(keep=key)
        with contextlib.suppress(OSError):
            os.utime(entry)
        return entry

    def _build(self, entry: Path, build: Callable[[Path], None]) -> None:
        scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=self.folder))
        try:
            build(scratch)
            scratch.rename(entry)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        # 64 lock files for all keys: they stay, and a lock ends with its process however that ends.
        path = self.folder / f".lock-{int(key[:2], 16) % 64}"
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _entries(self) -> list[tuple[Path, float, int]]:
        found = []
        for path in self.folder.iterdir():
            if path.name.startswith(".") or not path.is_dir():
                continue
            with contextlib.suppress(OSError):  # another process may be removing it
                found.append((path, path.stat().st_mtime, _size_bytes(path)))
        return found

    def _trim(self, keep: str) -> None:
        # A look at thousands of entries takes longer than most builds: not after each of them.
        self._until_a_look -= _size_bytes(self.folder / keep)
        if self._until_a_look > 0:
            return
        entries = sorted(self._entries(), key=lambda entry: entry[1])
        total = sum(size for _, _, size in entries)
        for path, _, size in entries:
            if total <= self.limit_bytes:
                break
            if path.name != keep:
                shutil.rmtree(path, ignore_errors=True)
                total -= size
        self._until_a_look = self.limit_bytes // 64


def _size_bytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())

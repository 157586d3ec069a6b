"""The store's folder on disk, which several engines may share: who is here, what lies where, what may go.

    labkit-prefix-store.json        says whose folder this is
    lock                            held for the moments in which room is made and owners come and go; it holds what all
                                    files take at most
    blocks/ROOT/HH/HASH.PART.safetensors
    private/HASH.private.safetensors
    owners/ID/alive                 locked as long as its engine lives
    owners/ID/pins/NAME             a second name (hard link) of each file that the engine has pinned
    owners/ID/temporary/NAME        files being written

A file with a second name is pinned, whoever pinned it. An owner whose lock can be taken is dead: its pins and
half-written files go.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARKER = "labkit-prefix-store.json"
VERSION = 1
SUFFIX = ".safetensors"
PARTS = ("owners", "private", "blocks")
_KEY = re.compile(r"[0-9a-f]{64}\.(columns|state|tail|private)")


class LockTimeout(OSError):
    """Another engine has held the folder's lock for too long."""


@dataclass(frozen=True)
class Entry:
    """A file: its path, bytes, last use (ns), whether a second name pins it, and whether it is a record."""

    path: Path
    size: int
    used: int
    pinned: bool
    record: bool

    @property
    def name(self) -> str:
        """The record's name, if it is one."""
        return self.path.name.removesuffix(SUFFIX)


class Folder:
    """One engine's place in a store's folder.

    Args:
        path: made if it is not there; may be another store's, must not be anything else's.
        root: the name of the chains that this engine reads and writes.
        lock_seconds: how long to wait for the lock.

    Raises:
        ValueError: a folder that holds other things, or a store of a later version.
        OSError: a folder that cannot be made or written.
    """

    def __init__(self, path: Path, root: str, *, lock_seconds: float = 10.0):
        self.path, self.root = path, root
        self._lock_seconds, self._mutex, self._depth = lock_seconds, threading.RLock(), 0
        claim(path)
        self._lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        self._alive = None
        self.own = path / "owners" / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            with self.locked():
                self._settle()
                self.dead_owners = self._bury()
                (self.own / "pins").mkdir(parents=True)
                (self.own / "temporary").mkdir()
                self._alive = os.open(self.own / "alive", os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against other engines.

        Raises:
            LockTimeout: another engine does not let go.
        """
        with self._mutex:
            if self._depth == 0:
                _acquire(self._lock, self._lock_seconds)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)

    def bytes_at_most(self) -> int | None:
        """What all files take at most, as said when they were last counted or one was added; None if nobody has said.
        For whoever holds the lock: to look at every file for each new one costs more than a small one itself."""
        said = os.pread(self._lock, 8, 0)
        return int.from_bytes(said, "little") if len(said) == 8 else None

    def say_bytes(self, count: int) -> None:
        """Say so. Never too little: before a file is added, and what is removed need not be taken off."""
        os.pwrite(self._lock, count.to_bytes(8, "little"), 0)

    def place(self, name: str) -> Path:
        """Where a record lies or would lie."""
        if name.endswith(".private"):
            return self.path / "private" / f"{name}{SUFFIX}"
        return self.path / "blocks" / self.root[:16] / name[:2] / f"{name}{SUFFIX}"

    def temporary(self, name: str) -> Path:
        """Where a record is written before it is whole."""
        return self.own / "temporary" / f"{name}-{uuid.uuid4().hex[:8]}"

    def pin(self, name: str) -> Path:
        """The second name that pins a record."""
        return self.own / "pins" / f"{name}{SUFFIX}"

    def ours(self) -> list[Entry]:
        """Records of this root."""
        return [e for e in entries(self.path / "blocks" / self.root[:16]) if e.record]

    def scan(self) -> list[Entry]:
        """Every file that takes room, each once, whatever number of names it has."""
        return entries(self.path)

    def close(self) -> None:
        """Leave: pins and half-written files go, records stay."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.own)
        for descriptor in (self._alive, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._alive = self._lock = None

    def _settle(self) -> None:
        for part in PARTS:
            (self.path / part).mkdir(exist_ok=True)
        (self.path / "blocks" / self.root[:16]).mkdir(exist_ok=True)
        for half in self.path.glob(f"{MARKER}.*"):  # of an engine that was killed right here
            half.unlink(missing_ok=True)
        if not (self.path / MARKER).exists():
            half = self.path / f"{MARKER}.half"
            half.write_text(json.dumps({"format": VERSION}))
            os.replace(half, self.path / MARKER)

    def _bury(self) -> int:
        dead = 0
        for owner in _owners(self.path):
            if not lives(owner):
                shutil.rmtree(owner, ignore_errors=True)
                dead += 1
        return dead


def claim(path: Path) -> None:
    """Check that the folder is a store's or may become one; make it.

    Raises:
        ValueError: it holds other things, or a store that this version cannot read.
        OSError: it cannot be made or written.
    """
    for place in (path, *(path / part for part in PARTS)):
        if os.path.lexists(place) and not place.is_dir():
            raise ValueError(f"{place} is no folder: give a prefix store a folder of its own")
    for place in (path / "lock", path / MARKER):
        if os.path.lexists(place) and not place.is_file():
            raise ValueError(f"{place} is no file: clear the folder, or give the prefix store another")
    path.mkdir(parents=True, exist_ok=True)
    marker = path / MARKER
    if not marker.exists():
        # Another engine may be claiming the same folder now: what it makes is what we would make.
        ours = ("lock", *PARTS)
        others = sorted(i.name for i in path.iterdir() if i.name not in ours and not i.name.startswith(MARKER))
        if others:
            raise ValueError(f"{path} holds {others[0]!r} and is no prefix store: give the store a folder of its own")
        return
    try:
        found = json.loads(marker.read_text())["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{marker} cannot be read: clear the folder, or give the store another") from error
    if found != VERSION:
        raise ValueError(f"{path} is a prefix store of format {found}, not {VERSION}: give the store another folder")


def entries(folder: Path) -> list[Entry]:
    """Every file below, each once."""
    found: dict[int, Entry] = {}
    stack = [(folder, False)]
    while stack:
        place, private_to_owner = stack.pop()
        with contextlib.suppress(OSError), os.scandir(place) as items:  # it may go while we look
            for item in items:
                with contextlib.suppress(OSError):
                    if item.is_dir(follow_symlinks=False):
                        stack.append((Path(item.path), private_to_owner or item.path == str(folder / "owners")))
                    if not item.is_file(follow_symlinks=False):  # somebody's link, pipe or socket
                        continue
                    status = item.stat(follow_symlinks=False)
                    name = item.name.removesuffix(SUFFIX)
                    record = not private_to_owner and item.name.endswith(SUFFIX) and bool(_KEY.fullmatch(name))
                    entry = Entry(Path(item.path), status.st_size, status.st_mtime_ns, status.st_nlink > 1, record)
                    if status.st_ino not in found or entry.record:
                        found[status.st_ino] = entry
    return list(found.values())


def lives(owner: Path) -> bool:
    """Whether the engine that made this folder of `owners/` still runs."""
    try:
        descriptor = os.open(owner / "alive", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _owners(path: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(item for item in (path / "owners").iterdir() if item.is_dir())
    return []


def _acquire(descriptor: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise LockTimeout(f"another engine has held the prefix store's lock for {seconds} s") from None
            time.sleep(0.002)
        except OSError as error:  # some network file systems
            raise OSError(
                error.errno, f"this volume locks no files ({error.strerror}): give the prefix store a local folder"
            ) from error


def summary(path: Path) -> dict[str, dict[str, int]]:
    """What a store's folder holds: for each root (model, layout and width), records and bytes by part.

    Raises:
        ValueError: it is no store's folder.
    """
    if not (path / MARKER).exists():
        raise ValueError(f"{path} is no prefix store")
    claim(path)
    found: dict[str, dict[str, int]] = {}
    for entry in entries(path):
        if entry.record:
            part = entry.name.rpartition(".")[2]
            home = found.setdefault("private" if part == "private" else entry.path.parts[-3], {"bytes": 0})
            home[part] = home.get(part, 0) + 1
            home["bytes"] += entry.size
    return found


def clear(path: Path) -> dict[str, int]:
    """Remove every record of a store's folder, and what dead engines left. What a living engine has pinned keeps its
    second name until that engine lets go.

    Raises:
        ValueError: it is no store's folder.
    """
    summary(path)
    files = size = 0
    for entry in entries(path):
        if entry.record:
            with contextlib.suppress(FileNotFoundError):
                entry.path.unlink()
                files, size = files + 1, size + entry.size
    return {"files": files, "bytes": size}

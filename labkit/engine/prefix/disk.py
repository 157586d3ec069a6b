"""The disk tier: records as files, written whole or not at all, read only after they have proved themselves.

A file is written beside its place, renamed, and flushed together with the folder: whoever is killed when, the place
holds nothing or the whole file. It has its name before it is flushed, so that the disk is waited for once, not twice.
What a power cut tears before that does not match its checksums, and is a miss. The bytes of all files stay under a
limit, by removing what was used longest ago and nobody has pinned. Nothing here knows MLX, so any thread may run it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from labkit.engine.prefix import blockfile
from labkit.engine.prefix.beside import beside
from labkit.engine.prefix.counts import Counts
from labkit.engine.prefix.filesystem import FileSystem
from labkit.engine.prefix.folder import Entry, Folder
from labkit.engine.prefix.record import Record

Room = Callable[[dict[str, tuple[str, tuple[int, ...]]]], dict[str, tuple[memoryview, ...]]]
"""Tensors by name (dtype, shape) -> memory for some of them (`blockfile.Place`)."""


class NoRoom(OSError):
    """The limit is reached and nothing may go."""


class DiskTier:
    """Records by name in a folder that other engines may use too.

    Args:
        folder: the folder.
        limit_bytes: of all files in it, other engines' and other models' included.
        keep_free_bytes: what the volume must keep for others.
        system: the operating system.

    Attributes:
        on_evicted: told the name of each record that was removed to make room.
        counts: what happened, by name. Every refusal and every loss is among them.
        bytes_used: bytes of all files, at most: counted when an engine starts and when the limit is near, in between
            with what was added since.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        limit_bytes: int,
        keep_free_bytes: int = 0,
        system: FileSystem | None = None,
    ):
        self.folder, self._system = folder, system or FileSystem()
        self._limit, self._keep_free = limit_bytes, keep_free_bytes
        self.on_evicted: Callable[[str], None] = lambda name: None
        self._pins: set[str] = set()
        self.counts = Counts()
        self.counts.add("dead_owners_swept", folder.dead_owners)
        self.bytes_used = 0

    def has(self, name: str) -> bool:
        """Whether there is a file of this name now."""
        return self._where(name) is not None

    def write(self, name: str, record: Record, *, pin: bool = False, protect: Collection[str] = ()) -> None:
        """Store a record; when this returns it is on the disk.

        Args:
            pin: give it its second name before its first, so that no moment is without.
            protect: names that must not be removed for it.

        Raises:
            OSError: it is not stored, and nothing of it is left (`NoRoom`: the limit, or a full disk).
        """
        file = blockfile.Encoded(record)
        place, temporary = self.folder.place(name), self.folder.temporary(name)
        descriptor = None
        try:
            with self.folder.locked():
                self._make_room(file.size, protect)
                descriptor = self._system.create(temporary, file.size)
            file.write(functools.partial(self._system.write, descriptor))
            if fresh := not place.parent.is_dir():
                place.parent.mkdir(parents=True, exist_ok=True)
            if pin:
                self._link(temporary, name)
            self._system.replace(temporary, place)
            temporary = place
            folders = list(place.parents)[: 3 if fresh else 1]
            with beside() as begin:
                names = [begin(self._system.sync_folder, folder) for folder in folders]
                self._system.sync(descriptor)
                for flushed in names:
                    flushed()
            closing, descriptor = descriptor, None
            self._system.close(closing)
        except BaseException as error:
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    self._system.close(descriptor)
            with contextlib.suppress(OSError):
                self._system.unlink(temporary)
            if pin:
                self.unpin(name)
            if isinstance(error, OSError):
                kind = "no_room" if isinstance(error, NoRoom) else errno.errorcode.get(error.errno or 0, "other")
                self.counts.add(f"write_failed_{kind}")
            raise
        self.counts.add("written")

    def read(self, name: str, expect: dict[str, str], room: Room | None = None) -> Record | None:
        """The record, if its file is there, whole, and says of itself what is expected; else None, counted.

        What has proved bad is removed: it would be bad again.

        Args:
            room: told the tensors of an expected record: memory for those that are to be read to where it lies.
        """

        def as_expected(about: dict[str, str]) -> bool:
            return all(about.get(key) == value for key, value in expect.items())

        def into(about: dict[str, str], tensors: dict) -> dict[str, tuple[memoryview, ...]]:
            return room(tensors) if room is not None and as_expected(about) else {}

        place = self._where(name)
        if place is None:
            return None
        try:
            with self._system.reading(place) as (size, fill):
                record = blockfile.load(size, fill, into)
        except FileNotFoundError:  # removed by another engine just now
            return None
        except OSError:
            self.counts.add("read_failed")
            return None
        except blockfile.Damaged:
            self.counts.add("damaged")
            self.drop(name)
            return None
        except blockfile.Foreign:
            self.counts.add("foreign")
            return None
        if not as_expected(record.about):
            self.counts.add("misplaced")
            self.drop(name)
            return None
        self.counts.add("read")
        return record

    def about(self, name: str) -> dict[str, str] | None:
        """What the record's header says of it, if it can be read; the data behind it are not looked at."""
        place = self._where(name)
        try:
            return None if place is None else self._header(place, place.stat().st_size)
        except (OSError, blockfile.Damaged, blockfile.Foreign):
            return None

    def _header(self, place: Path, size: int) -> dict[str, str]:
        length = int.from_bytes(self._system.read(place, 8), "little")
        return blockfile.read_header(self._system.read(place, 8 + min(length, blockfile.MAX_HEADER)), size)[0]

    def touch(self, names: Iterable[str]) -> None:
        """Mark as used now; the first is the one to go last."""
        now = time.time_ns()
        for age, name in enumerate(names):
            if (place := self._where(name)) is not None:
                with contextlib.suppress(OSError):
                    self._system.touch(place, now - age)

    def drop(self, name: str) -> bool:
        """Remove the record. False if there was none."""
        self.unpin(name)
        try:
            self._system.unlink(self.folder.place(name))
        except OSError:
            return False
        return True

    # -- pins ----------------------------------------------------------------------------------------------------------

    def pin(self, name: str) -> bool:
        """Keep the record from being removed, by whichever engine. False if it is not there."""
        if name in self._pins:
            return True
        place = self.folder.place(name)
        if not place.is_file():
            return False
        return self._link(place, name) and (self.folder.pin(name).is_file() or place.is_file())

    def unpin(self, name: str) -> None:
        """Let it go again."""
        if name in self._pins:
            self._pins.discard(name)
            with contextlib.suppress(OSError):
                self._system.unlink(self.folder.pin(name))

    def _link(self, source: Path, name: str) -> bool:
        try:
            self._system.link(source, self.folder.pin(name))
        except FileExistsError:
            pass
        except FileNotFoundError:
            return False
        except OSError:  # a file system without hard links: the pin holds in this engine only
            self.counts.add("pins_not_shared")
        self._pins.add(name)
        return True

    def _where(self, name: str) -> Path | None:
        place = self.folder.place(name)
        if place.is_file():
            return place
        # Removed by somebody who did not ask, and held by our second name.
        if name in self._pins and self.folder.pin(name).is_file():
            return self.folder.pin(name)
        return None

    # -- room ----------------------------------------------------------------------------------------------------------

    def _make_room(self, size: int, protect: Collection[str]) -> None:
        """Room for a file that is to be added, under the folder's lock."""
        free = self._system.free_bytes(self.folder.path)
        surplus = lambda used: max(used + size - self._limit, size + self._keep_free - free)
        used = self.folder.bytes_at_most()
        if used is None or surplus(used) > 0:
            found = self.folder.scan()
            self.bytes_used = sum(entry.size for entry in found)
            self._evict_for(size, surplus(self.bytes_used), free, found, protect)
            used = self.bytes_used
        self.bytes_used = used + size
        self.folder.say_bytes(self.bytes_used)

    def _evict_for(self, size: int, surplus: int, free: int, found: list[Entry], protect: Collection[str]) -> None:
        if surplus <= 0:
            return
        spared = self._pins | set(protect)
        may_go = [entry for entry in found if entry.record and not entry.pinned and entry.name not in spared]
        no_room = NoRoom(
            errno.ENOSPC,
            f"{size} bytes do not fit: {self.bytes_used} of {self._limit} are in use, {free} are free on the volume, "
            f"and what may go takes {sum(entry.size for entry in may_go)}",
        )
        if sum(entry.size for entry in may_go) < surplus:
            raise no_room
        for entry in sorted(may_go, key=lambda entry: entry.used):
            if surplus <= 0:
                break
            surplus -= self._evict(entry)
        if surplus > 0:
            raise no_room

    def _evict(self, entry: Entry) -> int:
        try:
            self._system.unlink(entry.path)
        except FileNotFoundError:
            return entry.size
        except OSError:
            self.counts.add("evict_failed")
            return 0
        self.bytes_used -= entry.size
        ours = self.folder.root[:16] in entry.path.parts
        self.counts.add("evicted" if ours else "evicted_foreign")
        self.on_evicted(entry.name)
        return entry.size

    # -- start and end -------------------------------------------------------------------------------------------------

    def sweep(self) -> dict[str, dict[str, str]]:
        """Remove what is of no use to anybody (half files, files under wrong names); what the sound ones say of
        themselves, by name. Other models' files stay, and count against the limit."""
        sound = {}
        for entry in self.folder.ours():
            try:
                about = self._header(entry.path, entry.size)
                if f"{about.get('key')}.{about.get('part')}" != entry.name or about.get("root") != self.folder.root:
                    raise blockfile.Damaged("another record's place")
                sound[entry.name] = about
            except (blockfile.Damaged, blockfile.Foreign):
                self.counts.add("swept")
                with contextlib.suppress(OSError):
                    self._system.unlink(entry.path)
            except OSError:
                self.counts.add("read_failed")
        with self.folder.locked():
            found = self.folder.scan()
            self.bytes_used = sum(entry.size for entry in found)
            self.folder.say_bytes(self.bytes_used)
        ours = self.folder.root[:16]
        foreign = [e for e in found if e.record and e.path.parts[-3] != ours and not e.name.endswith(".private")]
        self.counts.add("incompatible", len(foreign))
        return sound

    def close(self) -> None:
        """Leave the folder; records stay."""
        self.folder.close()

"""Memory, the writer's queue and the disk as one place: records by name, with pins that hold in all of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from labkit.engine.prefix.disk import DiskTier, Room
from labkit.engine.prefix.memory import MemoryTier
from labkit.engine.prefix.record import Record
from labkit.engine.prefix.weak import weakly
from labkit.engine.prefix.writer import Writer

READERS = 4  # threads that read and check files; both let Python's lock go


class Tiers:
    """Records by name, in memory alone or in memory and on disk.

    Args:
        memory_bytes: of hot copies; of everything, without a disk.
        disk: the disk tier, if there is one.
        queue_bytes, queue_seconds: what may wait for the writer, and how long a put waits for room.
        on_gone: told the name of each record that is in no tier any more.
        lock: guards memory and pins, and is held when `on_gone` is called.
    """

    def __init__(
        self,
        *,
        memory_bytes: int,
        disk: DiskTier | None,
        queue_bytes: int,
        queue_seconds: float,
        on_gone: Callable[[str], None],
        lock: threading.RLock,
    ):
        self._lock = lock
        self._pinned: Counter[str] = Counter()
        self._owners: dict[str, set[str]] = {}
        self._protected: Collection[str] = ()
        self._on_gone, self.disk = on_gone, disk
        if disk is not None:
            disk.on_evicted = weakly(self._evicted_from_disk)
        self.memory = MemoryTier(memory_bytes, may_go=weakly(self._may_leave_memory), on_evicted=weakly(self._left))
        self.writer = None
        if disk is not None:
            self.writer = Writer(
                disk,
                limit_bytes=queue_bytes,
                wait_seconds=queue_seconds,
                pinned=weakly(self.is_pinned),
                on_done=weakly(self._written),
            )

    def has(self, name: str) -> bool:
        """Whether some tier has the record; a file may still prove damaged."""
        if name in self.memory:
            return True
        return self.writer is not None and (self.writer.get(name) is not None or self.disk.has(name))

    def kept(self, name: str) -> bool:
        """Whether the record is where it is to stay: on the disk or on its way there, or in memory without a disk."""
        if self.disk is None:
            return name in self.memory
        return not self.writer.leaves(name) and (self.writer.get(name) is not None or self.disk.has(name))

    def get(
        self,
        names: Sequence[str],
        expect: Callable[[str], dict[str, str]],
        *,
        hot: bool = True,
        room: Room | None = None,
    ) -> list[Record | None]:
        """The records, None where one is not there or not sound. What comes from the disk becomes hot, if wanted; or,
        if it is one record alone, lies where `room` says (`DiskTier.read`)."""
        with self._lock:
            found = {name: self.memory.get(name) or (self.writer and self.writer.get(name)) for name in names}
        cold = [name for name in names if found[name] is None] if self.disk is not None else []
        if len(cold) > 1:
            with ThreadPoolExecutor(min(READERS, len(cold)), thread_name_prefix="labkit-prefix-reader") as pool:
                found |= zip(cold, pool.map(lambda name: self.disk.read(name, expect(name)), cold), strict=True)
        elif cold:
            found[cold[0]] = self.disk.read(cold[0], expect(cold[0]), room)
        with self._lock:
            for name in cold:
                if found[name] is None:
                    self._left(name)
                elif hot:
                    self.memory.put(name, found[name])
        return [found[name] for name in names]

    def put(self, name: str, record: Record, *, protect: Collection[str] = ()) -> str | None:
        """Keep a record; returns why not, or None.

        Args:
            protect: names that must not make room for it.
        """
        with self._lock:
            self._protected = protect
            kept = self.memory.put(name, record)
            self._protected = ()
        if self.disk is None:
            return None if kept else "memory_full"
        # Not under the lock: the writer needs it to go on.
        if not self.writer.put(name, record, protect):
            with self._lock:
                self.memory.drop(name)
            return "queue_full" if not self.writer.closed else "closed"
        return None

    def write(
        self, name: str, record: Record, owner: str, *, protect: Collection[str] = (), timeout: float | None = None
    ) -> str | None:
        """Keep a record that `owner` waits for, and holds from then on; returns why not, or None. With a disk, it is
        there when this returns None.

        Args:
            protect: names that must not make room for it.
            timeout: seconds to wait for what is to be written before.
        """
        if self.disk is None:
            refusal = self.put(name, record, protect=protect)
        else:
            refusal = None if self.writer.write(name, record, protect, timeout) else "not_written"
        return refusal or (None if self.pin(owner, [name]) else "not_written")

    def drop(self, name: str, *, after: str | None = None) -> None:
        """Remove a record from every tier; from the disk, once `after` has been written."""
        with self._lock:
            self.memory.drop(name)
        if self.writer is not None:
            self.writer.drop(name, after=after)

    def touch(self, names: Sequence[str]) -> None:
        """Mark a chain, root first, as used now. Of one chain the far end goes first: what is behind a missing block
        is of no use."""
        with self._lock:
            for name in reversed(names):
                self.memory.get(name)
        if self.disk is not None:
            self.disk.touch(names)

    # -- pins ----------------------------------------------------------------------------------------------------------

    def is_pinned(self, name: str) -> bool:
        """Whether an owner of this engine holds the record."""
        return self._pinned[name] > 0

    def pin(self, owner: str, names: Collection[str]) -> bool:
        """Hold these records in place of what the owner held before. False, and nothing changes, if one is missing."""
        with self._lock:
            for name in names:
                self._pinned[name] += 1
            if not all(self._hold(name) for name in names):
                self._let_go(names)
                return False
            self._let_go(self._owners.pop(owner, ()))
            self._owners[owner] = set(names)
            return True

    def unpin(self, owner: str) -> bool:
        """Let go of what an owner holds. False if it holds nothing."""
        with self._lock:
            held = self._owners.pop(owner, None)
            self._let_go(held or ())
            return held is not None

    def _hold(self, name: str) -> bool:
        if self.disk is not None and self.disk.pin(name):
            return True
        # On its way to the disk, the writer pins it.
        return name in self.memory or (self.writer is not None and self.writer.get(name) is not None)

    def _let_go(self, names: Collection[str]) -> None:
        for name in names:
            self._pinned[name] -= 1
            if self._pinned[name] <= 0:
                del self._pinned[name]
                if self.disk is not None:
                    self.disk.unpin(name)

    def _may_leave_memory(self, name: str) -> bool:
        if self.disk is not None:
            return not self.is_pinned(name) or self.disk.has(name)
        return not self.is_pinned(name) and name not in self._protected

    # -- told by the tiers ---------------------------------------------------------------------------------------------

    def _written(self, name: str, error: Exception | None) -> None:
        with self._lock:
            if error is None and self.is_pinned(name):
                self.disk.pin(name)
            elif error is not None and name not in self.memory:
                self._on_gone(name)

    def _left(self, name: str) -> None:
        if not self.has(name):
            self._on_gone(name)

    def _evicted_from_disk(self, name: str) -> None:
        with self._lock:
            if name not in self.memory:
                self._on_gone(name)

    # -- state ---------------------------------------------------------------------------------------------------------

    def release_memory(self, target: int) -> int:
        """Let hot copies go until `target` bytes remain, as far as what is left elsewhere allows; returns the bytes
        that were freed. Without a disk these are the only copies."""
        with self._lock:
            return self.memory.release(target)

    def stats(self) -> dict[str, Any]:
        """Bytes, pins and every tier's counters."""
        with self._lock:
            found: dict[str, Any] = {
                "memory": {"bytes": self.memory.bytes_used, **self.memory.counts.as_dict()},
                "pins": {"owners": len(self._owners), "records": len(self._pinned)},
            }
        if self.disk is not None:
            waiting, waiting_bytes = self.writer.pending
            found["disk"] = {"bytes": self.disk.bytes_used, **self.disk.counts.as_dict()}
            found["writer"] = {
                "waiting": waiting,
                "waiting_bytes": waiting_bytes,
                "last_error": self.writer.last_error,
                **self.writer.counts.as_dict(),
            }
        return found

    def flush(self, timeout: float | None = None) -> bool:
        """Until everything is on the disk. False if the time was not enough."""
        return self.writer is None or self.writer.flush(timeout)

    def close(self, timeout: float | None) -> bool:
        """Write what waits, then let the folder go."""
        if self.writer is None:
            return True
        done = self.writer.close(timeout)
        self.disk.close()
        return done

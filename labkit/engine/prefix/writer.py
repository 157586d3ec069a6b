"""The writer: takes records (bytes, never arrays) to the disk, in order: in a thread of its own, but what its caller
waits for in the caller's."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from labkit.engine.prefix.counts import Counts
from labkit.engine.prefix.disk import DiskTier
from labkit.engine.prefix.record import Record

log = logging.getLogger("labkit.prefix")


@dataclass
class _Job:
    name: str
    record: Record | None  # None: remove it
    protect: Collection[str] = ()
    after: str | None = None  # remove only once this record is on the disk


class Writer:
    """Writes and removals, one behind the other. What waits can be read.

    Args:
        disk: where to.
        limit_bytes: records that may wait, in bytes.
        wait_seconds: how long `put` waits for room in the queue.
        pinned: whether a record is to be pinned as it is written.
        on_done: told (name, error or None) after every write, in the writer's thread.

    Attributes:
        counts: what happened, by name.
        last_error: the last failure's message.
        closed: whether it takes no more.
    """

    def __init__(
        self,
        disk: DiskTier,
        *,
        limit_bytes: int,
        wait_seconds: float,
        pinned: Callable[[str], bool],
        on_done: Callable[[str, Exception | None], None],
    ):
        self._disk, self._limit, self._wait = disk, limit_bytes, wait_seconds
        self._pinned, self._on_done = pinned, on_done
        self._jobs: deque[_Job] = deque()
        self._waiting: dict[str, Record] = {}
        self._leaving: set[str] = set()
        self._bytes = 0
        self._busy = self.closed = self._quiet = False
        self._change = threading.Condition()
        self.counts = Counts()
        self.last_error: str | None = None
        self._thread = threading.Thread(target=self._work, name="labkit-prefix-writer", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> tuple[int, int]:
        """Records and bytes that wait or are being written."""
        with self._change:
            return len(self._waiting), self._bytes

    def get(self, name: str) -> Record | None:
        """A record that is not on the disk yet."""
        with self._change:
            return self._waiting.get(name)

    def leaves(self, name: str) -> bool:
        """Whether a removal of the record is queued."""
        with self._change:
            return name in self._leaving

    def put(self, name: str, record: Record, protect: Collection[str] = ()) -> bool:
        """Queue a write. False, counted, if the queue stays full."""
        deadline = time.monotonic() + self._wait
        with self._change:
            if name in self._waiting:
                return True
            # One record always fits, however large.
            while self._waiting and self._bytes + record.nbytes > self._limit and not self.closed:
                if not self._change.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    self.counts.add("queue_full")
                    return False
            if self.closed:
                self.counts.add("closed")
                return False
            self._leaving.discard(name)  # a removal that was queued before is not meant any more
            self._waiting[name] = record
            self._bytes += record.nbytes
            self._jobs.append(_Job(name, record, protect))
            self._change.notify_all()
            return True

    def write(self, name: str, record: Record, protect: Collection[str] = (), timeout: float | None = None) -> bool:
        """Write and pin a record now, in the thread that calls, behind all that waits. False, counted, if it failed, or
        what waits took longer than `timeout` seconds."""
        if not self.flush(timeout) or self.closed:
            self.counts.add("closed" if self.closed else "not_reached")
            return False
        return self._written(_Job(name, record, protect), pin=True) is None

    def drop(self, name: str, *, after: str | None = None) -> None:
        """Queue a removal, to be done once `after` has been written. A write that still waits is called off."""
        with self._change:
            if any(job.name == name and job.record is not None for job in self._jobs):
                self._bytes -= self._waiting.pop(name).nbytes
                # Whatever was to go once this one was written goes once its successor is.
                orphans = [replace(job, after=after) for job in self._jobs if job.after == name]
                self._jobs = deque(job for job in self._jobs if name not in (job.name, job.after))
                self._jobs.extend(orphans)
            if not self.closed:
                self._leaving.add(name)
                self._jobs.append(_Job(name, None, after=after))
                self._change.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the queue is empty. False if the time was not enough."""
        with self._change:
            return self._change.wait_for(lambda: not self._jobs and not self._busy, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Finish what waits, then end. False if the time was not enough: what is left is not written."""
        done = self.flush(timeout)
        with self._change:
            self.closed = True
            if not done:
                self._drop_waiting()
            self._change.notify_all()
        self._thread.join(5.0)
        return done

    def _drop_waiting(self) -> None:
        self.counts.add("abandoned", sum(job.record is not None for job in self._jobs))
        self._jobs.clear()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._jobs or self.closed)
                if not self._jobs:
                    return
                job, self._busy = self._jobs.popleft(), True
            try:
                self._do(job)
            finally:
                with self._change:
                    self._busy = False
                    if job.record is not None and self._waiting.pop(job.name, None) is not None:
                        self._bytes -= job.record.nbytes
                    del job  # its bytes may be a paused row's own memory
                    self._change.notify_all()

    def _do(self, job: _Job) -> None:
        if job.record is None:
            with self._change:
                meant = job.name in self._leaving and not self._pinned(job.name)
                self._leaving.discard(job.name)
            if meant and (job.after is None or self._disk.has(job.after)):
                self._disk.drop(job.name)
            return
        self._on_done(job.name, self._written(job, pin=self._pinned(job.name)))

    def _written(self, job: _Job, *, pin: bool) -> Exception | None:
        try:
            self._disk.write(job.name, job.record, pin=pin, protect=job.protect)
        except Exception as failure:  # a full or failing disk costs a block, never the engine
            self.last_error = f"{type(failure).__name__}: {failure}"
            self.counts.add("failed")
            if not self._quiet:  # once, until a write succeeds again
                log.warning("the prefix store could not write a block (%s); it will be computed again", failure)
            self._quiet = True
            return failure
        self._quiet = False
        return None

"""The memory tier: hot records, under a budget of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from labkit.engine.prefix.counts import Counts
from labkit.engine.prefix.record import Record


class MemoryTier:
    """Records by name; what was used longest ago goes first. Not locked: the store's lock guards it.

    Args:
        limit_bytes: of all records together.
        may_go: whether a record may be dropped to make room.
        on_evicted: told the name of each record that was.

    Attributes:
        counts: what happened, by name.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        may_go: Callable[[str], bool],
        on_evicted: Callable[[str], None] = lambda name: None,
    ):
        self._limit, self._may_go, self._on_evicted = limit_bytes, may_go, on_evicted
        self._records: OrderedDict[str, Record] = OrderedDict()
        self.bytes_used = 0
        self.counts = Counts()

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def get(self, name: str) -> Record | None:
        """The record, marked as used now."""
        if name not in self._records:
            return None
        self._records.move_to_end(name)
        return self._records[name]

    def put(self, name: str, record: Record) -> bool:
        """Keep a record. False, counted, if the budget does not hold it beside what must stay."""
        if name in self._records:
            self._records.move_to_end(name)
            return True
        if not self.shrink(self._limit - record.nbytes):
            self.counts.add("refused")
            return False
        self._records[name] = record
        self.bytes_used += record.nbytes
        return True

    def drop(self, name: str) -> bool:
        """Forget a record. False if there was none."""
        if (record := self._records.pop(name, None)) is None:
            return False
        self.bytes_used -= record.nbytes
        return True

    def shrink(self, target: int) -> bool:
        """Drop records, the longest unused first, until at most `target` bytes remain. False if that cannot be; then
        nothing is dropped."""
        surplus, leaving = self.bytes_used - target, []
        for name, record in self._records.items():
            if surplus <= 0:
                break
            if self._may_go(name):
                leaving.append(name)
                surplus -= record.nbytes
        if surplus > 0:
            return False
        for name in leaving:
            self.drop(name)
            self.counts.add("evicted")
            self._on_evicted(name)
        return True

    def release(self, target: int) -> int:
        """As `shrink`, as far as it goes; returns the bytes that were freed."""
        before = self.bytes_used
        for name in [name for name in self._records if self._may_go(name)]:
            if self.bytes_used <= target:
                break
            self.drop(name)
            self.counts.add("evicted")
            self._on_evicted(name)
        return before - self.bytes_used

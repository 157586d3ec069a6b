"""Recurrent states whose rows hold slots of a pool: how many there may be is known, and a leak shows.

A state is rewritten whole at every step, so that its new value is a fresh array anyway; a pool array with free places
in it would only add copies to that, of all slots where the back end writes nothing in place. So the rows that decode
together lie close, in one array [B, ...], and a slot is the right to be one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from labkit.caches.base import Cache
from labkit.caches.block_pool import BlockPool
from labkit.caches.block_table import Table
from labkit.caches.by_row import row_numbers
from labkit.caches.layout import Layout
from labkit.caches.recurrent import BatchedRecurrent, Recurrent


class SlottedRecurrent(Recurrent):
    """One row; it takes its slot with the first state that is written."""

    def __init__(self, slots: BlockPool, size: int = 2, layout: Layout | None = None):
        super().__init__(size, layout)
        self.slots, self.tables = slots, [Table(slots, promised=1)]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        if value is not None and not self.tables[0].blocks:
            self.tables[0].grow(1)
        super().__setitem__(index, value)

    def copy(self) -> SlottedRecurrent:
        twin = SlottedRecurrent(self.slots, len(self.cache), self.layout)
        twin.take_states(self)
        return twin

    def plain_cache(self) -> Recurrent:
        """The same states without a slot."""
        plain = Recurrent(len(self.cache), self.layout)
        plain.cache = list(self.cache)
        return plain

    def snapshot(self) -> bytes:
        """The plain class's bytes."""
        return self.plain_cache().snapshot()

    @classmethod
    def restore(cls, data: bytes, layout: Layout | None = None) -> SlottedRecurrent:
        """The cache that `snapshot` wrote, in a slot of a pool of its own."""
        plain = Recurrent.restore(data, layout)
        cache = cls(BlockPool(1, 1), len(plain.cache), plain.layout)
        cache.take_states(plain)
        return cache

    def take_states(self, other: Recurrent) -> None:
        """Copies of another cache's states, in a slot of this one's own."""
        for index, state in enumerate(other.cache):
            if state is not None:
                self[index] = mx.array(state)

    def release(self) -> None:
        self.tables[0].release()
        self.cache = [None] * len(self.cache)

    @classmethod
    def merge(cls, caches: Sequence[SlottedRecurrent]) -> BatchedSlottedRecurrent:
        return BatchedSlottedRecurrent.from_rows(caches)


class BatchedSlottedRecurrent(BatchedRecurrent):
    """Rows of several requests, each with its slot."""

    slots: BlockPool
    tables: list[Table]

    @classmethod
    def from_rows(cls, caches: Sequence[SlottedRecurrent]) -> BatchedSlottedRecurrent:
        """The rows of serial caches, as copies; each shares its slot until the serial cache lets go of it."""
        tables = [table.fork() for cache in caches for table in cache.tables]
        return cls._over(BatchedRecurrent.from_rows(caches), caches[0].slots, tables)

    @classmethod
    def _over(cls, plain: BatchedRecurrent, slots: BlockPool, tables: list[Table]) -> BatchedSlottedRecurrent:
        result = cls(len(plain.cache), plain.layout, batch=plain.batch_size)
        result.cache, result.left_padding, result.lengths = plain.cache, plain.left_padding, plain.lengths
        result.slots, result.tables = slots, tables
        return result

    def copy(self) -> BatchedSlottedRecurrent:
        return self._over(self.plain_cache(), self.slots, [table.fork() for table in self.tables])

    def plain_cache(self) -> BatchedRecurrent:
        """The same states without slots."""
        plain = BatchedRecurrent(len(self.cache), self.layout, batch=self.batch_size)
        plain.cache, plain.left_padding, plain.lengths = list(self.cache), self.left_padding, self.lengths
        return plain

    def snapshot(self) -> bytes:
        """The plain class's bytes."""
        return self.plain_cache().snapshot()

    @classmethod
    def restore(cls, data: bytes, layout: Layout | None = None) -> BatchedSlottedRecurrent:
        """The cache that `snapshot` wrote, in slots of a pool of its own."""
        plain = BatchedRecurrent.restore(data, layout)
        slots = BlockPool(plain.batch_size, 1)
        cache = cls._over(plain, slots, [Table(slots, promised=1) for _ in range(plain.batch_size)])
        for table in cache.tables:
            table.grow(0 if cache.empty() else 1)
        return cache

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        if value is not None:
            for table in self.tables:
                if not table.blocks:
                    table.grow(1)
        super().__setitem__(index, value)

    def filter(self, rows: object) -> None:
        kept = row_numbers(rows, self.batch_size).tolist()
        super().filter(kept)
        before, self.tables = self.tables, [self.tables[row].fork() for row in kept]
        for table in before:
            table.release()

    def extend(self, other: Cache) -> None:
        super().extend(other)
        self.tables += [table.fork() for table in other.tables]

    def extract(self, row: int) -> SlottedRecurrent:
        plain = super().extract(row)
        single = SlottedRecurrent(self.slots, len(plain.cache), plain.layout)
        single.tables = [self.tables[row].fork()]
        single.cache = plain.cache
        return single

    def release(self) -> None:
        for table in self.tables:
            table.release()
        self.cache = [None] * len(self.cache)

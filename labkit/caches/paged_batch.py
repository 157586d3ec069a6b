"""Full attention's keys and values of several rows in blocks of a shared pool: no padding is stored.

The rectangle that `update_and_fetch` gathers is `BatchedContiguous`'s, right-justified, with zeros for padding. Rows
join and leave by their tables; no finished block moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from labkit.caches import masks
from labkit.caches.base import Cache, Unsupported
from labkit.caches.block_table import Table
from labkit.caches.by_row import per_row, row_numbers, to_keep, to_trim
from labkit.caches.contiguous import Contiguous
from labkit.caches.contiguous_batch import BatchedContiguous
from labkit.caches.incoming import check_tokens
from labkit.caches.paged import Paged
from labkit.caches.paged_cache import PagedCache
from labkit.caches.paged_reads import int32s
from labkit.caches.paged_rows import PagedRows
from labkit.caches.pages import Pages


class BatchedPaged(PagedCache):
    """Rows of several lengths. Token p of row b stands in column left_padding[b] + p of what is gathered.

    Attributes:
        offset: the position of each row's next token, int32 [B]; negative while only padding has passed.
        left_padding: columns of padding before each row's first token, int32 [B].
    """

    kind = "contiguous"
    plain = BatchedContiguous
    batched = True
    supports = Cache.supports - {"merge"}

    def __init__(self, pages: Pages, left_padding: Sequence[int]):
        self.pages = pages
        self.rows = PagedRows(pages, [Table(pages.pool) for _ in left_padding])
        self._lefts = list(left_padding)
        self._idx = 0
        self._valid: list[int] | None = None  # of the right-padded input to come
        self._right: list[int] = []  # and its padding
        self._offset: mx.array | None = None

    @property
    def left_padding(self) -> mx.array:
        return int32s(tuple(self._lefts))

    @property
    def offset(self) -> mx.array:
        if self._offset is not None:
            return self._offset
        return int32s(tuple(self._idx - left for left in self._lefts))

    @offset.setter
    def offset(self, value: mx.array) -> None:
        # A forward gives all its layers one array of positions; the numbers behind it are known here.
        self._offset = value

    def _write(self, keys: mx.array, values: mx.array) -> None:
        check_tokens(self, keys, values)
        length = keys.shape[2]
        self.pages.know(self.kind, keys, values)
        skips = [min(length, max(0, left - self._idx)) for left in self._lefts]
        counts = [length - skip for skip in skips]
        if self._valid is not None:
            counts = [min(count, valid) for count, valid in zip(counts, self._valid, strict=True)]
        self.rows.write(keys, values, skips, counts)
        if self._valid is not None:
            self._valid = [valid - count for valid, count in zip(self._valid, counts, strict=True)]
        self._advance(length)

    def _advance(self, length: int) -> None:
        self._idx += length
        self._offset = None

    def _gathered(self) -> tuple[mx.array, mx.array]:
        return self.rows.gather_blocks(self._lefts, self._idx)

    def attend(self, queries: mx.array, *, scale: float) -> mx.array:
        if self._valid is None and min(self.rows.lengths) >= queries.shape[2]:
            direct = self._direct(queries, scale)
            if direct is not None:
                return direct
        return self._chunk(queries, self._lefts, self._idx, scale)

    def size(self) -> int:
        return self._idx

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return masks.causal(n, self._idx, window=window_size, left_padding=self.left_padding)

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None:
            if self._idx:
                raise ValueError("left padding belongs before the first token of a batch")
            more = per_row(left_padding, self.batch_size)
            self._lefts = [left + n for left, n in zip(self._lefts, more, strict=True)]
            self._offset = None
        if right_padding is not None and any(per_row(right_padding, self.batch_size)):
            self._valid = per_row(lengths, self.batch_size)
            self._right = per_row(right_padding, self.batch_size)

    def finalize(self) -> None:
        if self._valid is not None:
            self._valid = None
            self._move_right(self._right)

    def _move_right(self, columns: Sequence[int]) -> None:
        """Turn this many columns after each row's newest token into padding before its first."""
        self._lefts = [left + n for left, n in zip(self._lefts, columns, strict=True)]
        self._offset = None

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = to_trim(n, self._idx)
        self._idx -= n
        self.rows.truncate([max(0, length - n) for length in self.rows.lengths])
        self._offset = None
        return n

    def checkpoint(self) -> None:
        self._mark = list(self.rows.lengths)

    def commit(self, accepted: Any) -> None:
        self.check_commit(accepted)
        kept, before = to_keep(accepted, self.batch_size), self.rows.lengths
        self.rows.truncate([min(now, mark + n) for now, mark, n in zip(before, self._mark, kept, strict=True)])
        dropped = [then - now for then, now in zip(before, self.rows.lengths, strict=True)]
        self._idx -= min(dropped)
        self._move_right([n - min(dropped) for n in dropped])
        self._mark = None

    def begin_with(self, blocks: int) -> None:
        raise Unsupported("batched contiguous", "begin with a prompt's blocks", "a row begins alone")

    def copy(self) -> BatchedPaged:
        twin = BatchedPaged(self.pages, self._lefts)
        twin.rows, twin._idx = self.rows.fork(range(len(self.rows))), self._idx
        return twin

    def filter(self, rows: Any) -> None:
        self._no_open_span("filter")
        kept = row_numbers(rows, self.batch_size).tolist()
        before, self.rows = self.rows, self.rows.fork(kept)
        before.release()
        self._lefts = [self._lefts[row] for row in kept]
        self._offset = None
        if shared := min([self._idx, *self._lefts]):
            self._idx -= shared
            self._lefts = [left - shared for left in self._lefts]

    def extend(self, other: Cache) -> None:
        self._no_open_span("extend")
        if isinstance(other, (Contiguous, BatchedContiguous)):
            other = (BatchedPaged if other.batched else Paged).adopt(other, self.pages)
        if isinstance(other, Paged):
            other = BatchedPaged.from_rows([other])
        filled = max(self._idx, other._idx)
        before, self.rows = self.rows, PagedRows.joined([self.rows, other.rows])
        before.release()
        self._lefts = [left + filled - cache._idx for cache in (self, other) for left in cache._lefts]
        self._idx, self._offset = filled, None

    def extract(self, row: int) -> Paged:
        (row,) = row_numbers([row], self.batch_size).tolist()
        single = Paged(self.pages)
        single.rows = self.rows.fork([row])
        single.offset = self.rows.lengths[row]
        return single

    def release(self) -> None:
        super().release()
        self._lefts, self._idx, self._offset = [0] * len(self.rows), 0, None

    @classmethod
    def from_rows(cls, caches: Sequence[Paged]) -> BatchedPaged:
        """The rows of serial caches, as forks."""
        result = cls(caches[0].pages, [])
        result.rows = PagedRows.joined([cache.rows for cache in caches])
        result._idx = max(result.rows.lengths)
        result._lefts = [result._idx - length for length in result.rows.lengths]
        return result

    def plain_cache(self) -> BatchedContiguous:
        plain = BatchedContiguous(self._lefts, self.layout)
        if not self.empty():
            plain.keys, plain.values = self._gathered()
            plain._advance_columns(self._idx)
        return plain

    @classmethod
    def adopt(cls, plain: BatchedContiguous, pages: Pages, tables: Sequence[Table] | None = None) -> BatchedPaged:
        cache = cls(pages, plain.left_padding.tolist())
        if tables:
            cache.rows = PagedRows(pages, tables)
        if plain.keys is not None:
            cache._write(*plain.keys_and_values())
        return cache

"""A sliding window's keys and values in blocks of a shared pool; blocks whose tokens left the window are given back.

Which tokens a ring shows, in which columns, is `Rotating`'s and `BatchedRotating`'s business: a ring of token numbers,
four bytes each, goes through their very code, and what it shows is gathered from the pool. So the rectangle is the
ring's in all its turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from labkit.caches import token_numbers
from labkit.caches.base import Cache, Unsupported
from labkit.caches.block_table import Table
from labkit.caches.by_row import per_row, row_numbers, to_keep
from labkit.caches.incoming import check_tokens
from labkit.caches.paged_cache import PagedCache
from labkit.caches.paged_rows import PagedRows
from labkit.caches.pages import Pages
from labkit.caches.ring import Ring
from labkit.caches.rotating import Rotating
from labkit.caches.rotating_batch import BatchedRotating


class WindowBlocks(PagedCache):
    """What both classes share: `ring` holds token numbers where the plain class holds keys and values."""

    kind = "rotating"
    ring: Ring
    _lefts: list[int]
    _valid: list[int] | None

    @property
    def max_size(self) -> int:
        """The window in tokens."""
        return self.ring.max_size

    @property
    def offset(self) -> Any:
        return self.ring.offset

    @offset.setter
    def offset(self, value: Any) -> None:
        self.ring.offset = value

    def _write(self, keys: mx.array, values: mx.array) -> None:
        check_tokens(self, keys, values)
        batch, length = keys.shape[0], keys.shape[2]
        if batch != len(self.rows):
            raise ValueError(f"keys of {batch} rows for a cache of {len(self.rows)}")
        self.pages.know(self.kind, keys, values, self.max_size)
        skips = [min(length, left) for left in self._lefts]
        counts = [length - skip for skip in skips]
        if self._valid is not None:
            counts = [min(count, valid) for count, valid in zip(counts, self._valid, strict=True)]
        numbers = token_numbers.of_new(length, skips, counts, self.rows.lengths)
        if self._mark is None:
            # What no query to come can see; only now, since the queries of the write before could.
            self.rows.drop_before([tokens - self.max_size for tokens in self.rows.lengths])
        self.rows.write(keys, values, skips, counts)
        self.ring.update_and_fetch(numbers, mx.array(numbers))
        self._lefts = [left - skip for left, skip in zip(self._lefts, skips, strict=True)]
        if self._valid is not None:
            self._valid = [valid - count for valid, count in zip(self._valid, counts, strict=True)]

    def _advance(self, length: int) -> None:
        raise Unsupported("paged rotating", "take a tail", "its ring must see the tokens: use `append`")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, H, L, D]; returns the columns that the new queries may see."""
        self._write(keys, values)
        return self._gathered(self.ring.keys_and_values()[0] if keys.shape[2] == 1 else self.ring.keys)

    def _gathered(self, numbers: mx.array | None = None) -> tuple[mx.array, mx.array]:
        numbers = self.ring.keys if numbers is None else numbers
        return self.rows.gather(numbers[:, 0, :, 0] - 1)

    def attend(self, queries: mx.array, *, scale: float) -> mx.array:
        length = queries.shape[2]
        if self._valid is None and min(self.rows.lengths) >= length:
            direct = self._direct(queries, scale)
            if direct is not None:
                return direct
        mask = self.ring.attend_mask(length)
        return mx.fast.scaled_dot_product_attention(queries, *self._gathered(), scale=scale, mask=mask)

    def _window(self) -> int | None:
        return self.max_size

    def _kept(self, tokens: int, chunk: int) -> int:
        return min(tokens, self.max_size + chunk + self.pages.block_tokens - 1)

    def size(self) -> int:
        return self.ring.size()

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> Any:
        return self.ring.make_mask(n, window_size=window_size, return_array=return_array)

    def is_trimmable(self) -> bool:
        return self.ring.is_trimmable()

    def trim(self, n: int) -> int:
        n = self.ring.trim(n)
        self.rows.truncate([max(0, tokens - n) for tokens in self.rows.lengths])
        return n

    def checkpoint(self) -> None:
        self.ring.checkpoint()
        self._mark = list(self.rows.lengths)

    def check_commit(self, accepted: Any) -> None:
        self.ring.check_commit(accepted)

    def commit(self, accepted: Any) -> None:
        kept = to_keep(accepted, self.batch_size)
        self.ring.commit(kept)
        self.rows.truncate(
            [min(tokens, mark + n) for tokens, mark, n in zip(self.rows.lengths, self._mark, kept, strict=True)]
        )
        self._mark = None

    def finalize(self) -> None:
        self.ring.finalize()
        self._valid = None

    @property
    def state(self) -> tuple:
        numbers = () if self.ring.keys is None else (self.ring.keys,)
        return (*super().state, *numbers)

    @state.setter
    def state(self, value: Any) -> None:
        raise Unsupported(f"paged {self.kind}", "take a state", "its tokens lie in a pool: use `adopt`")

    def plain_cache(self) -> Ring:
        plain = type(self.ring).from_state(self.ring.state)
        if not self.empty():
            plain.keys, plain.values = self._gathered(self.ring.keys)
        plain.layout = self.layout
        return plain


class PagedWindow(WindowBlocks):
    """One row; `plain_cache()` is what `Rotating` would hold. Rings that keep their first tokens stay plain."""

    plain = Rotating
    supports = Cache.supports - {"extend", "filter", "extract"}

    def __init__(self, pages: Pages, max_size: int, table: Table | None = None):
        self.pages, self.ring = pages, Rotating(max_size)
        self.rows = PagedRows(pages, [table or Table(pages.pool)])
        self._lefts, self._valid = [0], None

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        self.ring.prepare(left_padding=left_padding, lengths=lengths, right_padding=right_padding)
        if right_padding is not None and any(per_row(right_padding, 1)):
            self._valid = per_row(lengths, 1)

    def begin_with(self, blocks: int) -> None:
        tokens = blocks * self.pages.block_tokens
        self.rows.begin_with(blocks, null=max(0, tokens - self.max_size) // self.pages.block_tokens)
        numbers = token_numbers.of_span(max(0, tokens - self.max_size), tokens)
        self.ring.keys = self.ring.values = numbers
        self.ring.offset, self.ring._idx = tokens, numbers.shape[2]

    def copy(self) -> PagedWindow:
        twin = PagedWindow(self.pages, self.max_size)
        twin.ring, twin.rows = self.ring.copy(), self.rows.fork([0])
        return twin

    @classmethod
    def merge(cls, caches: Sequence[PagedWindow]) -> BatchedPagedWindow:
        return BatchedPagedWindow.from_rows(caches)

    def release(self) -> None:
        super().release()
        self.ring = Rotating(self.max_size)

    @classmethod
    def adopt(cls, plain: Rotating, pages: Pages, tables: Sequence[Table] | None = None) -> PagedWindow:
        if plain.keep:
            raise Unsupported("paged rotating", "adopt", "the ring keeps its first tokens")
        cache = cls(pages, plain.max_size, tables[0] if tables else None)
        cache.ring = token_numbers.of_ring(plain)
        if plain.keys is None:
            return cache
        pages.know(cls.kind, plain.keys, plain.values, plain.max_size)
        # Whole blocks: zeros stand where tokens left the window, so that other rows must not find these blocks.
        first = (plain.offset - plain.size()) // pages.block_tokens * pages.block_tokens
        cache.rows.tables[0].begin_at(first // pages.block_tokens)
        cache.rows.lengths = [first]
        lead = (0, 0), (0, 0), (plain.offset - plain.size() - first, 0), (0, 0)
        cache.rows.write(*(mx.pad(part, lead) for part in plain.newest()), [0], [plain.offset - first])
        return cache


class BatchedPagedWindow(WindowBlocks):
    """Rows of several lengths; `plain_cache()` is what `BatchedRotating` would hold."""

    plain = BatchedRotating
    batched = True
    supports = Cache.supports - {"merge"}

    def __init__(self, pages: Pages, max_size: int, left_padding: Sequence[int]):
        self.pages, self.ring = pages, BatchedRotating(max_size, left_padding)
        self.rows = PagedRows(pages, [Table(pages.pool) for _ in left_padding])
        self._lefts, self._valid = list(left_padding), None

    @property
    def left_padding(self) -> mx.array:
        return self.ring.left_padding

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        self.ring.prepare(left_padding=left_padding, lengths=lengths, right_padding=right_padding)
        if left_padding is not None:
            more = per_row(left_padding, self.batch_size)
            self._lefts = [left + n for left, n in zip(self._lefts, more, strict=True)]
        if right_padding is not None and any(per_row(right_padding, self.batch_size)):
            self._valid = per_row(lengths, self.batch_size)

    def begin_with(self, blocks: int) -> None:
        raise Unsupported("batched rotating", "begin with a prompt's blocks", "a row begins alone")

    def copy(self) -> BatchedPagedWindow:
        twin = BatchedPagedWindow(self.pages, self.max_size, [])
        twin.ring, twin.rows = self.ring.copy(), self.rows.fork(range(len(self.rows)))
        twin._lefts = list(self._lefts)
        return twin

    def filter(self, rows: Any) -> None:
        kept = row_numbers(rows, self.batch_size).tolist()
        self.ring.filter(kept)
        before, self.rows = self.rows, self.rows.fork(kept)
        before.release()
        self._lefts = [self._lefts[row] for row in kept]

    def extend(self, other: Cache) -> None:
        if isinstance(other, Ring):
            other = (BatchedPagedWindow if other.batched else PagedWindow).adopt(other, self.pages)
        joined = PagedRows.joined([self.rows, other.rows])
        self.ring.extend(other.ring)
        before, self.rows = self.rows, joined
        before.release()
        self._lefts = [*self._lefts, *other._lefts]

    def extract(self, row: int) -> PagedWindow:
        (number,) = row_numbers([row], self.batch_size).tolist()
        single = PagedWindow(self.pages, self.max_size)
        single.ring = self.ring.extract(number)
        single.rows = self.rows.fork([number])
        return single

    def release(self) -> None:
        super().release()
        self.ring = BatchedRotating(self.max_size, [0] * len(self.rows))
        self._lefts = [0] * len(self.rows)

    @classmethod
    def from_rows(cls, caches: Sequence[PagedWindow]) -> BatchedPagedWindow:
        """The rows of serial caches, as forks."""
        result = cls(caches[0].pages, caches[0].max_size, [])
        result.ring = BatchedRotating.from_rows([cache.ring for cache in caches])
        result.rows = PagedRows.joined([cache.rows for cache in caches])
        result._lefts = [0] * len(caches)
        return result

    @classmethod
    def adopt(cls, plain: BatchedRotating, pages: Pages, tables: Sequence[Table] | None = None) -> BatchedPagedWindow:
        if plain.keys is None:
            return cls(pages, plain.max_size, plain.left_padding.tolist())
        rows = [
            PagedWindow.adopt(plain.extract(b), pages, tables and tables[b : b + 1]) for b in range(plain.batch_size)
        ]
        cache = cls.from_rows(rows)
        cache.ring = token_numbers.of_ring(plain)
        return cache

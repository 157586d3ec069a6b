"""Full attention's keys and values of one row in blocks of a shared pool.

The rectangle that `update_and_fetch` gathers is the contiguous cache's, column by column, so that attention gives the
same bits; `append` and `attend` never spread it out (`labkit.kernels.attention.paged_decode_attention`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import mlx.core as mx

from labkit.caches import masks
from labkit.caches.base import Cache, Unsupported, per_row, to_keep, to_trim
from labkit.caches.block_pool import Table
from labkit.caches.contiguous import Contiguous
from labkit.caches.layout import Layout
from labkit.caches.paged_rows import PagedRows, int32s
from labkit.caches.pages import DEFAULT_BLOCK, Pages
from labkit.kernels.attention import Tail, paged_decode_attention, prefill_attention
from labkit.kernels.targets import target_in_use

FEW = 8
"""Tokens of one forward up to which a kernel reads through the block table; longer chunks gather first."""


UNEVEN = 1.5
"""How many times the mean the longest row must be for rows to be cut into blocks and no longer into equal parts."""


class PagedCache(Cache):
    """What the paged classes share: rows in a layer's pages. Stored bytes are those of the plain class.

    Attributes:
        pages: the layer's blocks, shared with other caches.
        rows: this cache's rows in them.
    """

    plain: ClassVar[type[Cache]]  # the class that holds the same without blocks
    pages: Pages
    rows: PagedRows

    @property
    def layout(self) -> Layout | None:
        return self.pages.layout

    @property
    def batch_size(self) -> int:
        return len(self.rows)

    def empty(self) -> bool:
        return self.rows.keys is None

    @property
    def nbytes(self) -> int:
        """The tails, and the blocks that these rows use (others may use them too)."""
        if self.pages.keys is None:
            return 0
        blocks = {block for table in self.rows.tables for block in table.blocks} - {0}
        return self.rows.nbytes + len(blocks) * (self.pages.nbytes // self.pages.keys.shape[0])

    @property
    def state(self) -> tuple:
        """What a step must evaluate: tails, and the pool itself. `plain_cache().state` is mlx-lm's."""
        arrays = (self.rows.keys, self.rows.values, self.pages.keys, self.pages.values)
        return tuple(array for array in arrays if array is not None)

    @state.setter
    def state(self, value: Any) -> None:
        raise Unsupported(f"paged {self.kind}", "take a state", "its tokens lie in a pool: use `adopt`")

    @abstractmethod
    def plain_cache(self) -> Cache:
        """A cache of the plain class with the same rows, as copies."""

    def release(self) -> None:
        self.rows.release()

    def bytes_for(self, tokens: int, *, chunk: int = 1) -> int:
        if self.layout is None:
            return super().bytes_for(tokens, chunk=chunk)
        size = self.pages.block_tokens
        columns = self._kept(tokens, chunk) // size * size + self.pages.tail_tokens
        return self.batch_size * self.layout.bytes_per_token * columns

    def _kept(self, tokens: int, chunk: int) -> int:
        return tokens

    @classmethod
    def bytes_of(cls, layout: Layout, tokens: int, *, chunk: int = 1) -> int:
        return cls.plain.bytes_of(layout, tokens, chunk=chunk)

    def snapshot(self) -> bytes:
        """The plain class's bytes: what was stored from a pool can be read without one."""
        return self.plain_cache().snapshot()

    @classmethod
    def restore(cls, data: bytes, layout: Layout | None = None) -> Self:
        """The cache that `snapshot` wrote, in a pool of its own; `adopt` puts a plain cache into a shared one."""
        plain = cls.plain.restore(data, layout)
        blocks = plain.batch_size * (plain.size() // DEFAULT_BLOCK + 1)
        return cls.adopt(plain, Pages(blocks, DEFAULT_BLOCK))

    @classmethod
    @abstractmethod
    def adopt(cls, plain: Cache, pages: Pages, tables: Sequence[Table] | None = None) -> Self:
        """The rows of a plain cache, written into `pages`; what `tables` know by key is shared instead."""

    def _pack(self) -> tuple[dict, dict]:
        return self.plain_cache()._pack()

    def _unpack(self, arrays: dict, scalars: dict) -> None:
        raise Unsupported(f"paged {self.kind}", "be filled in place", "`restore` makes a new one")

    def _direct(self, queries: mx.array, scale: float, sinks: mx.array | None, target: str | None) -> mx.array | None:
        """Attention of a few new tokens by the kernel that reads through the table, where there is a device for it."""
        target = target_in_use(target)
        if target is None or sinks is not None or queries.shape[2] > FEW:
            return None
        rows = self.rows
        return paged_decode_attention(
            queries,
            self.pages.keys,
            self.pages.values,
            Tail(rows.keys, rows.values, rows.finished()),
            rows.table(),
            int32s(tuple(rows.lengths)),
            window=self._window(),
            layout="uneven" if max(rows.lengths) * len(rows) > UNEVEN * sum(rows.lengths) else "general",
            scale=scale,
            target=target,
        )

    def _chunk(
        self,
        queries: mx.array,
        lefts: Sequence[int],
        columns: int,
        *,
        scale: float,
        sinks: mx.array | None,
        target: str | None,
    ) -> mx.array:
        """Attention of a prompt's chunk over gathered columns: by the kernel for chunks, or MLX's own operation."""
        length, gathered = queries.shape[2], self.rows.gather_blocks(lefts, columns)
        target = target_in_use(target)
        if target is not None and sinks is None:
            start, first = int32s((columns - length,) * len(lefts)), int32s(tuple(lefts))
            return prefill_attention(queries, *gathered, start, first=first, scale=scale, target=target)
        padding = int32s(tuple(lefts)) if any(lefts) else None
        mask = masks.causal(length, columns - length, left_padding=padding)
        return mx.fast.scaled_dot_product_attention(queries, *gathered, scale=scale, mask=mask, sinks=sinks)

    def has_tail_for(self, length: int) -> bool:
        """Whether `open_tail` can always make room for `length` tokens."""
        return self.pages.tail_tokens >= self.pages.block_tokens - 1 + length

    def open_tail(self, length: int) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """The pool's keys and values, the tails with room for `length` more tokens, and the table: what a kernel reads
        that writes the new tokens itself (`take_tail`)."""
        self.rows.open_tails(length)
        return self.pages.keys, self.pages.values, self.rows.keys, self.rows.values, self.rows.table()

    def take_tail(self, keys: mx.array, values: mx.array, length: int) -> None:
        """The tails [B, H, tail_tokens, D] after a step that wrote `length` tokens of each row behind its newest."""
        self.rows.take_tails(keys, values, length)
        self._advance(length)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values [B, H, L, D]; returns all columns so far, a batch's padding included."""
        self._write(keys, values)
        return self._gathered()

    def append(self, keys: mx.array, values: mx.array) -> None:
        self._write(keys, values)

    @abstractmethod
    def _write(self, keys: mx.array, values: mx.array) -> None:
        """New tokens into the rows' tails and blocks."""

    @abstractmethod
    def _gathered(self) -> tuple[mx.array, mx.array]:
        """Keys and values as the plain class would return them."""

    @abstractmethod
    def _advance(self, length: int) -> None:
        """`length` tokens of each row were written."""

    def _window(self) -> int | None:
        return None

    @abstractmethod
    def begin_with(self, blocks: int) -> None:
        """Begin, empty, with the blocks of the first `blocks` keys of the row's prompt, which are all in use."""


class Paged(PagedCache):
    """One row, or several equally long ones; `plain_cache()` is what `Contiguous` would hold."""

    kind = "contiguous"
    plain = Contiguous
    supports = Cache.supports - {"extend", "filter", "extract"}

    def __init__(self, pages: Pages, table: Table | None = None):
        self.pages = pages
        self.rows = PagedRows(pages, [table or Table(pages.pool)])
        self.offset = self.rows.lengths[0]
        self._valid: int | None = None  # of the padded input to come

    def begin_with(self, blocks: int) -> None:
        self.rows.begin_with(blocks)
        self.offset = self.rows.lengths[0]

    def _advance(self, length: int) -> None:
        self.offset += length

    def copy(self) -> Paged:
        twin = Paged(self.pages)
        twin.rows, twin.offset = self.rows.fork(range(len(self.rows))), self.offset
        return twin

    def _write(self, keys: mx.array, values: mx.array) -> None:
        batch, length = keys.shape[0], keys.shape[2]
        self.pages.know(self.kind, keys, values)
        if batch != len(self.rows):
            if self.offset or len(self.rows) != 1:
                raise ValueError(f"keys of {batch} rows for a cache of {len(self.rows)}")
            self.rows = PagedRows(self.pages, [Table(self.pages.pool) for _ in range(batch)])
        count = length if self._valid is None else min(length, self._valid)
        self.rows.write(keys, values, [0] * batch, [count] * batch)
        if self._valid is not None:
            self._valid -= count
        self._advance(length)

    def _gathered(self) -> tuple[mx.array, mx.array]:
        return self.rows.gather_blocks([0] * len(self.rows), self.offset)

    def attend(
        self,
        queries: mx.array,
        rows: Any = None,
        *,
        scale: float,
        sinks: mx.array | None = None,
        target: str | None = None,
    ) -> mx.array:
        if self.offset == self.rows.lengths[0]:
            direct = self._direct(queries, scale, sinks, target)
            if direct is not None:
                return direct
        lefts = [0] * len(self.rows)
        return self._chunk(queries, lefts, self.offset, scale=scale, sinks=sinks, target=target)

    def size(self) -> int:
        return self.offset

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        if window_size is not None or (return_array and n > 1):
            return masks.causal(n, self.offset, window=window_size)
        return None if n == 1 else "causal"

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        n = to_trim(n, self.offset)
        self._keep(self.offset - n)
        return n

    def _keep(self, tokens: int) -> None:
        self.offset = tokens
        self.rows.truncate([min(tokens, length) for length in self.rows.lengths])

    def prepare(self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None) -> None:
        if left_padding is not None and any(per_row(left_padding, self.batch_size)):
            raise Unsupported("serial contiguous", "take left padding", "a lone row needs none")
        if right_padding is not None:
            if len(set(per_row(right_padding, self.batch_size))) > 1:
                raise Unsupported("serial contiguous", "hold rows of several lengths", "merge serial rows instead")
            self._valid = per_row(lengths, self.batch_size)[0] if per_row(right_padding, self.batch_size)[0] else None

    def finalize(self) -> None:
        if self._valid is not None:
            self._valid = None
            self.offset = self.rows.lengths[0]

    def checkpoint(self) -> None:
        self._mark = self.offset

    def commit(self, accepted: Any) -> None:
        if self._mark is None:
            raise ValueError("commit without a checkpoint")
        kept = set(to_keep(accepted, self.batch_size))
        if len(kept) > 1:
            raise Unsupported("serial contiguous", "hold rows of several lengths", "merge serial rows instead")
        self._keep(min(self.offset, self._mark + kept.pop()))
        self._mark = None

    def release(self) -> None:
        super().release()
        self.offset = 0

    @classmethod
    def merge(cls, caches: Sequence[Paged]) -> Cache:
        from labkit.caches.paged_batch import BatchedPaged

        return BatchedPaged.from_rows(caches)

    def plain_cache(self) -> Contiguous:
        plain = Contiguous(self.layout)
        plain.offset = self.offset
        if not self.empty():
            plain.keys, plain.values = self._gathered()
        return plain

    @classmethod
    def adopt(cls, plain: Contiguous, pages: Pages, tables: Sequence[Table] | None = None) -> Paged:
        cache = cls(pages, tables[0] if tables else None)
        if plain.offset:
            cache._write(*plain.keys_and_values())
        return cache

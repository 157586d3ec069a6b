"""What caches in pages share: rows of blocks, read through the block table or gathered, and stored as plain."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import mlx.core as mx

from labkit.caches import masks
from labkit.caches.base import Cache, Unsupported
from labkit.caches.block_table import Table
from labkit.caches.layout import Layout
from labkit.caches.paged_reads import int32s
from labkit.caches.paged_rows import PagedRows
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

    def _direct(self, queries: mx.array, scale: float) -> mx.array | None:
        """Attention of a few new tokens by the kernel that reads through the table, where there is a device for it."""
        if target_in_use() is None or queries.shape[2] > FEW:
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
        )

    def _chunk(self, queries: mx.array, lefts: Sequence[int], columns: int, scale: float) -> mx.array:
        """Attention of a prompt's chunk over gathered columns: by the kernel for chunks, or MLX's own operation."""
        length, gathered = queries.shape[2], self.rows.gather_blocks(lefts, columns)
        if target_in_use() is not None:
            start, first = int32s((columns - length,) * len(lefts)), int32s(tuple(lefts))
            return prefill_attention(queries, *gathered, start, first=first, scale=scale)
        padding = int32s(tuple(lefts)) if any(lefts) else None
        mask = masks.causal(length, columns - length, left_padding=padding)
        return mx.fast.scaled_dot_product_attention(queries, *gathered, scale=scale, mask=mask)

    def has_tail_for(self, length: int) -> bool:
        """Whether `open_tail` can always make room for `length` tokens."""
        return self.pages.tail_tokens >= self.pages.block_tokens - 1 + length

    def open_tail(self, length: int) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array]:
        """The pool's keys and values, the tails with room for `length` more tokens, and the table: what a kernel reads
        that writes the new tokens itself (`take_tail`)."""
        self.rows.open_tails(length)
        return self.pages.keys, self.pages.values, self.rows.keys, self.rows.values, self.rows.table()

    def make_room(self, tokens: int) -> None:
        """As `Tailed.make_room`: a table whose shape lasts for some of the tokens to come."""
        self.rows.widen(tokens)

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


def open_together(caches: Sequence[PagedCache], length: int) -> PagedRows:
    """Room for `length` more tokens in the tails of layers that have taken the same tokens, as many of them in each
    layer's. Returns the rows of one layer, which speak for all."""
    for cache in caches:
        cache.rows.open_tails(length)
    if len({tuple(cache.rows.held()) for cache in caches}) > 1:
        for cache in caches:
            cache.rows.flush()
    return caches[0].rows

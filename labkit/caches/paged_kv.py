"""All pools of a model together: what an engine asks for caches, for room, and for the numbers of a moment.

Every full-attention and window layer has pages of its own, of the same number of blocks; recurrent layers have slots.
Layers of one kind get the same tokens in the same order, so that their tables are equal, and one of them speaks for
all; windows hold fewer blocks, never more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from labkit.caches.base import Cache, Unsupported
from labkit.caches.block_pool import BlockPool, PoolExhausted
from labkit.caches.block_table import Table, block_keys
from labkit.caches.contiguous import Contiguous
from labkit.caches.extra_keys import ExtraKeys
from labkit.caches.layout import Layout
from labkit.caches.paged import Paged
from labkit.caches.paged_cache import PagedCache
from labkit.caches.paged_window import PagedWindow
from labkit.caches.pages import DEFAULT_BLOCK, Pages
from labkit.caches.recurrent import Recurrent
from labkit.caches.recurrent_slots import SlottedRecurrent
from labkit.caches.rotating import Rotating
from labkit.kernels.targets import target_in_use

DEVICE_TAIL = 256
"""Tokens of a tail where a write into the pool copies it (`pages.py`)."""


class PagedKV:
    """Pools for every layer of one model.

    Args:
        caches: the model's own serial caches, empty: what is to be paged.
        layouts: of each.
        pool_bytes: what the blocks of all layers may take together. Tails and recurrent states come on top: they do not
            grow with the context (`row_bytes` each row).
        block_tokens: tokens of a block.
        tail_tokens: tokens that a row keeps outside of the pool; chosen for the device by default.
        max_rows: rows at a time; each has one slot for its recurrent states.
        chunk: tokens that are written at a time at most.

    Attributes:
        pages: of each layer that has some, else None.
        slots: of the recurrent layers, or None.

    Raises:
        Unsupported: a kind of cache that cannot be paged.
        ValueError: no room for a single block.
    """

    def __init__(
        self,
        caches: Sequence[Cache],
        layouts: Sequence[Layout | None],
        *,
        pool_bytes: int,
        block_tokens: int = DEFAULT_BLOCK,
        tail_tokens: int | None = None,
        max_rows: int = 32,
        chunk: int = 2048,
    ):
        self._caches, self._layouts = list(caches), list(layouts)
        self.block_tokens, self._chunk = block_tokens, chunk
        for cache, layout in zip(self._caches, self._layouts, strict=True):
            plain = isinstance(cache, (Contiguous, Recurrent)) or (isinstance(cache, Rotating) and not cache.keep)
            if not plain or layout is None:
                raise Unsupported(cache.kind, "lie in pages", "pages hold full attention, windows and recurrent states")
        paged = [layout for layout in self._layouts if layout.kind != "recurrent"]
        if not paged:
            raise Unsupported("recurrent", "lie in pages", "no layer of this model remembers tokens")
        self.block_bytes = sum(layout.bytes_per_token for layout in paged) * block_tokens
        self.blocks = pool_bytes // self.block_bytes
        if self.blocks < 1:
            raise ValueError(
                f"a block of {block_tokens} tokens takes {self.block_bytes} bytes in all layers: pool_bytes "
                f"{pool_bytes} holds none"
            )
        if tail_tokens is None:
            # For kernels two blocks: less than one stays when a tail is flushed, and a step may bring several tokens.
            copied = DEVICE_TAIL if target_in_use() == "cuda" else 0
            least = 2 if target_in_use() else 1
            tail_tokens = block_tokens * max(least, math.ceil(copied / block_tokens))
        self.pages = [
            None
            if layout.kind == "recurrent"
            else Pages(self.blocks, block_tokens, tail_tokens=tail_tokens, layout=layout)
            for layout in self._layouts
        ]
        # A slot for each row and layer, and room for copies of rows that are being stored, shared or moved.
        recurrent = sum(layout.kind == "recurrent" for layout in self._layouts)
        self.slots = BlockPool(max_rows * 4 * recurrent, 1) if recurrent else None
        self.row_bytes = tail_tokens * self.block_bytes // block_tokens + sum(
            layout.bytes_fixed for layout in self._layouts
        )

    # -- caches --------------------------------------------------------------------------------------------------------

    def make_caches(
        self, tokens: Sequence[int] = (), total: int = 0, *, align: int = 1, extra: ExtraKeys = ()
    ) -> tuple[list[Cache], int]:
        """Serial caches of a new request, which begin with the blocks of live requests where they can.

        Args:
            tokens: the prompt, by which whole blocks are found and will be found.
            total: tokens that the request may come to have: their blocks are promised to it.
            align: only beginnings of a multiple of this are shared.
            extra: what else decides what a block holds.

        Returns:
            One cache a layer, and how many tokens they hold already: whole blocks, and never the last token.
        """
        keys = block_keys(tokens, self.block_tokens, extra)
        shared = self._shared_blocks(tokens, keys, align)
        caches = [self._new(index, keys, total) for index in range(len(self._layouts))]
        if shared:
            for cache in caches:
                cache.begin_with(shared)
        return caches, shared * self.block_tokens

    def _new(self, index: int, keys: Sequence[bytes], total: int) -> Cache:
        plain, layout, pages = self._caches[index], self._layouts[index], self.pages[index]
        if pages is None:
            return SlottedRecurrent(self.slots, len(layout.arrays), layout)
        table = Table(pages.pool, keys, self._promise(layout, total))
        if isinstance(plain, Rotating):
            return PagedWindow(pages, plain.max_size, table)
        return Paged(pages, table)

    def _promise(self, layout: Layout, total: int) -> int:
        """Blocks that a row of `total` tokens comes to hold at most: those that do not fit into its tail."""
        if layout.window is not None:
            total = min(total, layout.window + self._chunk + self.block_tokens)
        return total // self.block_tokens

    def _shared_blocks(self, tokens: Sequence[int], keys: Sequence[bytes], align: int) -> int:
        """Blocks at the prompt's beginning that every layer has now, as far as a query behind them sees."""
        if self.slots is not None:
            return 0  # no recurrent states were kept at the end of a block
        step = math.lcm(align, self.block_tokens) // self.block_tokens
        count = min(len(keys), max(0, len(tokens) - 1) // self.block_tokens) // step * step
        while count and not all(self._has(index, keys, count) for index in range(len(self.pages))):
            count -= step
        return count

    def _has(self, index: int, keys: Sequence[bytes], count: int) -> bool:
        window, pool = self._layouts[index].window, self.pages[index].pool
        first = 0 if window is None else max(0, count * self.block_tokens - window) // self.block_tokens
        return all(pool.find(key) is not None for key in reversed(keys[first:count]))

    def adopt(
        self, caches: Sequence[Cache], tokens: Sequence[int] = (), total: int = 0, extra: ExtraKeys = ()
    ) -> list[Cache]:
        """Serial caches that came from elsewhere, written into the pools; blocks that are there are shared."""
        keys, result = block_keys(tokens, self.block_tokens, extra), []
        for index, (cache, pages) in enumerate(zip(caches, self.pages, strict=True)):
            if isinstance(cache, (PagedCache, SlottedRecurrent)):
                result.append(cache)
            elif pages is None:
                mine = SlottedRecurrent(self.slots, len(cache.cache), cache.layout)
                mine.take_states(cache)
                result.append(mine)
            else:
                table = Table(pages.pool, keys, self._promise(self._layouts[index], total))
                kind = PagedWindow if isinstance(cache, Rotating) else Paged
                result.append(kind.adopt(cache, pages, [table]))
        self.entitle(result, tokens, total, extra)
        return result

    def entitle(self, caches: Sequence[Cache], tokens: Sequence[int], total: int, extra: ExtraKeys = ()) -> None:
        """Tell the caches of one row whose they are now: the prompt that they go on with, the blocks promised."""
        keys = block_keys(tokens, self.block_tokens, extra)
        for cache, layout in zip(caches, self._layouts, strict=True):
            if isinstance(cache, PagedCache):
                (table,) = cache.rows.tables
                table.promised = self._promise(layout, total)
                if layout.window is None:
                    table.keys = list(keys)

    # -- room ----------------------------------------------------------------------------------------------------------

    def blocks_needed(self, total: int, tokens: Sequence[int] = (), extra: ExtraKeys = ()) -> int:
        """Blocks that a request needs in the layer where it needs most, less those of its prompt that are there."""
        whole = max(self._promise(layout, total) for layout in self._layouts if layout.kind != "recurrent")
        if not tokens:
            return whole
        pool = next(pages.pool for pages in self.pages if pages is not None)
        there = 0
        for key in block_keys(tokens, self.block_tokens, extra):
            if pool.find(key) is None:
                break
            there += 1
        return max(0, whole - there)

    def fits(self, total: int, tokens: Sequence[int] = (), extra: ExtraKeys = ()) -> bool:
        """Whether every block that a request may come to need can be promised to it now."""
        needed = self.blocks_needed(total, tokens, extra)
        return all(pages.pool.unpromised >= needed for pages in self.pages if pages is not None)

    def require(self, total: int) -> None:
        """Raises PoolExhausted for a request that even the empty pools cannot hold."""
        needed = self.blocks_needed(total)
        if needed > self.blocks:
            raise PoolExhausted(needed, self.blocks, self.blocks, self.block_tokens)

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of blocks and tails."""
        return sum(pages.nbytes + pages.tail_bytes for pages in self.pages if pages is not None)

    def snapshot(self) -> dict[str, Any]:
        """This moment in bytes, over all layers, as plain data for a plot over time.

        Returns:
            held: bytes of the arrays. used: of blocks in use and of the tails' tokens. idle: of blocks with memory
            behind them that nobody uses. unfilled: of tails' free places. saved: what sharing saves. rows, tokens.
        """
        found = dict.fromkeys(("held", "used", "idle", "unfilled", "saved"), 0)
        rows = tokens = 0
        for pages, layout in zip(self.pages, self._layouts, strict=True):
            if pages is None:
                continue
            stats, token = pages.pool.stats(), layout.bytes_per_token
            filled, places, rows, tokens = pages.tails()
            block = token * self.block_tokens
            found["held"] += pages.nbytes + pages.tail_bytes
            found["used"] += stats.used * block + filled * token
            found["idle"] += pages.nbytes - stats.used * block
            found["unfilled"] += (places - filled) * token
            found["saved"] += stats.saved * block
        return found | {"rows": rows, "tokens": tokens}

    def faults(self) -> list[str]:
        """What is wrong with any pool's books."""
        pools = [pages.pool for pages in self.pages if pages is not None]
        return [fault for pool in [*pools, *([self.slots] if self.slots else [])] for fault in pool.faults()]

    @property
    def used(self) -> int:
        """Blocks and slots in use, in all layers: 0 when no row is left."""
        slots = self.slots.used if self.slots else 0
        return slots + sum(pages.pool.used for pages in self.pages if pages is not None)

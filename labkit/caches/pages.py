"""The device's side of paged caches: one layer's blocks, and the rows that lie in them.

How a pool grows without writing in place (`labkit.kernels.in_place`): where MLX copies a whole buffer for every append
(CUDA), a pool that took one token a step would cost its whole size a step. So a row's newest tokens lie in a tail,
[B, H, tail_tokens, D] for all rows: an append touches the tails alone, some hundred kilobytes. When one tail is full,
the finished blocks of all rows move to the pool together, in one write for keys and one for values. Where that write
copies the pool, the price of a token is the pool's bytes, read and written, over `tail_tokens` less a block: with 256,
134 MB of pool cost a layer 1.1 MB a token, as much as 550 of its columns of two heads of 256. Where the back end writes
in place (Metal, a CPU), a block or two are enough. Longer writes (a prompt's chunk) move their finished blocks at once.

That also makes blocks immutable: sharing needs no locks, and copy on write happens in one place, when tokens are taken
back out of a finished block (`PagedRows.truncate`). Kernels read pool, table and tail in one launch, and their shapes
change only when the table gets wider or the pool grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import mlx.core as mx

from labkit.caches.block_pool import BlockPool
from labkit.caches.layout import Layout, keys_and_values

if TYPE_CHECKING:
    from labkit.caches.paged_rows import PagedRows

DEFAULT_BLOCK = 16
"""Tokens of a block by default."""

TABLE_STEP = 32
"""Columns by which the device's table widens: its shape stays for that many blocks."""

GROWTH = 1.5
"""A pool without room for a block that it may hold grows to this much of what it holds."""


class Pages:
    """One layer's blocks: keys and values [N, H, block_tokens, D] on the device, made when the first tokens come.

    Args:
        capacity: blocks that there may be.
        block_tokens: tokens of a block.
        tail_tokens: tokens that a row keeps outside of the pool, a multiple of `block_tokens`; one block by default.
        layout: of the layer, where it is known beforehand.

    Attributes:
        pool: which blocks are whose.
        keys, values: block 0 is all zeros.
        written_bytes: what moved into the pool so far.
    """

    def __init__(
        self, capacity: int, block_tokens: int, *, tail_tokens: int | None = None, layout: Layout | None = None
    ):
        self.pool = BlockPool(capacity, block_tokens)
        self.block_tokens = block_tokens
        self.tail_tokens = block_tokens if tail_tokens is None else tail_tokens
        if self.tail_tokens < block_tokens or self.tail_tokens % block_tokens:
            raise ValueError(f"tail_tokens must be a multiple of block_tokens {block_tokens}, not {tail_tokens}")
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.layout = layout
        if layout is not None:
            self.keys, self.values = self._zeros(1)
        self.written_bytes = 0
        self._rows: WeakSet[PagedRows] = WeakSet()

    def tails(self) -> tuple[int, int, int, int]:
        """Of all rows that live here: tokens in tails, places in tails, rows, and all their tokens."""
        alive = [rows for rows in self._rows if rows.keys is not None]
        filled = sum(sum(rows.held()) for rows in alive)
        count = sum(len(rows) for rows in alive)
        return filled, count * self.tail_tokens, count, sum(sum(rows.lengths) for rows in alive)

    @property
    def tail_bytes(self) -> int:
        """Bytes of all tails."""
        return sum(rows.nbytes for rows in self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks as allocated."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def know(self, kind: str, keys: mx.array, values: mx.array, window: int | None = None) -> None:
        """Learn what a token looks like from keys and values [B, H, L, D].

        Raises:
            ValueError: tokens of another shape or dtype than those before.
        """
        layout = keys_and_values(kind, keys, values, window)
        if self.layout is None:
            self.layout = layout
        elif self.layout != layout:
            raise ValueError(f"this pool holds {self.layout.arrays}, not {layout.arrays}")
        if self.keys is None:
            self.keys, self.values = self._zeros(1)

    def write(self, blocks: Sequence[int], keys: mx.array, values: mx.array) -> None:
        """Fill blocks, which the caller got from `pool`, with keys and values [n, H, block_tokens, D]."""
        needed = self.pool.touched + 1
        if needed > self.keys.shape[0]:
            room = min(max(needed, int(GROWTH * needed)), self.pool.capacity + 1) - self.keys.shape[0]
            self.keys, self.values = (
                mx.concatenate([old, new]) for old, new in zip((self.keys, self.values), self._zeros(room), strict=True)
            )
        index = mx.array(blocks, dtype=mx.int32)
        self.keys[index] = keys
        self.values[index] = values
        self.written_bytes += keys.nbytes + values.nbytes

    def _zeros(self, blocks: int) -> tuple[mx.array, mx.array]:
        return tuple(
            mx.zeros((blocks, spec.shape[0], self.block_tokens, spec.shape[1]), getattr(mx, spec.dtype))
            for spec in self.layout.arrays
        )

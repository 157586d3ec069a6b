"""The newest columns of a cache in a small tail beside its buffers: the in-place rule on a GPU.

No kernel writes into its inputs, and MLX on CUDA copies a whole buffer to append one column (labkit.kernels.in_place).
So a step returns the tail anew, a few hundred columns however long the context; a full tail is settled into the
buffers, once in `TAIL` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

TAIL = 256
"""Columns of a tail. Each step copies it (1 MB a layer at 2 heads of 256 in bf16), each settling copies the buffers."""

AHEAD = 2048
"""Columns of which a multiple is reserved where a buffer's shape should last."""


class Tail(NamedTuple):
    """keys, values: [B, H, TAIL, D], whose first columns count. settled: columns before them, in the buffers."""

    keys: mx.array
    values: mx.array
    settled: int


class Tailed:
    """What a cache of columns needs for a tail.

    Everything else sees the buffers alone: a reader of `keys` or `values` finds every column in them, since reading
    settles the tail, and setting them lets it go.
    """

    _tail: Tail | None = None

    def open_tail(self, length: int) -> tuple[mx.array, mx.array, Tail]:
        """Both buffers, and a tail with room for `length` more columns after those that it holds.

        Raises:
            ValueError: more columns than a tail has, or shapes that are not known yet.
        """
        if not 0 < length <= TAIL:
            raise ValueError(f"a tail takes 1 to {TAIL} columns, not {length}")
        if self._tail is not None and self._filled - self._tail.settled not in range(TAIL - length + 1):
            self.settle()  # full, or trimmed to before it
        if self._keys is None:
            self.reserve(1)
        if self._tail is None:
            batch, heads = self._keys.shape[:2]
            empty = (mx.zeros((batch, heads, TAIL, b.shape[3]), b.dtype) for b in (self._keys, self._values))
            self._tail = Tail(*empty, self._filled)
        return self._keys, self._values, self._tail

    def take_tail(self, keys: mx.array, values: mx.array, length: int) -> None:
        """The tail's arrays [B, H, TAIL, D] after a step that wrote `length` columns after those it held."""
        self._tail = Tail(keys, values, self._tail.settled)
        self._advance_columns(length)

    def settle(self) -> None:
        """Write the tail's columns into the buffers, and let it go."""
        tail = self._tail
        if tail is None:
            return
        self._tail = None
        if self._filled <= tail.settled:
            return
        start, end = tail.settled, self._filled
        news = [part[:, :, : end - start] for part in (tail.keys, tail.values)]
        buffers = self._keys, self._values
        if end > self._keys.shape[2]:
            pairs = zip(buffers, news, strict=True)
            self.keys, self.values = (_longer(*pair, start, self._capacity_for(end)) for pair in pairs)
            return
        for buffer, new in zip(buffers, news, strict=True):
            buffer[:, :, start:end] = new
        self.keys, self.values = buffers

    def make_room(self, tokens: int) -> None:
        """Room in the buffers for a whole tail, if so many tokens are to come: by `AHEAD` columns at once, so that
        their shape seldom changes, and rows of several lengths share one.
        """
        if self._keys is not None and self._keys.shape[2] >= self._filled + min(tokens, TAIL):
            return
        wanted = self._filled + tokens
        self.reserve(min(wanted, -(-(self._filled + TAIL) // AHEAD) * AHEAD))

    def reserve(self, tokens: int) -> None:
        """Give the buffers room for `tokens` tokens now, so that their shape stays.

        Raises:
            ValueError: if the arrays' shapes are not known yet.
        """
        if self.layout is None:
            raise ValueError("the shapes are not known before the first token: make the cache with a layout")
        like = [
            mx.zeros((self.batch_size, spec.shape[0], 0, spec.shape[1]), getattr(mx, spec.dtype))
            for spec in self.layout.arrays
        ]
        self._grow(tokens, *like)


def _longer(buffer: mx.array, new: mx.array, start: int, capacity: int) -> mx.array:
    """The buffer's first columns, the new ones, and free room up to `capacity`."""
    batch, heads, length, dim = new.shape
    room = mx.zeros((batch, heads, capacity - start - length, dim), new.dtype)
    return mx.concatenate([buffer[:, :, :start], new, room], axis=2)

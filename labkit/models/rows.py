"""What a forward must know of its rows, as device arrays: the second half of the forward contract's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Rows:
    """Where the rows of one forward stand. Read once, before any cache is updated.

    Attributes:
        positions: the position of each row's first column, int32 [B]; or int32 [3, B, L], one triple (time, height,
            width) a token, for media. With left padding the first column's position is negative.
        lengths: valid tokens of this forward in each row, int32 [B]; columns after them are right padding. None: all.
        left_padding: columns of padding before the first token of each row, int32 [B]; only in a row's first forward.
        block_tables: blocks of a shared pool, int32 [B, N], for paged caches.
        adapters: the low-rank adapter of each row, int32 [B], -1 for none.
    """

    positions: mx.array
    lengths: mx.array | None = None
    left_padding: mx.array | None = None
    block_tables: mx.array | None = None
    adapters: mx.array | None = None

    @classmethod
    def single(cls, position: int = 0) -> Rows:
        """One row whose first column stands at `position`."""
        return cls(mx.array([position], dtype=mx.int32))

    @classmethod
    def batch(
        cls,
        positions: Sequence[int],
        *,
        lengths: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> Rows:
        """Several rows, from numbers on the host."""

        def array(values: Sequence[int] | None) -> mx.array | None:
            return None if values is None else mx.array(list(values), dtype=mx.int32)

        return cls(array(positions), array(lengths), array(left_padding))

    @property
    def count(self) -> int:
        """Rows."""
        return self.positions.shape[-1] if self.positions.ndim == 1 else self.positions.shape[1]

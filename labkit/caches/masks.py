"""Which columns a query may see."""

from __future__ import annotations

import mlx.core as mx


def causal(n: int, offset: int = 0, *, window: int | None = None, left_padding: mx.array | None = None) -> mx.array:
    """The mask of `n` new columns after `offset` older ones.

    Returns:
        bool, [n, offset + n], or [B, 1, n, offset + n] with `left_padding` [B]: True where query i, in column
        offset + i, may see the column: not later, not `window` or more columns back, not padding.
    """
    columns = mx.arange(offset + n)
    queries = mx.arange(offset, offset + n)[:, None]
    mask = queries >= columns
    if window is not None:
        mask = mask & (queries < columns + window)
    if left_padding is not None:
        mask = mask & (left_padding[:, None, None, None] <= columns)
    return mask


def in_ring(width: int, column: int, filled: int, *, window: int, left_padding: mx.array) -> mx.array:
    """The mask of the token written last, in a ring of `width` columns.

    Args:
        column: the one behind the newest token's. filled: columns in use, `width` once it has turned.
        left_padding: [B], of the columns in temporal order.

    Returns:
        bool, [B, 1, 1, width].
    """
    age = column - 1 - mx.arange(width)  # steps back from the newest
    if filled == width:
        age = age % width
    return (age >= 0) & (age < window) & (filled - 1 - age >= left_padding[:, None, None, None])

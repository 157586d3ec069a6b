"""Rows of several lengths in one rectangle [B, H, T, D]: put together right-justified, and shifted one by one."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

Pair = tuple[mx.array, mx.array]


def right_justified(parts: Sequence[tuple[Pair | None, int]], filled: int, capacity: int) -> Pair:
    """Keys and values of several caches in one pair of buffers, as copies: every last column becomes `filled` - 1.

    Args:
        parts: keys and values in use, [B, H, T, D] each with T at most `filled`, and B; or None for B rows without any.
        filled, capacity: columns of the result in use, and in all. What no row fills is zero.
    """
    known = next(pair for pair, _ in parts if pair is not None)

    def joined(which: int) -> mx.array:
        _, heads, _, dim = known[which].shape
        blocks = []
        for pair, rows in parts:
            if pair is None:
                blocks.append(mx.zeros((rows, heads, capacity, dim), known[which].dtype))
                continue
            around = (filled - pair[which].shape[2], capacity - filled)
            blocks.append(mx.pad(pair[which], [(0, 0), (0, 0), around, (0, 0)]))
        return mx.concatenate(blocks)

    return joined(0), joined(1)


def roll_rows(x: mx.array, shifts: mx.array) -> mx.array:
    """x [B, H, T, D] with row b rolled right along T by shifts[b]."""
    n = x.shape[2]
    index = (mx.arange(n)[None, :] - shifts[:, None]) % n
    return mx.take_along_axis(x, index[:, None, :, None], axis=2)

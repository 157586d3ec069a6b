"""What the ring of a paged window holds: its tokens' numbers, [B, 1, columns, 1], in place of keys and values.

Token t is number t + 1, so that `NOTHING` stands where plain rings have the zeros of padding and free room.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from labkit.caches.ring import Ring

NOTHING = 0


def of_span(start: int, end: int) -> mx.array:
    """The tokens start to end of one row."""
    return mx.arange(start + 1, end + 1, dtype=mx.int32)[None, None, :, None]


def of_new(length: int, skips: Sequence[int], counts: Sequence[int], lengths: Sequence[int]) -> mx.array:
    """The next `length` columns: row b has `counts[b]` tokens from column `skips[b]` on, behind `lengths[b]` older."""
    numbers = np.full((len(lengths), 1, length, 1), NOTHING, np.int32)
    for b, (skip, count, first) in enumerate(zip(skips, counts, lengths, strict=True)):
        numbers[b, 0, skip : skip + count, 0] = np.arange(first, first + count) + 1
    return mx.array(numbers)


def of_ring(plain: Ring) -> Ring:
    """The ring itself, with numbers where a plain one has keys and values."""
    numbers = None if plain.keys is None else _in_columns(plain)
    return type(plain).from_state((numbers, numbers, *plain.state[2:]))


def _in_columns(ring: Ring) -> mx.array:
    """The numbers of a plain ring's tokens, column by column."""
    offsets = ring.offset.tolist() if ring.batched else [ring.offset] * ring.batch_size
    width = ring.keys.shape[2]
    age = (ring._idx - 1 - np.arange(width)) % width
    numbers = np.array([np.maximum(offset - age, NOTHING) for offset in offsets], np.int32)
    return mx.array(numbers[:, None, :, None])

"""Which tokens of each row count: a span [first, last) a row, on the device.

Pads may stand left of it, right of it, or both; kernels neither read nor write state or conv tail for them.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from labkit.kernels.placement import on_device


@lru_cache(maxsize=256)
def full_spans(batch: int, length: int) -> mx.array:
    """[B, 2] int32: every token of every row counts."""
    return on_device(mx.array([[0, length]] * batch, dtype=mx.int32))


def row_spans(
    batch: int, length: int, lengths: mx.array | None = None, left_padding: mx.array | None = None
) -> mx.array:
    """Spans from the two arrays of a batch.

    Args:
        batch, length: B rows of T tokens.
        lengths: [B], where each row's tokens end, counted with its left padding as mlx-lm's caches do; T without it.
        left_padding: [B], how many tokens at the front do not count; 0 without it. Both may lie outside of 0..T.

    Returns:
        [B, 2] int32.

    Raises:
        ValueError: an array of another length than B.
    """
    for name, array in (("lengths", lengths), ("left_padding", left_padding)):
        if array is not None and array.shape != (batch,):
            raise ValueError(f"{name} needs shape ({batch},), one entry a row, not {array.shape}")
    if lengths is None and left_padding is None:
        return full_spans(batch, length)
    ends = mx.full((batch,), length, dtype=mx.int32) if lengths is None else lengths.astype(mx.int32)
    begins = mx.zeros((batch,), dtype=mx.int32) if left_padding is None else left_padding.astype(mx.int32)
    return mx.stack([begins, ends], axis=1)

"""Choosing tokens in plain MLX ops: the oracles of the sampling kernels."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.signature import Launch


def argmax(launch: Launch) -> list[mx.array]:
    """The index of each row's largest number; the first of equals, and 0 where there is no number."""
    logits = launch.inputs[0].astype(mx.float32)
    is_number = mx.logical_not(mx.isnan(logits))
    largest = mx.max(mx.where(is_number, logits, -mx.inf), axis=-1, keepdims=True)
    # mx.argmax of a boolean row is the first True, or 0 if there is none.
    return [mx.argmax(is_number & (logits == largest), axis=-1)]

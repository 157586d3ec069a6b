"""Arrays as the bytes that they are in memory."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


def as_bytes(array: mx.array) -> mx.array:
    """uint8 [nbytes], one after the other: the array's own memory, or a copy's if it is not whole there (a view with
    strides)."""
    flat = array.reshape(-1)
    return mx.contiguous(flat) if array.itemsize == 1 else flat.view(mx.uint8)


def from_bytes(data: mx.array, like: mx.array) -> mx.array:
    """What `as_bytes` gave, or bytes like it, as an array of another's shape and dtype."""
    return (data if like.dtype == mx.uint8 else data.view(like.dtype)).reshape(like.shape)


def whole(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Evaluated arrays, each whole in memory: they themselves, or copies. `mx.contiguous` would copy a small part of a
    large buffer too, and on CUDA small arrays of its making may lie in the host's memory."""
    made = [from_bytes(as_bytes(array), array) if array.size else array for array in arrays]
    mx.eval(made)
    return made

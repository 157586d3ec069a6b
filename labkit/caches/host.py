"""A cache's arrays as memory that the host writes: the in-place rule (labkit.kernels.in_place) where the CPU computes.

MLX's arrays never change, and may share their bytes with others. So the host writes only into buffers that it made
itself or that were made for this cache alone, and only what was never handed out: `Lent` sees every reading of an
attribute, and what a reader may have kept is copied before it would change. Between readings a step writes its own
tokens and copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass
class HostViews:
    """numpy views of buffers that the host made. `lent`: the columns (or for a state, any or none) that others saw."""

    arrays: list[np.ndarray]
    lent: int = 0

    @cached_property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where each view begins, and the bytes from row to row of it: asked for at every token, so kept."""
        return tuple(view.ctypes.data for view in self.arrays), tuple(view.strides[0] for view in self.arrays)


def views(arrays: list[mx.array | None]) -> HostViews | None:
    """Of arrays that nobody else has, to be written by the host; None if it does not compute in their dtype."""
    if any(array is None or array.dtype != mx.float32 for array in arrays):
        return None
    return HostViews([np.array(array, copy=False) for array in arrays])


class Lent:
    """An attribute that tells its owner's `_lend` when it is read, and its `_forget` when it is set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        instance._lend()
        return getattr(instance, self._name)

    def __set__(self, instance: Any, value: Any) -> None:
        instance._forget()
        setattr(instance, self._name, value)


def zeros(shape: tuple[int, ...]) -> tuple[mx.array, np.ndarray]:
    """A float32 array and a view of its memory that can be written."""
    array = mx.zeros(shape, mx.float32)
    mx.eval(array)
    return array, np.array(array, copy=False)


def copied(array: mx.array) -> tuple[mx.array, np.ndarray]:
    """A float32 copy of an array and a view of its memory that can be written."""
    own = mx.array(np.asarray(array.astype(mx.float32)))
    return own, np.array(own, copy=False)


def shares_memory() -> bool:
    """Whether the host reads and writes arrays where they lie: the CPU computes, or a GPU with the same memory."""
    return mx.default_device().type != mx.gpu or mx.metal.is_available()

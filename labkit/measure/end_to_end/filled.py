"""Caches as they are after `context` tokens, filled with random values: a decode step costs the same whatever they
hold, and reading 128K tokens first would cost minutes a point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from labkit.caches import Cache, Layout
from labkit.caches.layout import ArraySpec

ROOM = 256  # free columns behind the context, where a cache can be told: growing is no part of a step


class Filled:
    """The arrays of every layer of one row at a context, shared by all sides that decode from it.

    Args:
        layouts: of each cache, as `Model.layouts` has them.
        context: tokens.
        seed: of the values; None leaves them zero, for who looks at shapes alone.

    Raises:
        ValueError: a cache whose arrays are not known beforehand.
    """

    def __init__(self, layouts: Sequence[Layout | None], context: int, seed: int | None = 0):
        if any(layout is None for layout in layouts):
            raise ValueError("a cache of this model does not say its arrays beforehand: its contexts must be prefilled")
        self.context = context
        self.layouts = list(layouts)
        self.layers: list[list[mx.array]] = []
        for index, layout in enumerate(layouts):
            if seed is None:
                self.layers.append([mx.zeros(_shape(spec, context), getattr(mx, spec.dtype)) for spec in layout.arrays])
                continue
            keys = mx.random.split(mx.random.key((seed << 16) + index), len(layout.arrays))
            self.layers.append([_drawn(s, context, k) for s, k in zip(layout.arrays, keys, strict=True)])
            mx.eval(self.layers[-1])

    def into(self, caches: Sequence[Cache]) -> list[Cache]:
        """Fill empty caches of labkit's kinds."""
        for cache, layout, arrays in zip(caches, self.layouts, self.layers, strict=True):
            if layout.bytes_per_token:
                if hasattr(cache, "reserve"):
                    cache.reserve(self.context + ROOM)
                cache.append(*arrays)
            else:
                _set_states(cache, arrays)
        mx.eval([cache.state for cache in caches])
        return list(caches)

    def into_mlx_lm(self, caches: Sequence[Any]) -> list[Any]:
        """Fill empty caches of mlx-lm's classes."""
        for cache, layout, arrays in zip(caches, self.layouts, self.layers, strict=True):
            if layout.bytes_per_token:
                cache.update_and_fetch(*arrays)
            else:
                _set_states(cache, arrays)
        mx.eval([cache.state for cache in caches])
        return list(caches)


def _set_states(cache: Any, arrays: Sequence[mx.array]) -> None:
    for index, array in enumerate(arrays):
        cache[index] = array + 0  # an array of its own: a state may be updated in place


def _drawn(spec: ArraySpec, context: int, key: mx.array) -> mx.array:
    scale = 1.0 if spec.name == "keys" else 0.1
    return mx.random.normal(_shape(spec, context), getattr(mx, spec.dtype), scale=scale, key=key)


def _shape(spec: ArraySpec, context: int) -> tuple[int, ...]:
    return (1, spec.shape[0], context, *spec.shape[1:]) if spec.per_token else (1, *spec.shape)

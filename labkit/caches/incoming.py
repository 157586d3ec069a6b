"""What a cache of keys and values takes in: tokens that continue what it holds. Asked before anything moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

if TYPE_CHECKING:
    from labkit.caches.base import Cache


def check_tokens(cache: Cache, keys: mx.array, values: mx.array) -> None:
    """Raise ValueError unless keys [B, H, L, Dk] and values [B, H, L, Dv] are of the cache's rows, heads and widths.

    An empty serial cache takes any rows, and one that was made without a layout any heads and widths.
    """
    first, second = keys.shape, values.shape
    rows = cache.batch_size if cache.batched or not cache.empty() else None
    if len(first) == len(second) == 4 and first[:3] == second[:3] and (rows is None or first[0] == rows):
        if cache.layout is None:
            return
        (heads, width), (others, depth) = (spec.shape for spec in cache.layout.arrays)
        if (first[1], second[1], first[3], second[3]) == (heads, others, width, depth):
            return
    held = f"{'any' if rows is None else rows} rows"
    if cache.layout is not None:
        held += " of " + " and ".join(f"{spec.name} {list(spec.shape)} a token" for spec in cache.layout.arrays)
    raise ValueError(
        f"keys {first} and values {second} are not [B, H, L, D] of one B, H and L that go on in a {cache.kind} cache "
        f"of {held}; nothing was written"
    )

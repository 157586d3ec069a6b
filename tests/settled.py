"""Counting MLX's memory: its threads let go of what they have computed some time after it is there."""

from __future__ import annotations

import gc
import time

import mlx.core as mx


def settled_memory() -> int:
    """Bytes in use, without what MLX's threads only have not let go of yet: the least of several looks."""
    gc.collect()
    mx.synchronize()
    least = mx.get_active_memory()
    for _ in range(10):
        time.sleep(0.01)
        least = min(least, mx.get_active_memory())
    return least


def falls_to(limit: float, seconds: float = 60) -> bool:
    """Whether no more than `limit` bytes are in use, now or as soon as MLX's threads have let go; collects nothing."""
    until = time.monotonic() + seconds
    mx.synchronize()
    while mx.get_active_memory() > limit:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True

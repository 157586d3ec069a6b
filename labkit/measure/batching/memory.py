"""Bytes that rows of keys and values keep alive, in one rectangle or in pages."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from labkit.caches import Contiguous, Paged, Pages, Table, block_keys

HEADS, WIDTH = 2, 256  # of keys and values in Qwen3.5 and 3.6


def live_bytes(lengths: Sequence[int], *, shared: int = 0, block_tokens: int | None = None) -> int:
    """Bytes in use for one layer's keys and values of a batch, counted by MLX's allocator, everything else let go.

    Args:
        lengths: tokens of each row.
        shared: of them, at the beginning and the same in all rows.
        block_tokens: of pages; None puts the rows into one rectangle.
    """
    mx.synchronize()
    before = mx.get_active_memory()
    batch = _batch(lengths, shared, block_tokens)
    mx.synchronize()
    held = mx.get_active_memory() - before
    del batch
    return held


def _batch(lengths: Sequence[int], shared: int, block_tokens: int | None) -> Contiguous | Paged:
    pages = block_tokens and Pages(sum(lengths) // block_tokens + 2 * len(lengths), block_tokens)
    common, rows = _tokens(shared), []
    for number, length in enumerate(lengths):
        own = range((number + 1) << 20, ((number + 1) << 20) + length - shared)
        keys = block_keys([*range(-shared, 0), *own], block_tokens) if pages else None
        row = Paged(pages, Table(pages.pool, keys)) if pages else Contiguous()
        for part in (common, _tokens(length - shared)):
            if part[0].shape[2]:
                row.update_and_fetch(*part)
        mx.eval(row.state[:4])
        rows.append(row)
    batch = type(rows[0]).merge(rows)
    mx.eval(batch.state[:4])
    return batch


def _tokens(count: int) -> tuple[mx.array, mx.array]:
    return tuple(mx.ones((1, HEADS, count, WIDTH), mx.bfloat16) for _ in "kv")

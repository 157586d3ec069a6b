"""What every graph does before its layers run: the rows checked, and the caches made to stand where the rows say."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from labkit.caches import Cache
from labkit.models.rows import Rows

COUNTING = ("contiguous", "rotating")
"""Kinds of cache that know how many tokens they hold, paged or not."""


def check_rows(tokens: mx.array, rows: Rows) -> None:
    """Raise a ValueError unless tokens are whole numbers [B, L] for B rows that stand at plain positions."""
    if not isinstance(tokens, mx.array) or not mx.issubdtype(tokens.dtype, mx.integer):
        given = tokens.dtype if isinstance(tokens, mx.array) else type(tokens).__name__
        raise ValueError(f"tokens are an mx.array of whole numbers, not {given}")
    if not isinstance(rows, Rows):
        raise ValueError(f"rows are labkit.models.Rows, such as Rows.batch([0]), not {rows!r}")
    if tokens.ndim != 2 or tokens.shape[0] != rows.count or tokens.shape[1] == 0:
        raise ValueError(f"tokens {list(tokens.shape)} for {rows.count} rows: expected [rows, length]")
    if rows.positions.ndim != 1 or rows.block_tables is not None or rows.adapters is not None:
        raise ValueError("this graph takes neither media positions nor block tables nor adapters by row")


def place(caches: Sequence[Cache], rows: Rows) -> None:
    """Make the caches stand where `rows` says: one array for all batched layers, a check for the serial ones.

    Raises:
        ValueError: a serial cache that holds another number of tokens.
    """
    serial: set[int] | None = None
    for index, cache in enumerate(caches):
        if _is_batch_with_positions(cache):
            cache.offset = rows.positions
        elif cache.kind in COUNTING:
            serial = set(rows.positions.tolist()) if serial is None else serial
            if serial != {cache.offset}:
                raise ValueError(
                    f"rows begin at positions {sorted(serial)}, but cache {index} holds {cache.offset} tokens"
                )


def prepare(caches: Sequence[Cache], rows: Rows, length: int) -> bool:
    """Tell the caches of the padding in a forward of `length` columns; whether there is some, and `finalize` is due."""
    if rows.lengths is None and rows.left_padding is None:
        return False
    for cache in caches:
        if rows.left_padding is not None:
            if _is_batch_with_positions(cache):
                # The rows' positions count the padding already.
                cache.offset = rows.positions + rows.left_padding
            cache.prepare(left_padding=rows.left_padding)
        if rows.lengths is not None:
            cache.prepare(lengths=rows.lengths, right_padding=length - rows.lengths)
    return True


def _is_batch_with_positions(cache: Cache) -> bool:
    return cache.batched and hasattr(cache, "offset")

"""Where a few new tokens stand among a cache's columns, from two counts that the host knows."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.fused import reference
from labkit.kernels.launch import Kernel

PLACE_COLUMNS = Kernel.from_file(
    Path(__file__).parent / "place_columns.metal",
    ["before", "settled", "padding", "tokens", "length"],
    ["placed"],
    reference=reference.place_columns,
)

REPEATED = 8
"""How often a count that all tokens share is written: so many words are a buffer, not a `constant`."""

_THREADS = 32


def place_columns_call(
    before: mx.array, settled: mx.array, batch: int, length: int, padding: mx.array | None = None
) -> dict:
    """The arguments of `PLACE_COLUMNS` for `place_columns`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    for name, count in (("before", before), ("settled", settled)):
        if count.shape != (1,) or count.dtype != mx.int32:
            raise ValueError(f"{name} is one number, int32 [1], not {count.shape} {count.dtype}")
    if batch < 1 or length < 1:
        raise ValueError(f"at least one row of at least one token, not {batch} of {length}")
    if padding is not None and (padding.shape != (batch,) or padding.dtype != mx.int32):
        raise ValueError(f"padding is int32 [{batch}], a number for each row, not {padding.shape} {padding.dtype}")
    tokens = batch * length
    words = 2 * tokens + 2 * REPEATED
    return {
        "inputs": [before, settled, before if padding is None else padding, tokens, length],
        "template": [("PADDED", padding is not None), ("REPEATED", REPEATED)],
        "grid": (-(-words // _THREADS) * _THREADS, 1, 1),
        "threadgroup": (_THREADS, 1, 1),
        "output_shapes": [(words,)],
        "output_dtypes": [mx.int32],
    }


@takes_arrays
def place_columns(
    before: mx.array,
    settled: mx.array,
    batch: int,
    length: int,
    padding: mx.array | None = None,
    *,
    target: str | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """What attention asks of L new tokens of each of B rows that stand in one rectangle, in one launch: its parts lie
    behind each other in one array, wide enough to be in a GPU's memory.

    Args:
        before: int32 [1], columns before these. settled: int32 [1], those of them that stand in the buffers; the others
            are in the tail.
        batch, length: B and L. padding: int32 [B], columns of each row that hold nothing, at its left; none by default.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        first, last: int32 [B * L], row by row: each token sees the columns from first to below last, itself included.
        settled: int32 [8], all the same. write: int32 [8], all the same: the tail's column of a row's first new token.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: left padding as in mlx-lm's `BatchKVCache`.
    """
    call = place_columns_call(before, settled, batch, length, padding)
    (placed,) = PLACE_COLUMNS(**call, target=target)
    tokens = batch * length
    return tuple(mx.split(placed, [tokens, 2 * tokens, 2 * tokens + REPEATED]))

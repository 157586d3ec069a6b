"""What callers give by row - which rows, how many tokens of each - checked, and as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import mlx.core as mx

from labkit.caches.base import Unsupported


def row_numbers(rows: Any, batch: int) -> mx.array:
    """`rows` of `batch` as an int32 array, so that indexing with it gathers (a copy) and never slices (a view).

    Raises:
        IndexError: a row that does not exist: MLX would read beyond the array.
        ValueError: what is no number of a row, such as a mask of truth values, which would be taken for rows 0 and 1.
    """
    numbers = rows.tolist() if isinstance(rows, mx.array) else list(rows)
    if any(isinstance(number, bool) or not isinstance(number, Integral) for number in numbers):
        raise ValueError(f"rows are named by their numbers, not {numbers}")
    if any(not 0 <= number < batch for number in numbers):
        raise IndexError(f"rows {numbers} of a batch of {batch}")
    return mx.array(numbers, dtype=mx.int32)


def to_trim(n: int, present: int) -> int:
    """How many of `present` tokens a trim by `n` takes.

    Raises:
        ValueError: a negative `n`, which would bring columns into view that were never written, or no whole number.
    """
    if not isinstance(n, Integral) or n < 0:
        raise ValueError(f"a cache cannot be trimmed by {n!r} tokens")
    return min(present, n)


def to_keep(accepted: Any, batch: int) -> list[int]:
    """How many tokens of a span each of `batch` rows keeps, from an int for all or one a row.

    Raises:
        ValueError: a negative number, which would take out tokens from before the checkpoint.
    """
    kept = per_row(accepted, batch)
    if min(kept, default=0) < 0:
        raise ValueError(f"a cache cannot keep {accepted} tokens of a span")
    return kept


def columns_of_tokens(written: Sequence[tuple[int, Sequence[int]]]) -> list[list[int]]:
    """Where each row's tokens stand among all columns of a span.

    Args:
        written: of each forward, its columns and how many of them are tokens in each row; padding stands right of them.

    Returns:
        For each row the columns of its tokens, counted over all forwards side by side.
    """
    rows: list[list[int]] = [[] for _ in written[0][1]]
    start = 0
    for width, counts in written:
        for row, count in zip(rows, counts, strict=True):
            row.extend(range(start, start + count))
        start += width
    return rows


def one_for_all(values: Sequence[int], kind: str) -> int:
    """The number that all rows of a serial cache of this kind have in common.

    Raises:
        Unsupported: rows that would come to differ.
    """
    if len(set(values)) > 1:
        raise Unsupported(f"serial {kind}", "hold rows of several lengths", "merge serial rows instead")
    return values[0]


def per_row(value: Any, batch: int) -> list[int]:
    """An int for all, a sequence or an array [B] -> a list of `batch` ints."""
    if isinstance(value, int):
        return [value] * batch
    values = [int(item) for item in (value.tolist() if isinstance(value, mx.array) else value)]
    if len(values) != batch:
        raise ValueError(f"{len(values)} values for {batch} rows")
    return values

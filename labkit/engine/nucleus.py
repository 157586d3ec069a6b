"""The most likely tokens of a row, found by the host without sorting a vocabulary: where the CPU computes.

MLX sorts on a CPU one number at a time; a draw from a nucleus needs the few largest alone.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

FIRST = 256  # tokens that are looked at first; a nucleus seldom has more
WIDER = 8  # times as many, where they were not enough


def apply_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """As mlx-lm's: -inf for all but the smallest set of most likely tokens whose probability reaches `top_p`, and
    whatever is as likely as the last of them. Masses are summed in float64, from the largest down, so the choice does
    not depend on how many tokens were looked at.

    Args:
        logprobs: [B, V], of a CPU; waited for.
    """
    values = np.array(logprobs.astype(mx.float32), copy=False)
    wanted = top_p * np.exp(values).sum(axis=-1, dtype=np.float64)
    last = [_last(row, mass) for row, mass in zip(values, wanted, strict=True)]
    threshold = mx.array(np.array(last, dtype=np.float32)).astype(logprobs.dtype)[:, None]
    return mx.where(logprobs < threshold, -mx.inf, logprobs)


def _last(row: np.ndarray, mass: float) -> np.float32:
    """The value of the least likely token of a row's nucleus."""
    count = min(FIRST, len(row))
    while True:
        largest = np.sort(np.partition(row, len(row) - count)[len(row) - count :])[::-1]
        reached = np.cumsum(np.exp(largest), dtype=np.float64)
        inside = int(np.count_nonzero(reached < mass))
        if inside < count or count == len(row):
            return largest[min(inside, count - 1)]
        count = min(WIDER * count, len(row))


def apply_top_k(logprobs: mx.array, top_k: int) -> mx.array:
    """-inf for all but the `top_k` most likely tokens of each row; of equal ones the lower are kept.

    Args:
        logprobs: [B, V], of a CPU; waited for.
    """
    values = np.array(logprobs.astype(mx.float32), copy=False)
    kept = np.zeros(values.shape, bool)
    for row, chosen in zip(values, kept, strict=True):
        chosen[_largest(row, top_k)] = True
    return mx.where(mx.array(kept), logprobs, -mx.inf)


def best(logprobs: mx.array, count: int) -> np.ndarray:
    """The `count` most likely tokens, int64, the most likely first, of equal ones the lower.

    Args:
        logprobs: [V], of a CPU; waited for.
    """
    values = np.array(logprobs.astype(mx.float32), copy=False)
    largest = _largest(values, count)
    return largest[np.argsort(-values[largest], kind="stable")]


def _largest(row: np.ndarray, count: int) -> np.ndarray:
    """Where the `count` largest values are, in order of place; of equal ones the first."""
    least = np.partition(row, len(row) - count)[len(row) - count]
    above, equal = np.flatnonzero(row > least), np.flatnonzero(row == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))

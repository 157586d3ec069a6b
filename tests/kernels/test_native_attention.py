"""Attention's loops on a CPU: right for any number of query heads, and a token's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest

TOKENS, WIDTH, PADDING = 40, 64, 3


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, column: int) -> np.ndarray:
    """q [tokens, group, WIDTH]; k, v: [columns, WIDTH]."""
    from labkit.kernels.attention import loops

    scale, y, place = np.array([WIDTH**-0.5], np.float32), np.full_like(q, np.nan), lambda array: array.ctypes.data
    count, group, width = q.shape
    rows = count * group
    loops.attend.call(place(q), rows, width, place(k), place(v), first, column, count, place(scale), place(y))
    return y


def exactly(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, column: int) -> np.ndarray:
    """As `attend`, in float64 and straight from the definition."""
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    result = np.empty_like(q)
    for t in range(len(q)):
        seen = slice(first, column + t + 1)
        scores = q[t] @ k[seen].T * WIDTH**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        result[t] = weights / weights.sum(axis=-1, keepdims=True) @ v[seen]
    return result


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 9, 12, 16, 19])
@pytest.mark.parametrize("before", [0, 1, 23, 24, 60, 200])
def test_a_tokens_bits_are_its_own(group, before):
    random = np.random.RandomState(group)
    column = PADDING + before
    # Sharp: the running maximum moves, and what came before fades.
    q = 4 * random.randn(TOKENS, group, WIDTH).astype(np.float32)
    k, v = (random.randn(column + TOKENS, WIDTH).astype(np.float32) for _ in range(2))
    together = attend(q, k, v, PADDING, column)
    np.testing.assert_allclose(together, exactly(q, k, v, PADDING, column), atol=2e-5)
    for t in range(TOKENS):
        alone = attend(q[t : t + 1].copy(), k, v, PADDING, column + t)
        np.testing.assert_array_equal(alone[0], together[t])

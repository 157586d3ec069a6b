"""Cases and baselines of drawing a token."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from labkit.kernels.registry import Bench, Case, Entry, Tolerance
from labkit.kernels.sampling.draw import SAMPLE_CHUNKS, SAMPLE_ROWS, sample_chunks_call, sample_rows_call
from labkit.kernels.signature import Launch


def _logits(rows: int, vocabulary: int, dtype: mx.Dtype, spread: float = 2.5) -> mx.array:
    return (spread * mx.random.normal((rows, vocabulary))).astype(dtype)


def _fixed_logits(rows: int, vocabulary: int, dtype: mx.Dtype) -> mx.array:
    """The same every time: the number of rounds decides the traffic, and the budget counts it."""
    return (2.5 * mx.random.normal((rows, vocabulary), key=mx.random.key(0))).astype(dtype)


def _odd_logits(vocabulary: int, dtype: mx.Dtype) -> mx.array:
    """Four rows: few distinct values, so that ties abound; NaN; -inf; +inf, -inf and NaN among numbers."""
    rows = np.array(mx.random.randint(0, 3, (4, vocabulary))).astype(np.float32)
    rows[1] = np.nan
    rows[2] = -np.inf
    rows[3, ::7], rows[3, 1::7], rows[3, 2::7] = np.inf, -np.inf, np.nan
    return mx.array(rows).astype(dtype)


def _seed() -> mx.array:
    high, low = (mx.random.randint(0, 1 << 31, (1,)).astype(mx.uint64) for _ in range(2))
    return (high << 32) | low


def _mask(rows: int, vocabulary: int) -> mx.array:
    return mx.random.randint(0, 1 << 31, (rows, -(-vocabulary // 32))).astype(mx.uint32)


def _chunks(logits: mx.array, temperature, mask=None, step=3) -> Launch:
    return SAMPLE_CHUNKS.launch(**sample_chunks_call(logits, temperature, _seed(), step, mask))


def _rows(logits: mx.array, temperature, top_k=0, top_p=1.0, min_p=0.0, mask=None, seed=None) -> Launch:
    arguments = (logits, temperature, _seed() if seed is None else seed, 3, mask)
    chunks = SAMPLE_CHUNKS(**sample_chunks_call(*arguments), target="reference")
    return SAMPLE_ROWS.launch(**sample_rows_call(*arguments, top_k, top_p, min_p, chunks))


def _mlx_lm(launch: Launch) -> list[mx.array]:
    from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

    logits = launch.inputs[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    logprobs = apply_top_k(apply_min_p(apply_top_p(logprobs, 0.95), 0.05), 20)
    return [mx.random.categorical(logprobs * (1 / 0.8))]


DRAW_ENTRIES = [
    Entry(
        SAMPLE_CHUNKS,
        cases=(
            Case("2 rows of 2048", lambda dtype: _chunks(_logits(2, 2048, dtype), 0.7)),
            Case(
                "masked, hot and greedy, 3 rows of 1337",
                lambda dtype: _chunks(_logits(3, 1337, dtype), [5.0, 0.0, 1.0], _mask(3, 1337)),
            ),
            Case("ties, NaN and infinities, 4 rows of 77", lambda dtype: _chunks(_odd_logits(77, dtype), 1.0)),
        ),
        summary="per chunk of the vocabulary: largest logit, mass, best perturbed token",
        benches=(
            Bench(
                "1 row of 248320",
                lambda dtype: _chunks(_logits(1, 248320, dtype), 0.8),
                bytes=2 * 248320,
            ),
        ),
    ),
    Entry(
        SAMPLE_ROWS,
        cases=(
            Case(
                "top-k 20, top-p 0.95, min-p 0.05, 2 rows of 4096",
                lambda dtype: _rows(_fixed_logits(2, 4096, dtype), 0.8, 20, 0.95, 0.05, seed=9),
            ),
            Case(
                "each filter alone, greedy and none, 5 rows of 3001",
                lambda dtype: _rows(
                    _logits(5, 3001, dtype),
                    [2.0, 2.0, 2.0, 0.0, 1.0],
                    [7, 0, 0, 0, 0],
                    [1.0, 0.5, 1.0, 1.0, 0.0],
                    [0.0, 0.0, 0.3, 0.0, 0.0],
                ),
            ),
            Case(
                "masked, flat: many rounds, 3 rows of 4000",
                lambda dtype: _rows(_logits(3, 4000, dtype, 0.05), 1.0, [1, 3, 0], [1, 1, 0.02], 0, _mask(3, 4000)),
            ),
            Case(
                "ties, NaN and infinities, 4 rows of 77",
                lambda dtype: _rows(_odd_logits(77, dtype), 1.0, [5, 5, 5, 0], [1, 1, 1, 0.9]),
            ),
        ),
        summary="the filtered draw of each row",
        tolerance=dict.fromkeys((mx.float32, mx.float16, mx.bfloat16), Tolerance(2e-5, 1e-5)),
        benches=(
            Bench(
                "1 row of 248320, top-k 20, top-p 0.95, min-p 0.05",
                lambda dtype: _rows(_logits(1, 248320, dtype), 0.8, 20, 0.95, 0.05),
                _mlx_lm,
            ),
        ),
    ),
]

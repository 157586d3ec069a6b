"""Cases, tolerances and baselines of choosing tokens."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.registry import Bench, Case, Entry
from labkit.kernels.sampling import ARGMAX, argmax_call
from labkit.kernels.sampling.draw_gates import DRAW_ENTRIES
from labkit.kernels.signature import Launch


def _launch(rows: int, vocabulary: int, dtype: mx.Dtype) -> Launch:
    return ARGMAX.launch(**argmax_call(mx.random.normal((rows, vocabulary)).astype(dtype)))


def _ties(rows: int, vocabulary: int, dtype: mx.Dtype) -> Launch:
    """Few distinct values, and a row of NaN and infinities."""
    logits = mx.random.randint(0, 3, (rows, vocabulary)).astype(dtype)
    odd = mx.where(mx.arange(vocabulary) % 2 == 0, mx.nan, -mx.inf).astype(dtype)
    return ARGMAX.launch(**argmax_call(mx.concatenate([logits, odd[None]])))


ENTRIES = [
    Entry(
        ARGMAX,
        cases=(
            Case("2 rows of 4096", lambda dtype: _launch(2, 4096, dtype)),
            Case("ties, NaN and infinities, 3 rows of 77", lambda dtype: _ties(2, 77, dtype)),
        ),
        summary="the largest logit of each row",
        benches=(
            Bench(
                "1 row of 248320",
                lambda dtype: _launch(1, 248320, dtype),
                lambda launch: [mx.argmax(launch.inputs[0], axis=-1)],
                bytes=2 * 248320,
            ),
        ),
    ),
    *DRAW_ENTRIES,
]

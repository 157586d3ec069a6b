"""Cases, tolerances and baselines of routing."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from labkit.kernels.registry import Bench, Case, Entry, Tolerance
from labkit.kernels.routing.launches import (
    CHOOSE_EXPERTS,
    COUNT_EXPERTS,
    GROUP_ROWS,
    ROUTE_FEW,
    choose_experts_call,
    count_experts_call,
    group_rows_call,
    route_few_call,
)
from labkit.kernels.signature import Launch

# Weights are fp32 whatever the logits are.
TOLERANCE = dict.fromkeys((mx.float32, mx.float16, mx.bfloat16), Tolerance(1e-6, 5e-6))


def _logits(tokens: int, width: int, dtype: mx.Dtype) -> mx.array:
    return (2 * mx.random.normal((tokens, width))).astype(dtype)


def _fixed_logits(tokens: int, width: int, dtype: mx.Dtype) -> mx.array:
    """The same every time: who is chosen decides which lines are touched, and the budget counts those."""
    return (2 * mx.random.normal((tokens, width), key=mx.random.key(0))).astype(dtype)


def _odd_logits(tokens: int, width: int, dtype: mx.Dtype) -> mx.array:
    """Few distinct values, so that ties abound; then a row of NaN, one of -inf, and one with +inf, -inf and NaN."""
    logits = mx.random.randint(0, 3, (tokens, width)).astype(dtype)
    bad = np.full((3, width), np.nan, np.float32)
    bad[1] = -np.inf
    bad[2, ::3], bad[2, 1::3] = np.inf, -np.inf
    return mx.concatenate([logits, mx.array(bad).astype(dtype)])


def _choose(logits: mx.array, k: int, **options) -> Launch:
    return CHOOSE_EXPERTS.launch(**choose_experts_call(logits, k, **options))


def _few(logits: mx.array, k: int, tile: int, scoring="softmax", bias=None, renormalise=True, experts=None) -> Launch:
    return ROUTE_FEW.launch(**route_few_call(logits, k, experts, scoring, bias, renormalise, 1.0, tile))


def _indices(tokens: int, k: int, experts: int, skew: float = 0.0) -> mx.array:
    load = -skew * mx.log(mx.arange(1, experts + 1).astype(mx.float32))
    noisy = load + mx.random.gumbel((tokens, experts))
    return mx.argsort(-noisy, axis=-1)[:, :k].astype(mx.int32)


def _fixed_indices(tokens: int, k: int, experts: int) -> mx.array:
    """The same every time: where rows land decides how many lines a store touches, and the budget counts those."""
    token, slot = mx.arange(tokens)[:, None], mx.arange(k)
    return ((token * token * 5 + slot * 37) % experts).astype(mx.int32)


def _count(indices: mx.array, experts: int) -> Launch:
    return COUNT_EXPERTS.launch(**count_experts_call(indices, experts))


def _group(indices: mx.array, experts: int, tile: int) -> Launch:
    counts = COUNT_EXPERTS(**count_experts_call(indices, experts), target="reference")[0]
    return GROUP_ROWS.launch(**group_rows_call(indices, counts, experts, tile))


def _bias(experts: int) -> mx.array:
    return mx.random.normal((experts,)) * 0.1


def _mlx_choose(launch: Launch) -> list[mx.array]:
    gates = mx.softmax(launch.inputs[0], axis=-1, precise=True)
    indices = mx.argpartition(gates, kth=-8, axis=-1)[..., -8:]
    scores = mx.take_along_axis(gates, indices, axis=-1)
    return [indices, scores / scores.sum(axis=-1, keepdims=True)]


def _mlx_sort(launch: Launch) -> list[mx.array]:
    """What mlx-lm's switch layers do before `gather_qmm`."""
    order = mx.argsort(launch.inputs[0].reshape(-1))
    return [order, mx.argsort(order)]


_INTEGERS = (mx.int32,)
_EXACT = {mx.int32: Tolerance(0, 0)}

ENTRIES = [
    Entry(
        CHOOSE_EXPERTS,
        cases=(
            Case("40 tokens, 8 of 256", lambda dtype: _choose(_fixed_logits(40, 256, dtype), 8)),
            Case("7 tokens, 8 of 256", lambda dtype: _choose(_logits(7, 256, dtype), 8)),
            Case(
                "33 tokens, sigmoid with bias, 3 of 100, scaled",
                lambda dtype: _choose(_logits(33, 100, dtype), 3, scoring="sigmoid", bias=_bias(100), scale=2.5),
            ),
            Case(
                "35 tokens, 3 of 30 and 2 slots of a shared expert",
                lambda dtype: _choose(_logits(35, 31, dtype), 3, experts=30, shared=2),
            ),
            Case(
                "ties, NaN and infinities, shares of all, 5 of 37 in rows of 40",
                lambda dtype: _choose(_odd_logits(4, 40, dtype), 5, experts=37, renormalise=False),
            ),
        ),
        summary="router scores, top-k, weights, counts of each block",
        tolerance=TOLERANCE,
        benches=(
            Bench(
                "4096 tokens, 8 of 256",
                lambda dtype: _choose(_logits(4096, 256, dtype), 8),
                _mlx_choose,
                bytes=4096 * (256 * 2 + 8 * 8),
            ),
        ),
    ),
    Entry(
        COUNT_EXPERTS,
        cases=(
            Case("40 tokens, 8 of 256", lambda _: _count(_indices(40, 8, 256), 256)),
            Case("1 token, 1 of 3", lambda _: _count(_indices(1, 1, 3), 3)),
        ),
        summary="rows of each expert in each block",
        dtypes=_INTEGERS,
        tolerance=_EXACT,
    ),
    Entry(
        GROUP_ROWS,
        cases=(
            Case("64 tokens, 8 of 256, tile 16", lambda _: _group(_fixed_indices(64, 8, 256), 256, 16)),
            Case("70 tokens, 8 of 256, skewed, tile 16", lambda _: _group(_indices(70, 8, 256, 1.0), 256, 16)),
            Case("33 tokens, 3 of 5, tile 7", lambda _: _group(_indices(33, 3, 5), 5, 7)),
            Case("1 token, 1 of 512", lambda _: _group(_indices(1, 1, 512), 512, 32)),
        ),
        summary="stable order by expert, offsets, block map",
        dtypes=_INTEGERS,
        tolerance=_EXACT,
        benches=(
            Bench(
                "4096 tokens, 8 of 256, tile 32",
                lambda _: _group(_indices(4096, 8, 256), 256, 32),
                _mlx_sort,
                bytes=4 * (3 * 32768 + 2 * 128 * 256 + 4 * (1024 + 256)),
            ),
        ),
    ),
    Entry(
        ROUTE_FEW,
        cases=(
            Case("8 tokens, 8 of 256, tile 8", lambda dtype: _few(_fixed_logits(8, 256, dtype), 8, 8)),
            Case("3 tokens, 8 of 256, tile 2", lambda dtype: _few(_logits(3, 256, dtype), 8, 2)),
            Case(
                "ties, NaN and infinities, sigmoid with bias, 16 of 300, tile 1",
                lambda dtype: _few(_odd_logits(1, 300, dtype), 16, 1, "sigmoid", _bias(300)),
            ),
        ),
        summary="the whole routing of up to 32 tokens in one launch",
        tolerance=TOLERANCE,
        benches=(
            Bench(
                "1 token, 8 of 256, tile 8", lambda dtype: _few(_logits(1, 256, dtype), 8, 8), _mlx_choose, bytes=1024
            ),
        ),
    ),
]

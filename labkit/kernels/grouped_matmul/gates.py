"""Cases, tolerances and benches of the experts' products."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from labkit.kernels.grouped_matmul.launches import (
    CHOOSE_GATE_UP,
    COMBINE_EXPERTS,
    DECODE_DOWN,
    DECODE_GATE_UP,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    choose_gate_up_call,
    combine_experts_call,
    decode_down_call,
    decode_gate_up_call,
    expert_down_call,
    expert_gate_up_call,
)
from labkit.kernels.quantized_matmul.gates import HALVES, random_packed
from labkit.kernels.registry import Case, Entry, Tolerance
from labkit.kernels.signature import Launch

FLOATS = (mx.float32, *HALVES)

# Weights of about 1 / sqrt(K), as in a model: products are about 1.
EXACT = {
    mx.float32: Tolerance(2e-5, 1e-5),
    mx.float16: Tolerance(2e-3, 2e-3),
    mx.bfloat16: Tolerance(1.2e-2, 1e-2),
}
ROUNDED = {
    mx.float32: Tolerance(2e-5, 1e-5),
    mx.float16: Tolerance(4e-3, 4e-3),
    mx.bfloat16: Tolerance(3e-2, 2e-2),
}


def block_map_of(loads: list[int], tile: int) -> mx.array:
    """[ceil(A / tile) + E, 4] int32 as routing makes it: (expert, first sorted row, rows, 0); unused entries are 0."""
    entries, start = [], 0
    for expert, load in enumerate(loads):
        entries += [(expert, start + first, min(tile, load - first), 0) for first in range(0, load, tile)]
        start += load
    found = np.zeros((-(-start // tile) + len(loads), 4), np.int32)
    found[: len(entries)] = np.array(entries, np.int32).reshape(-1, 4)
    return mx.array(found)


def grouped(indices: np.ndarray, experts: int, tile: int) -> tuple[mx.array, mx.array]:
    """Order [A] and block map for expert indices [T, k]."""
    flat = indices.reshape(-1)
    loads = np.bincount(flat, minlength=experts).tolist()
    return mx.array(np.argsort(flat, kind="stable").astype(np.int32)), block_map_of(loads, tile)


def packed_experts(experts: int, n: int, k: int, dtype: mx.Dtype, bits: int = 4, group: int = 64):
    """Weights of about 1 / sqrt(k)."""
    packed = random_packed(n, k, dtype, bits, group, experts)
    scale = mx.array(k**-0.5, dtype)
    return type(packed)(packed.w, packed.scales * scale, packed.biases * scale, group, bits)


def _indices(tokens: int, k: int, experts: int) -> np.ndarray:
    # The same every time: who is chosen decides what is touched, which the budget counts. Experts 1, 4, ... get none.
    rng = np.random.default_rng(0)
    busy = [e for e in range(experts) if e % 3 != 1]
    return np.stack([rng.permutation(busy)[:k] for _ in range(tokens)]).astype(np.int32)


def _gate_up(form: str, tokens, topk, experts, n, k, tile, bits, group, dtype) -> Launch:
    order, blocks = grouped(_indices(tokens, topk, experts), experts, tile)
    x = mx.random.normal((tokens, k)).astype(dtype)
    gate, up = (packed_experts(experts, n, k, dtype, bits, group) for _ in range(2))
    return EXPERT_GATE_UP[form].launch(**expert_gate_up_call(x, gate, up, order, blocks, topk, form, tile=tile))


def _down(form: str, tokens, topk, experts, n, k, tile, bits, group, dtype) -> Launch:
    order, blocks = grouped(_indices(tokens, topk, experts), experts, tile)
    hidden = mx.random.normal((tokens * topk, k)).astype(dtype)
    weights = mx.softmax(mx.random.normal((tokens, topk)), axis=-1)
    down = packed_experts(experts, n, k, dtype, bits, group)
    return EXPERT_DOWN[form].launch(**expert_down_call(hidden, down, order, blocks, weights, form, tile=tile))


def _shared(tokens: int, n: int, dtype: mx.Dtype, wanted: bool) -> tuple:
    if not wanted:
        return None, None
    return mx.random.normal((tokens, n)).astype(dtype), mx.random.uniform(shape=(tokens,)).astype(dtype)


def _combine(tokens, topk, n, shared, dtype) -> Launch:
    products = mx.random.normal((tokens, topk, n)).astype(dtype)
    return COMBINE_EXPERTS.launch(**combine_experts_call(products, *_shared(tokens, n, dtype, shared)))


def _decode_gate_up(form: str, tokens, topk, experts, n, k, bits, group, dtype) -> Launch:
    x = mx.random.normal((tokens, k)).astype(dtype)
    gate, up = (packed_experts(experts, n, k, dtype, bits, group) for _ in range(2))
    indices = mx.array(_indices(tokens, topk, experts))
    return DECODE_GATE_UP[form].launch(**decode_gate_up_call(x, gate, up, indices, form))


def _choose_gate_up(form: str, tokens, topk, experts, shared, n, k, bits, group, dtype) -> Launch:
    x = mx.random.normal((tokens, k)).astype(dtype)
    gate, up = (packed_experts(experts + shared, n, k, dtype, bits, group) for _ in range(2))
    # The same every time, as the indices above; far enough apart that rounding changes no choice.
    scores = np.stack([np.random.default_rng(t).permutation(experts + 1) for t in range(tokens)]) * 0.1
    options = {"experts": experts, "renormalise": shared > 0, "shared": shared}
    call = choose_gate_up_call(x, gate, up, mx.array(scores.astype(np.float32)), topk, form, **options)
    return CHOOSE_GATE_UP[form].launch(**call)


def _decode_down(form: str, tokens, topk, experts, n, k, bits, group, shared, dtype) -> Launch:
    hidden = mx.random.normal((tokens * topk, k)).astype(dtype)
    weights = mx.softmax(mx.random.normal((tokens, topk)), axis=-1)
    down = packed_experts(experts, n, k, dtype, bits, group)
    indices = mx.array(_indices(tokens, topk, experts))
    call = decode_down_call(hidden, down, indices, weights, *_shared(tokens, n, dtype, shared), form)
    return DECODE_DOWN[form].launch(**call)


def _entries(kernels, make, sizes, labels, summary, tolerance) -> list[Entry]:
    return [
        Entry(
            kernels[form],
            cases=tuple(Case(label, partial(make, form, *size)) for label, size in zip(labels, sizes, strict=True)),
            summary=f"{summary}, {how}",
            dtypes=HALVES if form == "tensor" else FLOATS,
            tolerance=tolerance,
        )
        for form, how in (("plain", "simdgroups"), ("tensor", "tensor cores"))
    ]


ENTRIES = [
    *_entries(
        EXPERT_GATE_UP,
        _gate_up,
        ((24, 2, 4, 64, 128, 32, 4, 64), (5, 3, 7, 45, 96, 16, 8, 32)),
        ("24 tokens, 2 of 4 experts, tiles of 32", "5 tokens, 3 of 7 experts, 45 columns, 8 bits"),
        "experts' gate and up with SwiGLU on sorted rows",
        ROUNDED,
    ),
    *_entries(
        EXPERT_DOWN,
        _down,
        ((24, 2, 4, 128, 64, 32, 4, 64), (40, 2, 3, 77, 128, 64, 4, 128)),
        ("24 tokens, 2 of 4 experts, tiles of 32", "40 tokens, 2 of 3 experts, 77 columns, tiles of 64"),
        "experts' down on sorted rows, weighed, by assignment",
        ROUNDED,
    ),
    Entry(
        COMBINE_EXPERTS,
        cases=(
            Case("9 tokens, 8 experts, 128 columns", partial(_combine, 9, 8, 128, True)),
            Case("3 tokens, 3 experts, 37 columns", partial(_combine, 3, 3, 37, False)),
        ),
        summary="sum of a token's experts, and the shared one",
    ),
    *_entries(
        DECODE_GATE_UP,
        _decode_gate_up,
        ((1, 8, 16, 32, 256, 4, 64), (3, 2, 5, 41, 96, 8, 32)),
        ("1 token, 8 of 16 experts", "3 tokens, 2 of 5 experts, 41 columns, 8 bits"),
        "experts' gate and up with SwiGLU for a few tokens",
        EXACT,
    ),
    *_entries(
        CHOOSE_GATE_UP,
        _choose_gate_up,
        ((2, 8, 30, 2, 32, 256, 4, 64), (3, 2, 7, 0, 41, 96, 8, 32)),
        ("2 tokens, 8 of 30 experts, 2 shared slots", "3 tokens, 2 of 7 experts, 41 columns, 8 bits"),
        "the choice of experts, and their gate and up with SwiGLU, for a few tokens",
        EXACT,
    ),
    *_entries(
        DECODE_DOWN,
        _decode_down,
        ((1, 8, 16, 32, 128, 4, 64, True), (2, 3, 5, 41, 96, 8, 32, False)),
        ("1 token, 8 of 16 experts, shared expert", "2 tokens, 3 of 5 experts, 41 columns, 8 bits"),
        "experts' down, weighed and summed, for a few tokens",
        EXACT,
    ),
]

"""The experts' products at Qwen3.6-35B-A3B's sizes: tiles against each other, MLX's and torch's grouped products."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from labkit.kernels.device_clock import Calls, add_device_times
from labkit.kernels.grouped_matmul.counts import choose_at_random
from labkit.kernels.grouped_matmul.gates import grouped
from labkit.kernels.grouped_matmul.launches import (
    COMBINE_EXPERTS,
    DECODE_DOWN,
    DECODE_GATE_UP,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    combine_experts_call,
    decode_down_call,
    decode_gate_up_call,
    expert_down_call,
    expert_gate_up_call,
)
from labkit.kernels.quantized_matmul.bench import COPY_RATE, MATMUL_RATE, attempt, print_rows, random_words, torch_us
from labkit.kernels.queued import queued

EXPERTS, TOPK, HIDDEN, INNER = 256, 8, 2048, 512

# (tokens, tile, stages); the first of a number of tokens is what `choose_tile` gives; 64 throughout is the fixed tile.
TILES = (
    (4096, 128, 3),
    (4096, 128, 2),
    (4096, 64, 4),
    (4096, 32, 4),
    (512, 16, 4),
    (512, 32, 4),
    (512, 64, 4),
    (2048, 64, 4),
    (2048, 32, 4),
    (2048, 16, 4),
    (2048, 128, 3),
)
DECODE = (
    (1, {"simds": 4, "unroll": 4}, {"simds": 8, "unroll": 4}),
    (1, {"simds": 8, "unroll": 2}, {"simds": 16, "unroll": 2}),
    (4, {"simds": 4, "unroll": 4}, {"simds": 8, "unroll": 4}),
    (8, {"simds": 4, "unroll": 4}, {"simds": 8, "unroll": 4}),
)

# Predicted before any run: TFLOP/s of a tile of so many rows where each expert has enough.
PREDICTED_TFLOPS = {128: 300, 64: 230, 32: 140, 16: 75}


def choices(tokens: int, skew: float) -> np.ndarray:
    """[tokens, k] int32 experts, even or skewed."""
    return choose_at_random(tokens, TOPK, EXPERTS, skew)


def rows(quick: bool = True) -> list[dict]:
    """One row a kernel, size and configuration. `us` has the launch inside; `device_us`, where it can be had, has not,
    and the rates are its. What fails is printed and left out."""
    gate, up = (random_words(INNER, HIDDEN, EXPERTS) for _ in range(2))
    down = random_words(HIDDEN, INNER, EXPERTS)
    mx.eval(*(p.arrays for p in (gate, up, down)))
    found = []
    for tokens, tile, stages in TILES:
        for skew in (0.0, 1.0) if tokens == 4096 else (0.0,):
            what = f"tile {tile}, stages {stages}"
            found += attempt(what, partial(_tiles, tokens, tile, stages, skew, gate, up, down, quick)) or []
    for tokens, first, second in DECODE:
        decode = partial(_decode, tokens, first, second, gate, up, down, quick)
        found += attempt(f"decode {first} {second}", decode) or []
    return found + (attempt("baselines", lambda: _baselines(gate, up)) or [])


def _tiles(tokens, tile, stages, skew, gate, up, down, quick) -> list[dict]:
    indices = choices(tokens, skew)
    order, blocks = grouped(indices, EXPERTS, tile)
    x = mx.random.normal((tokens, HIDDEN)).astype(mx.bfloat16)
    weights = mx.softmax(mx.random.normal((tokens, TOPK)), axis=-1)
    options = {"tile": tile, "stages": stages}
    timing = {"launches": 8 if tokens > 1000 else 16, "rounds": 3 if quick else 9}
    first = expert_gate_up_call(x, gate, up, order, blocks, TOPK, "tensor", **options)
    (hidden,) = EXPERT_GATE_UP["tensor"](**first)
    second = expert_down_call(hidden, down, order, blocks, weights, "tensor", **options)
    (products,) = EXPERT_DOWN["tensor"](**second)
    third = combine_experts_call(products.reshape(tokens, TOPK, HIDDEN))
    touched = len(np.unique(indices)) / EXPERTS
    label = {"shape": f"{tokens} tokens, skew {skew:g}", "configuration": str(options)}
    work = 2 * tokens * TOPK * HIDDEN * INNER
    traffic = tokens * TOPK * HIDDEN * 2
    error = _error_gate_up(hidden, x, gate, up, indices, order)
    tflops = PREDICTED_TFLOPS[tile]
    touched_bytes = touched * (gate.nbytes + up.nbytes), touched * down.nbytes + traffic
    calls = [
        [partial(EXPERT_GATE_UP["tensor"], **first)],
        [partial(EXPERT_DOWN["tensor"], **second)],
        [partial(COMBINE_EXPERTS, **third)],
    ]
    times = [queued(one, **timing) for one in calls]
    found = [
        _row("expert_gate_up", label, times[0], 2 * work, touched_bytes[0], tflops, error),
        _row("expert_down", label, times[1], work, touched_bytes[1], 0.8 * tflops),
        _row("combine_experts", label, times[2], tokens * TOPK * HIDDEN, traffic),
    ]
    return add_device_times(list(zip(found, calls, strict=True)), launches=8)


def _error_gate_up(hidden, x, gate, up, indices, order) -> float:
    """Largest relative error of the first sorted rows against MLX's op."""
    positions = order[:32]
    which = mx.array(indices.reshape(-1))[positions]
    rows_ = x[positions // TOPK][:, None, :]
    g, u = (
        mx.gather_qmm(rows_, *p.arrays, rhs_indices=which, transpose=True, group_size=64, bits=4)[:, 0].astype(
            mx.float32
        )
        for p in (gate, up)
    )
    want = g * mx.sigmoid(g) * u
    return (mx.abs(hidden[:32].astype(mx.float32) - want).max() / mx.abs(want).max()).item()


def _row(name, label, seconds, operations, nbytes, predicted_tflops=None, error=None) -> dict:
    floor = max(nbytes / COPY_RATE, operations / MATMUL_RATE)
    predicted = max(operations / predicted_tflops / 1e12, nbytes / 3.2e12) if predicted_tflops else nbytes / 3.2e12
    return {
        "name": name,
        **label,
        "us": 1e6 * seconds,
        "GB/s": nbytes / seconds / 1e9,
        "TFLOP/s": operations / seconds / 1e12,
        "floor_us": 1e6 * floor,
        "predicted_us": 1e6 * predicted,
        "error": error,
    }


def _decode(tokens, first_options, second_options, gate, up, down, quick) -> list[dict]:
    # Other experts at each call: a rotation through all of the weights.
    sets = [choices(64, 0.0)[i * tokens : (i + 1) * tokens] for i in range(64 // tokens)]
    x = mx.random.normal((tokens, HIDDEN)).astype(mx.bfloat16)
    weights = mx.softmax(mx.random.normal((tokens, TOPK)), axis=-1)
    shared, factor = (mx.random.normal(s).astype(mx.bfloat16) for s in ((tokens, HIDDEN), (tokens,)))
    indices = [mx.array(i) for i in sets]

    def first(form: str, **options) -> list[dict]:
        return [decode_gate_up_call(x, gate, up, i, form, **options) for i in indices]

    def second(form: str, **options) -> list[dict]:
        return [decode_down_call(hidden, down, i, weights, shared, factor, form, **options) for i in indices]

    hidden = DECODE_GATE_UP["tensor"](**first("tensor")[0])[0]
    timing = {"launches": 128, "rounds": 3 if quick else 9}
    touched = sum(len(np.unique(i)) for i in sets) / len(sets) / EXPERTS
    work = 2 * tokens * TOPK * HIDDEN * INNER
    found = []
    for name, kernels, calls_of, options, operations, nbytes in (
        ("decode_gate_up", DECODE_GATE_UP, first, first_options, 2 * work, touched * (gate.nbytes + up.nbytes)),
        ("decode_down", DECODE_DOWN, second, second_options, work, touched * down.nbytes),
    ):
        for form in ("tensor",) if tokens > 1 else ("tensor", "plain"):
            options = options if form == "tensor" else {}  # the plain form takes its own
            calls = [partial(kernels[form], **c) for c in calls_of(form, **options)]
            time_ = attempt(name, partial(queued, calls, **timing))
            if time_:
                label = {"shape": f"{tokens} tokens", "configuration": f"{form} {options}"}
                found.append((_row(name, label, time_, operations, nbytes), calls))
    return add_device_times(found)


def _baselines(gate, up) -> list[dict]:
    """One projection by MLX's gathered product and by torch's grouped product on bf16 weights."""
    found = []
    for tokens in (1, 512, 4096):
        indices = choices(tokens, 0.0).reshape(-1)
        order = np.argsort(indices, kind="stable")
        x = mx.random.normal((indices.size, 1, HIDDEN)).astype(mx.bfloat16)
        which = mx.array(indices[order])

        def mlx(x=x, which=which):
            return [
                mx.gather_qmm(
                    x, *gate.arrays, rhs_indices=which, transpose=True, group_size=64, bits=4, sorted_indices=True
                )
            ]

        label = {"shape": f"{tokens} tokens, skew 0", "configuration": "one projection, sorted"}
        work, traffic = 2 * indices.size * HIDDEN * INNER, len(np.unique(indices)) / EXPERTS * gate.nbytes
        time_ = attempt("gather_qmm", partial(queued, [mlx], launches=4 if tokens > 1 else 64, rounds=2))
        if time_:
            found.append((_row("mlx gather_qmm", label, time_, work, traffic), [mlx]))
        loads = np.bincount(indices, minlength=EXPERTS)
        calls = attempt("torch", partial(torch_grouped_calls, loads)) if tokens > 1 else None
        us = attempt("torch", partial(torch_us, calls, launches=16)) if calls else None
        if us:
            found.append((_row("torch _grouped_mm bf16", label, us / 1e6, work, traffic * 3.55), calls))
    return add_device_times(found, launches=4)


def torch_grouped_calls(loads: np.ndarray) -> Calls | None:
    """torch's grouped product of sorted rows, `loads` of each expert, on bf16 weights; None without torch on a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    x = torch.randn(int(loads.sum()), HIDDEN, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(EXPERTS, INNER, HIDDEN, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    ends = torch.tensor(np.cumsum(loads), dtype=torch.int32, device="cuda")
    return [lambda: torch._grouped_mm(x, w, offs=ends)]


if __name__ == "__main__":
    print_rows(rows(quick=True))

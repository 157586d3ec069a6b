"""The fused chains against MLX's separate operations and torch's, at Qwen3.6-35B-A3B's sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from labkit.kernels.device_clock import Calls, add_device_times
from labkit.kernels.fused import chains_gates as problems
from labkit.kernels.fused import savings
from labkit.kernels.fused.launches import (
    GATED_RMS_NORM,
    NORM_ROUTER,
    OUTPUT_GATE,
    QK_NORM_ROPE,
    gated_rms_norm_call,
    norm_router_call,
    output_gate_call,
    qk_norm_rope_call,
)
from labkit.kernels.launch import Kernel
from labkit.kernels.quantized_matmul.bench import COPY_RATE, attempt, print_rows, torch_us
from labkit.kernels.queued import copies_for, queued
from labkit.kernels.signature import Launch

T = mx.bfloat16
HIDDEN, HEADS, DIM, EXPERTS = 2048, (16, 2), 256, 256
DELTA_HEADS, DELTA_DIM = 32, 128

# Predicted before any run: at many tokens 80 % of the copy rate; at few the 3.5 us that the host takes to launch.
SHARE, LAUNCH_US = 0.8, 3.5


def _norm(x: int) -> mx.array:
    return mx.random.normal((x,)).astype(T)


def _qk(tokens: int, vector: int | None) -> tuple[Kernel, dict, savings.Saving]:
    q, k = mx.random.normal((1, tokens, HEADS[0], 2 * DIM)), mx.random.normal((1, tokens, HEADS[1], DIM))
    call = qk_norm_rope_call(
        q.astype(T), k.astype(T), _norm(DIM), _norm(DIM), mx.array([3]), 1e-6, 64, 1e7, vector=vector
    )
    return QK_NORM_ROPE, call, savings.qk_norm_rope(tokens, *HEADS, DIM)


def _gate(tokens: int, vector: int | None) -> tuple[Kernel, dict, savings.Saving]:
    attended = mx.random.normal((1, HEADS[0], tokens, DIM)).astype(T)
    q_gate = mx.random.normal((1, tokens, HEADS[0], 2 * DIM)).astype(T)
    call = output_gate_call(attended, q_gate, vector)
    return OUTPUT_GATE, call, savings.output_gate(tokens, HEADS[0], DIM, length=tokens)


def _gated_norm(tokens: int, vector: int | None) -> tuple[Kernel, dict, savings.Saving]:
    x, z = (mx.random.normal((tokens, DELTA_HEADS, DELTA_DIM)).astype(T) for _ in range(2))
    call = gated_rms_norm_call(x, z, _norm(DELTA_DIM), 1e-6, vector=vector)
    return GATED_RMS_NORM, call, savings.gated_rms_norm(tokens, DELTA_HEADS, DELTA_DIM)


def _router(tokens: int, threads: int | None) -> tuple[Kernel, dict, savings.Saving]:
    router = tuple(mx.quantize((mx.random.normal((EXPERTS, HIDDEN)) / 45).astype(T), group_size=64, bits=8))
    x, residual = (mx.random.normal((tokens, HIDDEN)).astype(T) for _ in range(2))
    call = norm_router_call(x, residual, _norm(HIDDEN), router, 1e-6, 64, 8, threads or 256)
    return NORM_ROUTER, call, savings.norm_router(tokens, HIDDEN, EXPERTS)


Problem = Callable[[int, int | None], tuple[Kernel, dict, savings.Saving]]
PROBLEMS: tuple[tuple[Problem, Callable[[Launch], Sequence[mx.array]], tuple, tuple], ...] = (
    (_qk, problems.mlx_qk, (1, 8, 4096), (None, 1)),
    (_gate, problems.mlx_gate, (1, 4096), (None, 1)),
    (_gated_norm, problems.mlx_gated_norm, (1, 4096), (None, 1)),
    (_router, problems.mlx_router, (1, 4, 8), (256, 128, 512)),
)


def rows(quick: bool = True) -> list[dict]:
    """One row a kernel, size and configuration. `us` has the host's cost of a launch (about 3.5 us) inside;
    `device_us`, where it can be had, has not, and the rates are its. What fails is printed and left out."""
    rounds = 3 if quick else 9
    found = []
    for problem, baseline, sizes, configurations in PROBLEMS:
        for tokens in sizes:
            mlx = attempt(f"mlx {problem.__name__} {tokens}", partial(_baseline, problem, baseline, tokens))
            timing = {"launches": 32, "rounds": rounds}
            beside = attempt(f"mlx {problem.__name__} {tokens}", partial(queued, mlx, **timing)) if mlx else None
            measured = []
            for configuration in configurations:
                measure = partial(_measure, problem, tokens, configuration, rounds)
                if one := attempt(f"{problem.__name__} {tokens} {configuration}", measure):
                    measured.append(({**one[0], "mlx_us": 1e6 * beside if beside else None}, one[1]))
            found += add_device_times(measured, {"mlx": mlx})
    for name, work, tokens in (
        ("torch rms_norm * silu", _torch_gated_norm, 4096),
        ("torch norm and rotation", _torch_qk, 4096),
    ):
        calls = attempt(name, partial(_torch, work, tokens))
        us = attempt(name, partial(torch_us, calls, launches=32)) if calls else None
        if us:
            row = {"name": name, "shape": f"{tokens} tokens", "configuration": "eager bf16", "us": us}
            found += add_device_times([(row, calls)])
    return found


def _measure(problem: Problem, tokens: int, configuration: int | None, rounds: int) -> tuple[dict, Calls]:
    kernel, first, saving = problem(tokens, configuration)
    count = min(64, copies_for(saving.fused.bytes))
    calls = [first] + [problem(tokens, configuration)[1] for _ in range(count - 1)]
    mx.eval([call["inputs"][:3] for call in calls])
    want = [o.astype(d) for o, d in zip(kernel.reference(kernel.launch(**first)), first["output_dtypes"], strict=True)]
    error = max(
        (mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max() / mx.abs(b).max()).item()
        for a, b in zip(kernel(**first), want, strict=True)
    )
    work = [partial(kernel, **c) for c in calls]
    seconds = queued(work, launches=32 if tokens > 100 else 128, rounds=rounds)
    floor = saving.fused.bytes / COPY_RATE
    row = {
        "name": kernel.name,
        "shape": f"{tokens} tokens",
        "configuration": f"{'threads' if problem is _router else 'vector'} {configuration or 'chosen'}",
        "us": 1e6 * seconds,
        "GB/s": saving.fused.bytes / seconds / 1e9,
        "floor_us": 1e6 * floor,
        "predicted_us": max(1e6 * floor / SHARE, LAUNCH_US),
        "error": error,
        "launches_saved": saving.launches,
        "bytes_saved": saving.bytes,
    }
    return row, work


def _baseline(problem: Problem, baseline: Callable, tokens: int) -> Calls:
    kernel, call, saving = problem(tokens, None)
    launches = [kernel.launch(**call)]
    for _ in range(min(16, copies_for(saving.fused.bytes)) - 1):
        launches.append(kernel.launch(**problem(tokens, None)[1]))
    mx.eval([launch.inputs[:3] for launch in launches])
    return [partial(baseline, launch) for launch in launches]


def _torch(work: Callable, tokens: int) -> Calls | None:
    try:
        import torch
    except ImportError:
        return None
    return [work(torch, tokens) for _ in range(4)] if torch.cuda.is_available() else None


def _torch_gated_norm(torch, tokens: int) -> Callable:
    x, z = (torch.randn(tokens, DELTA_HEADS, DELTA_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = torch.randn(DELTA_DIM, dtype=torch.bfloat16, device="cuda")
    return lambda: torch.nn.functional.rms_norm(x, (DELTA_DIM,), weight, 1e-6) * torch.nn.functional.silu(z)


def _torch_qk(torch, tokens: int) -> Callable:
    q, k = (torch.randn(1, tokens, h, DIM, dtype=torch.bfloat16, device="cuda") for h in HEADS)
    weight = torch.randn(DIM, dtype=torch.bfloat16, device="cuda")
    angle = torch.arange(tokens, device="cuda")[:, None, None] * 1e7 ** (-torch.arange(32, device="cuda") / 32)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def turn(x):
        x = torch.nn.functional.rms_norm(x, (DIM,), weight, 1e-6)
        low, high = x[..., :32], x[..., 32:64]
        return torch.cat([low * cos - high * sin, low * sin + high * cos, x[..., 64:]], dim=-1).transpose(1, 2)

    return lambda: (turn(q).contiguous(), turn(k).contiguous())


if __name__ == "__main__":
    print_rows(rows(quick=True))

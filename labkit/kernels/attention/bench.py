"""Attention at Qwen3.6-35B-A3B's shape: every form and split that could win, beside MLX's op, torch's best, the floor.

`us` is of launches queued in one evaluation, over buffers that no cache holds; launch cost is inside where it is
larger. `device_us`, where available, is the device's alone, and the rates are its.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from labkit.kernels.attention import paged_bench
from labkit.kernels.attention.launches import (
    DECODE,
    MERGE,
    PREFILL,
    decode_call,
    merge_call,
    prefill_call,
)
from labkit.kernels.attention.reference import attention
from labkit.kernels.attention.split import BLOCK, parts_for
from labkit.kernels.device_clock import Calls, add_device_times
from labkit.kernels.queued import copies_for, queued
from labkit.kernels.targets import device_target

COPY_RATE = 4.3e12  # bytes a second, an H200's device-to-device copy
MATMUL_RATE = 705e12  # bf16 operations a second there
HEADS, KV_HEADS, WIDTH = 16, 2, 256
SCALE = WIDTH**-0.5

# Predicted before any run, in microseconds: bytes at 3 TB/s and 4 us for the merge and the second launch.
DECODE_SIZES = ((4096, 8), (32768, 26), (131072, 94))
DECODE_CONFIGURATIONS = (
    ("tensor, general, 4 simdgroups", {"form": "tensor", "simds": 4}),
    ("tensor, general, 8 simdgroups", {"form": "tensor", "simds": 8}),
    ("tensor, general, 2 simdgroups", {"form": "tensor", "simds": 2}),
    ("tensor, general, half the parts", {"form": "tensor", "simds": 4, "share": 2}),
    ("tensor, fixed blocks", {"form": "tensor", "simds": 4, "block": BLOCK}),
    ("lanes, general, 8 heads a read", {"form": "lanes", "pack": 8}),
    ("lanes, general, 4 heads a read", {"form": "lanes", "pack": 4}),
    ("lanes, general, 1 head a read", {"form": "lanes", "pack": 1}),
    ("lanes, general, 4 heads, element reads", {"form": "lanes", "pack": 4, "wide": False}),
)
# 4 products of 16 operands' rows a simdgroup at a time: shared memory feeds half the tensor cores' rate.
PREFILL_SIZES = ((4096, 180), (8192, 690))
PREFILL_CONFIGURATIONS = tuple((f"tensor, {simds} simdgroups", {"form": "tensor", "simds": simds}) for simds in (4, 8))


def rows(quick: bool = True) -> list[dict]:
    """One row a configuration and size: us, TB/s or TFLOP/s, error against the reference, MLX's and torch's times."""
    found = []
    for columns, predicted in DECODE_SIZES:
        found += _decode_rows(columns, predicted, DECODE_CONFIGURATIONS[: 7 if quick and columns > 4096 else None])
    for length, predicted in PREFILL_SIZES[: 1 if quick else None]:
        found += _prefill_rows(length, predicted)
    return [*found, *paged_bench.rows(quick)]


def random_tensors(columns: int, length: int, sets: int) -> list[tuple[mx.array, ...]]:
    """So many sets of queries, keys and values of one row, bf16."""

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, dtype=mx.bfloat16)

    made = [
        (
            normal(1, HEADS, length, WIDTH),
            normal(1, KV_HEADS, columns, WIDTH),
            normal(1, KV_HEADS, columns, WIDTH),
        )
        for _ in range(sets)
    ]
    mx.eval(made)
    return made


def _decode_rows(columns: int, predicted: float, configurations: Sequence) -> list[dict]:
    nbytes = 2 * 2 * KV_HEADS * WIDTH * columns
    tensors = random_tensors(columns, 1, copies_for(nbytes))
    first, last = mx.array([0], dtype=mx.int32), mx.array([columns], dtype=mx.int32)
    want = attention(tensors[0][0][:, :, 0], *tensors[0][1:], first, last, SCALE)

    def call(one: tuple[mx.array, ...], share: int = 1, block: int = 0, **options) -> list[mx.array]:
        parts = -(-columns // block) if block else max(1, parts_for(1, KV_HEADS, 8, columns) // share)
        form = options["form"]
        given = decode_call(one[0][:, :, 0], *one[1:], first, last, scale=SCALE, parts=parts, block=block, **options)
        return MERGE(**merge_call(*DECODE[form](**given), mx.bfloat16))

    def mlx(one: tuple[mx.array, ...]) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(*one, scale=SCALE)]

    problem = {"shape": f"16/2 heads of 256, {columns // 1024}K", "floor_us": nbytes / COPY_RATE * 1e6}
    found = _timed("decode attention", problem, configurations, call, mlx, tensors, want, predicted, nbytes=nbytes)
    return add_device_times([*found, *_torch(problem, columns, 1)], {"mlx": found[0][1]})


def _prefill_rows(length: int, predicted: float) -> list[dict]:
    operations = 2 * 2 * HEADS * WIDTH * length * (length + 1) // 2
    tensors = random_tensors(length, length, 3)
    zero = mx.array([0], dtype=mx.int32)
    want = mx.fast.scaled_dot_product_attention(*tensors[0], scale=SCALE, mask="causal").astype(mx.float32)

    def call(one: tuple[mx.array, ...], **options) -> list[mx.array]:
        return PREFILL[options["form"]](**prefill_call(*one, zero, zero, scale=SCALE, **options))

    def mlx(one: tuple[mx.array, ...]) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(*one, scale=SCALE, mask="causal")]

    problem = {"shape": f"16/2 heads of 256, {length} causal", "floor_us": operations / MATMUL_RATE * 1e6}
    found = _timed(
        "prefill attention",
        problem,
        PREFILL_CONFIGURATIONS,
        call,
        mlx,
        tensors,
        want,
        predicted,
        operations=operations,
        launches=8,
    )
    return add_device_times([*found, *_torch(problem, length, length)], {"mlx": found[0][1]}, launches=6)


def _timed(
    name: str,
    problem: dict,
    configurations: Sequence[tuple[str, dict]],
    call: Callable[..., list[mx.array]],
    mlx: Callable[..., list[mx.array]],
    tensors: list,
    want: mx.array,
    predicted: float,
    *,
    nbytes: int = 0,
    operations: int = 0,
    launches: int = 64,
) -> list[tuple[dict, Calls]]:
    calls = [partial(mlx, one) for one in tensors]
    baseline = queued(calls, launches=min(launches, 16)) * 1e6
    row = {"name": f"{name}: MLX's op", **problem, "us": baseline, **_rate(baseline, nbytes, operations)}
    found = [(row, calls)]
    for label, options in configurations:
        try:
            out = call(tensors[0], **options)[0].astype(mx.float32)
            error = mx.linalg.norm(out.flatten() - want.flatten()) / mx.linalg.norm(want.flatten())
            calls = [partial(call, one, **options) for one in tensors]
            us = queued(calls, launches=launches) * 1e6
        except Exception as failure:
            print(f"{name}, {problem['shape']}, {label}: {type(failure).__name__}: {str(failure)[:300]}")
            continue
        row = {"name": f"{name}: {label}", **problem, "us": us, **_rate(us, nbytes, operations)}
        row |= {"relative_error": error.item(), "predicted_us": predicted, "mlx_us": baseline}
        found.append((row | {"target": device_target()}, calls))
    return found


def _rate(us: float, nbytes: int, operations: int) -> dict[str, float]:
    return {"TB/s": nbytes / us / 1e6} if nbytes else {"TFLOP/s": operations / us / 1e6}


def _torch(problem: dict, columns: int, length: int) -> list[tuple[dict, Calls]]:
    """torch's scaled_dot_product_attention, its best back end, where torch sees the GPU."""
    try:
        from triton.testing import do_bench

        calls = torch_calls(columns, length)
        us = do_bench(calls[0], warmup=20, rep=60, return_mode="median") * 1e3
    except Exception as failure:
        print(f"torch, {problem['shape']}: {type(failure).__name__}: {str(failure)[:200]}")
        return []
    nbytes = 2 * 2 * KV_HEADS * WIDTH * columns if length == 1 else 0
    operations = 2 * 2 * HEADS * WIDTH * length * (length + 1) // 2
    row = {"name": "torch scaled_dot_product_attention", **problem, "us": us, **_rate(us, nbytes, operations)}
    return [(row, calls)]


def torch_calls(columns: int, length: int) -> Calls:
    """torch's scaled_dot_product_attention of `length` new tokens over as many sets of columns as leave the L2."""
    import torch

    def normal(heads: int, rows: int) -> torch.Tensor:
        return torch.randn(1, heads, rows, WIDTH, device="cuda", dtype=torch.bfloat16)

    def run(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=length > 1, enable_gqa=True
        )

    sets = copies_for(2 * 2 * KV_HEADS * WIDTH * columns) if length == 1 else 3
    return [partial(run, normal(HEADS, length), *(normal(KV_HEADS, columns) for _ in "kv")) for _ in range(sets)]

"""The quantised product's configurations against each other, MLX's op and torch's, at the sizes of Qwen3.6-35B-A3B."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from labkit.kernels.device_clock import Calls, add_device_times
from labkit.kernels.launch import Kernel
from labkit.kernels.quantized_matmul.launches import FEW_ROWS, MANY_ROWS, few_rows_call, many_rows_call
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.queued import copies_for, queued
from labkit.kernels.targets import device_target

COPY_RATE = 4.3e12  # bytes a second, an H200's device-to-device copy
MATMUL_RATE = 705e12  # bf16 operations a second there, MLX's 8192^3 product

EMPTY = Kernel("empty_launch", ["x"], ["y"], "if (thread_position_in_grid.x == 0) y[0] = x[0];")

# Predicted before any run, in microseconds: bytes at 3.2 TB/s and 1.5 us more, or operations at 300 TFLOP/s.
FEW_ROWS_SIZES = ((1, 2048, 3), (1, 12288, 6), (1, 248320, 91), (4, 12288, 7), (8, 12288, 9))
MANY_ROWS_SIZES = ((64, 12288, 25), (512, 12288, 90), (4096, 12288, 690))
K = 2048

# Of the form "tensor" at most 16 steps in flight: see `launches.tensor_split_for`.
FEW_ROWS_CONFIGURATIONS = (
    ("row", {}),
    ("tensor", {"parts": 1, "simds": 4, "unroll": 4}),
    ("tensor", {"parts": 1, "simds": 8, "unroll": 2}),
    ("tensor", {"parts": 2, "simds": 4, "unroll": 1}),
    ("tensor", {"parts": 1, "simds": 4, "unroll": 2}),
    ("tensor", {"parts": 1, "simds": 2, "unroll": 4}),
    ("plain", {"parts": 1, "simds": 4}),
    ("plain", {"parts": 1, "simds": 8}),
)
MANY_ROWS_CONFIGURATIONS = (
    ("tensor", {"tile": 128, "stages": 3}),
    ("tensor", {"tile": 128, "stages": 2}),
    ("tensor", {"tile": 64, "stages": 4}),
    ("tensor", {"tile": 32, "stages": 4}),
)


def random_words(n: int, k: int, experts: int | None = None, dtype: mx.Dtype = mx.bfloat16) -> Packed:
    """4-bit weights of random bits: no float matrix of their size is ever there."""
    lead = (n,) if experts is None else (experts, n)
    w = mx.random.randint(0, 1 << 16, (*lead, k // 8 * 2), mx.int32).astype(mx.uint16).view(mx.uint32)
    scales = mx.random.uniform(0.001, 0.003, (*lead, k // 64)).astype(dtype)
    return Packed(w, scales, -8 * scales)


def rows(quick: bool = True) -> list[dict]:
    """One row a configuration and size: us, rate, error against MLX's op; MLX's and torch's times beside it.

    `us` has the launch inside, where that is the larger (the first row says what it costs, the last one whether the
    profiler changed it); `device_us`, where it can be had, has not, and the rates are its. A configuration that fails
    is printed and left out.
    """
    found = _launch_row("empty launch")
    for m, n, predicted in FEW_ROWS_SIZES:
        # Each configuration compiles anew: the whole list at the size that the targets are set for.
        configurations = [c for c in FEW_ROWS_CONFIGURATIONS if c[0] != "row" or m == 1]
        configurations = configurations[: 3 if quick and (m, n) != (1, 12288) else None]
        found += _size(m, n, predicted, configurations, lambda form: (FEW_ROWS[form], few_rows_call), quick)
    for m, n, predicted in MANY_ROWS_SIZES:
        configurations = [c for c in MANY_ROWS_CONFIGURATIONS if c[1]["tile"] <= max(32, m)]
        found += _size(m, n, predicted, configurations, lambda form: (MANY_ROWS[form], many_rows_call), quick)
    return found + _launch_row("empty launch, once profiled")


def _launch_row(name: str) -> list[dict]:
    x = mx.zeros((64,))
    call = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(64,)], "output_dtypes": [x.dtype]}
    calls = [lambda: EMPTY(inputs=[x], target=device_target(), **call)]
    row = {"name": name, "shape": "", "configuration": "", "us": 1e6 * queued(calls, launches=200)}
    return add_device_times([(row, calls)])


def _size(m: int, n: int, predicted: float, configurations, kernel_of: Callable, quick: bool) -> list[dict]:
    first = random_words(n, K)
    # One set of weights is made, the others are copies: what they hold does not change the time.
    packs = [first] + [
        Packed(*(a + mx.zeros_like(a) for a in first.arrays)) for _ in range(copies_for(first.nbytes) - 1)
    ]
    x = mx.random.normal((m, K)).astype(mx.bfloat16)
    mx.eval(x, *(p.arrays for p in packs))
    launches = 32 if first.nbytes > 1e8 or m > 64 else 128
    rounds = 3 if quick else 9

    def mlx(p: Packed) -> list[mx.array]:
        return [mx.quantized_matmul(x, *p.arrays, transpose=True, group_size=64, bits=4)]

    def dequantized(p: Packed) -> list[mx.array]:
        return [x @ mx.dequantize(*p.arrays, 64, 4).T]

    def timed(calls: Calls) -> float:
        return 1e6 * queued(calls, launches=launches, rounds=rounds)

    others = {
        "mlx": [partial(mlx, p) for p in packs],
        "dequantize": [partial(dequantized, p) for p in packs],
        "torch": attempt("torch", partial(torch_int4_calls, m, n, K, len(packs))),
    }
    beside = {
        "mlx_us": attempt("mlx", partial(timed, others["mlx"])),
        "dequantize_us": attempt("dequantize", partial(timed, others["dequantize"])),
        "torch_us": attempt("torch", partial(torch_us, others["torch"])) if others["torch"] else None,
        "floor_us": 1e6 * max(first.nbytes / COPY_RATE, 2 * m * n * K / MATMUL_RATE),
        "predicted_us": predicted,
    }
    want, found = mlx(first)[0].astype(mx.float32), []
    for form, options in configurations:
        kernel, call_of = kernel_of(form)

        def measure(form=form, options=options, kernel=kernel, call_of=call_of) -> tuple[dict, Calls]:
            calls = [partial(kernel, **call_of(x, p, form, **options)) for p in packs]
            (got,) = calls[0]()
            error = (mx.abs(got.astype(mx.float32) - want).max() / mx.abs(want).max()).item()
            us = timed(calls)
            row = {"name": kernel.name, "shape": f"{m}x{K} by {n}", "configuration": str(options), "us": us}
            row |= {"GB/s": first.nbytes / us / 1e3, "TFLOP/s": 2 * m * n * K / us / 1e6, "error": error, **beside}
            return row, calls

        if measured := attempt(f"{kernel.name} {options}", measure):
            found.append(measured)
    return add_device_times(found, others, launches=24 if m <= 64 else 8)


def attempt(what: str, measure: Callable):
    """What `measure` gives, or None: the failure of one configuration must not hide the others."""
    try:
        return measure()
    except Exception as error:
        print(f"{what} failed: {type(error).__name__}: {str(error)[:600]}")
        return None


def torch_int4_calls(m: int, n: int, k: int, copies: int) -> Calls | None:
    """torch's own 4-bit product on `copies` sets of weights, or None without torch on a GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or n % 8:
        return None
    raw = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device="cuda")
    packs = [torch.ops.aten._convert_weight_to_int4pack(raw, 8) for _ in range(copies)]
    zeros = torch.rand(k // 64, n, 2, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    return [lambda p=p: torch.ops.aten._weight_int4pack_mm(x, p, 64, zeros) for p in packs]


def torch_us(calls: Sequence[Callable], launches: int = 64) -> float:
    """Microseconds of a torch call by events, launches back to back."""
    import torch

    cycle = itertools.islice(itertools.cycle(calls), launches)
    for call in calls:
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for call in cycle:
        call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / launches


def print_rows(found: Sequence[dict]) -> None:
    """A line a row."""
    for row in found:
        figures = {k: v for k, v in row.items() if k not in ("name", "shape", "configuration")}
        values = "  ".join(f"{k} {v:.4g}" for k, v in figures.items() if v is not None)
        print(f"{row['name']:24s} {row['shape']:24s} {row['configuration']:44s} {values}", flush=True)


if __name__ == "__main__":
    print_rows(rows(quick=True))

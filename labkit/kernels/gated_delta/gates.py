"""Cases and tolerances of the Gated DeltaNet kernels."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from labkit.kernels.gated_delta import reference
from labkit.kernels.gated_delta.chunks import (
    PREPARE,
    PREPARE_MMA,
    SCAN_CHUNKS,
    SCAN_MMA,
    Tensor,
    prepare_call,
    prepare_mma_call,
    scan_chunks_call,
    scan_mma_call,
)
from labkit.kernels.gated_delta.conv import CONV, conv_call
from labkit.kernels.gated_delta.norm import GATED_NORM, gated_norm_call
from labkit.kernels.gated_delta.recurrence import SCAN, SCAN_BLOCKED, Layout, scan_blocked_call, scan_call
from labkit.kernels.gated_delta.shapes import RuleInputs
from labkit.kernels.gated_delta.step import STEP, step_call
from labkit.kernels.registry import Bench, Case, Entry, Tolerance
from labkit.kernels.signature import Launch


def scan_inputs(batch: int, length: int, hk: int, hv: int, dk: int, dv: int, dtype: mx.Dtype) -> list[mx.array]:
    """Random q, k, v, log_decay, beta and state, scaled as a trained layer's are."""
    q, k = (reference.l2_norm(mx.random.normal((batch, length, hk, dk))) for _ in range(2))
    v = mx.random.normal((batch, length, hv, dv))
    log_decay = -mx.exp(mx.random.uniform(-6, 1, (batch, length, hv)))
    beta = mx.random.uniform(0, 1, (batch, length, hv))
    state = mx.random.normal((batch, hv, dv, dk)) * dk**-0.5
    return [(q * dk**-0.5).astype(dtype), k.astype(dtype), v.astype(dtype), log_decay, beta, state]


def layer_inputs(batch: int, length: int, hk: int, hv: int, dk: int, dv: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Random inputs of a whole mixer but its projections, by the names of `decode_step`'s arguments."""
    channels = 2 * hk * dk + hv * dv
    normal = lambda *shape: mx.random.normal(shape).astype(dtype)
    return {
        "qkv": normal(batch, length, channels),
        "a": normal(batch, length, hv),
        "b": normal(batch, length, hv),
        "z": normal(batch, length, hv, dv),
        "tail": normal(batch, 3, channels),
        "state": mx.random.normal((batch, hv, dv, dk)) * dk**-0.5,
        "weight": (mx.random.normal((channels, 4)) * 0.5).astype(dtype),
        "a_log": mx.log(mx.random.uniform(0.01, 16, (hv,))),
        "dt_bias": mx.random.uniform(-4, 1, (hv,)).astype(dtype),
        "norm_weight": mx.random.uniform(0.5, 1.5, (dv,)).astype(dtype),
    }


def _spans(spans: list | None) -> mx.array | None:
    return None if spans is None else mx.array(spans, dtype=mx.int32)


def _rule(sizes: tuple[int, ...], dtype: mx.Dtype, spans: list | None = None) -> RuleInputs:
    return RuleInputs.checked(*scan_inputs(*sizes, dtype), _spans(spans))


def _scan(sizes: tuple[int, ...], layout: Layout | None = None, spans: list | None = None):
    def make(dtype: mx.Dtype) -> Launch:
        return SCAN.launch(**scan_call(_rule(sizes, dtype, spans), layout))

    return make


def _mlx_update(launch: Launch) -> list[mx.array]:
    q, k, v, log_decay, beta, state, _, _ = launch.inputs
    return mx.fast.gated_delta_update(q, k, v, mx.exp(log_decay), beta, state)


def _bench_scan(length: int, baseline: Callable[[Launch], list[mx.array]] | None = None) -> Bench:
    heads, dim = 32, 128
    return Bench(
        f"{length} tokens, 16/{heads} heads of {dim}",
        _scan((1, length, heads // 2, heads, dim, dim)),
        baseline,
        bytes=length * heads * (3 * dim * 2 + 8) + 8 * heads * dim * dim,
        operations=7 * length * heads * dim * dim,
    )


def _blocked(sizes: tuple[int, ...], spans: list | None = None):
    def make(dtype: mx.Dtype) -> Launch:
        return SCAN_BLOCKED.launch(**scan_blocked_call(_rule(sizes, dtype, spans), tokens=8))

    return make


def _conv(sizes: tuple[int, ...], spans: list | None = None):
    def make(dtype: mx.Dtype) -> Launch:
        given = layer_inputs(*sizes, dtype)
        del given["z"], given["state"], given["norm_weight"]
        return CONV.launch(**conv_call(**given, spans=_spans(spans), heads=sizes[2:4], dims=sizes[4:]))

    return make


def _step(sizes: tuple[int, ...], spans: list | None = None, each: bool = False):
    def make(dtype: mx.Dtype) -> Launch:
        given = layer_inputs(*sizes, dtype)
        call = step_call(**given, eps=1e-6, spans=_spans(spans), heads=sizes[2:4], dims=sizes[4:], each=each)
        return STEP.launch(**call)

    return make


def _joined(sizes: tuple[int, ...], step: bool, spans: list | None = None):
    """A decode step, or what stands before a scan, on the rows of one projection: q, k and v, then z, a and b."""

    def make(dtype: mx.Dtype) -> Launch:
        given = layer_inputs(*sizes, dtype)
        parts = [given[name].reshape(*sizes[:2], -1) for name in ("qkv", "z", "a", "b")]
        z = parts[0].shape[-1]
        a = z + parts[1].shape[-1]
        given |= {"qkv": mx.concatenate(parts, axis=-1), "z": z, "a": a, "b": a + sizes[3]}
        options = {"spans": _spans(spans), "heads": sizes[2:4], "dims": sizes[4:]}
        if step:
            return STEP.launch(**step_call(**given, eps=1e-6, **options))
        del given["z"], given["state"], given["norm_weight"]
        return CONV.launch(**conv_call(**given, **options))

    return make


def _norm(batch: int, length: int, heads: int, dim: int):
    def make(dtype: mx.Dtype) -> Launch:
        y, z = (mx.random.normal((batch, length, heads, dim)).astype(dtype) for _ in range(2))
        return GATED_NORM.launch(**gated_norm_call(y, z, mx.random.uniform(0.5, 1.5, (dim,)).astype(dtype), 1e-6))

    return make


def _chunk(sizes: tuple[int, ...], part: str, tensor: Tensor | None = None, spans: list | None = None):
    """The first or second launch of the chunked form; the second gets what the first one's reference gives."""

    def make(dtype: mx.Dtype) -> Launch:
        rule = _rule(sizes, dtype, spans)
        kernel = PREPARE_MMA if tensor else PREPARE
        call = prepare_mma_call(rule, tensor) if tensor else prepare_call(rule)
        if part == "prepare":
            return kernel.launch(**call)
        prepared = kernel(**call, target="reference")
        if tensor:
            return SCAN_MMA.launch(**scan_mma_call(rule, prepared, tensor))
        return SCAN_CHUNKS.launch(**scan_chunks_call(rule, prepared))

    return make


TOLERANCE = {
    mx.float32: Tolerance(2e-6, 1e-5),
    mx.float16: Tolerance(1e-4, 1e-3),
    mx.bfloat16: Tolerance(1e-4, 8e-3),
}
ACCUMULATED = {dtype: Tolerance(4e-6, max(1e-5, bound.relative)) for dtype, bound in TOLERANCE.items()}
ROUNDED = {mx.bfloat16: Tolerance(1e-2, 1e-2)}
"""Products of bf16: a few parts in a thousand of values near 1."""
PADS = [[3, 18], [0, 1], [7, 7]]
"""Pads on the left, on the right, and a row of nothing else."""

ENTRIES = [
    Entry(
        SCAN,
        cases=(
            Case("17 tokens, 1/2 heads of 128", _scan((1, 17, 1, 2, 128, 128))),
            Case("pads left, right and all", _scan((3, 18, 1, 2, 128, 128), None, PADS)),
        ),
        summary="Gated DeltaNet scan, state in registers",
        tolerance=TOLERANCE,
        benches=(_bench_scan(64, _mlx_update), _bench_scan(4096)),
    ),
    Entry(
        SCAN_BLOCKED,
        cases=(
            Case("17 tokens, 1/2 heads of 128 x 32", _blocked((1, 17, 1, 2, 128, 32))),
            Case("pads left, right and all", _blocked((3, 18, 1, 1, 128, 32), PADS)),
        ),
        summary="the scan's baseline: state in device memory between blocks of tokens",
        tolerance=TOLERANCE,
    ),
    Entry(
        PREPARE,
        cases=(
            Case("40 tokens, 1/2 heads of 64 x 32", _chunk((1, 40, 1, 2, 64, 32), "prepare")),
            Case("pads left and right", _chunk((2, 18, 1, 2, 64, 32), "prepare", None, [[3, 18], [0, 5]])),
        ),
        summary="chunked Gated DeltaNet: what needs no state, for all chunks at once",
        tolerance=dict.fromkeys((mx.float32, mx.float16, mx.bfloat16), Tolerance(1e-5, 1e-4)),
    ),
    Entry(
        SCAN_CHUNKS,
        cases=(
            Case("40 tokens, 1/2 heads of 32", _chunk((1, 40, 1, 2, 32, 32), "scan")),
            Case("pads left, right and all", _chunk((3, 40, 1, 2, 32, 32), "scan", None, [[3, 40], [0, 5], [7, 7]])),
        ),
        summary="chunked Gated DeltaNet: the state from chunk to chunk, 8 x 8 matrices",
        tolerance=ACCUMULATED,
    ),
    Entry(
        PREPARE_MMA,
        cases=(Case("40 tokens, 1/2 heads of 128", _chunk((1, 40, 1, 2, 128, 128), "prepare", Tensor(32, 1, True))),),
        summary="chunked Gated DeltaNet's first part on tensor cores",
        dtypes=(mx.bfloat16,),
        tolerance=ROUNDED,
    ),
    Entry(
        SCAN_MMA,
        cases=(
            Case("40 tokens, 1/2 heads of 128", _chunk((1, 40, 1, 2, 128, 128), "scan", Tensor(32, 2, True))),
            Case("pads", _chunk((2, 40, 1, 2, 128, 128), "scan", Tensor(32, 1, True), [[3, 40], [7, 7]])),
        ),
        summary="chunked Gated DeltaNet's second part on tensor cores",
        dtypes=(mx.bfloat16,),
        tolerance=ROUNDED,
    ),
    Entry(
        CONV,
        cases=(
            Case("10 tokens, 1/2 heads of 128", _conv((1, 10, 1, 2, 128, 128))),
            Case("pads left, right and all", _conv((3, 18, 1, 2, 128, 128), PADS)),
            Case("side by side with z, a and b", _joined((2, 10, 1, 2, 64, 96), False, [[2, 10], [0, 5]])),
        ),
        summary="Gated DeltaNet's convolution, norms and gates in one pass",
    ),
    Entry(
        STEP,
        cases=(
            Case("2 rows of 3 tokens, 1/2 heads of 128", _step((2, 3, 1, 2, 128, 128), None, True)),
            Case("pads left, right and all", _step((3, 3, 1, 2, 128, 128), [[0, 2], [1, 3], [2, 2]], True)),
            Case("side by side with z, a and b", _joined((2, 2, 1, 2, 64, 96), True, [[1, 2], [0, 2]])),
        ),
        summary="Gated DeltaNet decode step, 1 to 8 tokens in one launch",
    ),
    Entry(
        GATED_NORM,
        cases=(
            Case("2 x 3 tokens of 4 heads of 128", _norm(2, 3, 4, 128)),
            Case("5 rows of 96", _norm(1, 5, 1, 96)),
        ),
        summary="RMSNorm gated by silu",
    ),
]

"""Cases, tolerances and baselines of the attention, DeltaNet and router chains."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.fused.launches import (
    APPEND_HEADS,
    GATED_RMS_NORM,
    NORM_ROUTER,
    OUTPUT_GATE,
    QK_NORM_ROPE,
    append_heads_call,
    gated_rms_norm_call,
    norm_router_call,
    output_gate_call,
    qk_norm_rope_call,
)
from labkit.kernels.registry import Bench, Case, Entry, Tolerance
from labkit.kernels.signature import Launch


def _normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def _weight(dim: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.uniform(0.5, 1.5, (dim,)).astype(dtype)


def _qk(rows, length, heads, dim, rotary, dtype, gated=True, positions=None) -> Launch:
    queries = _normal((rows, length, heads[0], dim * (2 if gated else 1)), dtype)
    keys = _normal((rows, length, heads[1], dim), dtype)
    if positions is None:
        positions = mx.random.randint(-5, 2000, (rows,))
    weights = _weight(dim, dtype), _weight(dim, dtype)
    return QK_NORM_ROPE.launch(**qk_norm_rope_call(queries, keys, *weights, positions, 1e-6, rotary, 1e7))


def _append(rows, length, heads, dim, rotary, columns, write, dtype) -> Launch:
    width = (2 * heads[0] + 2 * heads[1]) * dim
    tails = [_normal((rows, heads[1], columns, dim), dtype) for _ in range(2)]
    at = mx.array([write] * 8 if type(write) is int else [[at] for at in write], dtype=mx.int32)
    weights = _weight(dim, dtype), _weight(dim, dtype)
    positions = mx.random.randint(-5, 2000, (rows,))
    return APPEND_HEADS.launch(
        **append_heads_call(_normal((rows, length, width), dtype), *weights, positions, *tails, at, 1e-6, rotary, 1e7)
    )


def _gate(rows, heads, length, dim, dtype) -> Launch:
    attended, q_gate = _normal((rows, heads, length, dim), dtype), _normal((rows, length, heads, 2 * dim), dtype)
    return OUTPUT_GATE.launch(**output_gate_call(attended, q_gate))


def _gated_norm(tokens, heads, dim, dtype, width=0, start=0) -> Launch:
    z = _normal((tokens, width) if width else (tokens, heads, dim), dtype)
    return GATED_RMS_NORM.launch(
        **gated_rms_norm_call(_normal((tokens, heads, dim), dtype), z, _weight(dim, dtype), 1e-6, start)
    )


def _router(rows, dim, experts, dtype, group_size=64, bits=8, stream=None) -> Launch:
    router = mx.quantize(_normal((experts, dim), dtype) * dim**-0.5, group_size=group_size, bits=bits)
    x, residual = _normal((rows, dim), dtype), _normal((rows, dim), stream or dtype)
    return NORM_ROUTER.launch(
        **norm_router_call(x, residual, _weight(dim, dtype), tuple(router), 1e-6, group_size, bits)
    )


def mlx_qk(launch: Launch) -> list[mx.array]:
    """Split, norms, rotations."""
    queries, keys, q_weight, k_weight, _, positions = launch.inputs[:6]
    dim = keys.shape[-1]
    q = mx.fast.rms_norm(queries[..., :dim], q_weight, 1e-6).transpose(0, 2, 1, 3)
    k = mx.fast.rms_norm(keys, k_weight, 1e-6).transpose(0, 2, 1, 3)
    return [mx.fast.rope(x, dim // 4, traditional=False, base=1e7, scale=1.0, offset=positions) for x in (q, k)]


def mlx_gate(launch: Launch) -> list[mx.array]:
    """Layout, sigmoid, multiply."""
    attended, q_gate = launch.inputs[:2]
    shape = launch.output_shapes[0]
    gate = q_gate[..., attended.shape[-1] :].reshape(shape)
    return [attended.transpose(0, 2, 1, 3).reshape(shape) * mx.sigmoid(gate)]


def mlx_gated_norm(launch: Launch) -> list[mx.array]:
    """mlx-lm's own."""
    from mlx_lm.models.activations import precise_swiglu

    x, z, weight = launch.inputs[:3]
    return [precise_swiglu(x, z, mx.fast.rms_norm(x, weight, 1e-6))]


def mlx_router(launch: Launch) -> list[mx.array]:
    """Add, norm, quantised matmul."""
    x, residual, weight, *router = launch.inputs[:6]
    hidden = x + residual
    normed = mx.fast.rms_norm(hidden, weight, 1e-6)
    return [hidden, normed, mx.quantized_matmul(normed, *router, transpose=True, group_size=64, bits=8)]


# Angles near 2,000 radians carry the rounding of their fp32 product, which cos and sin hand on.
_ROTATED = {
    mx.float32: Tolerance(4e-6, 4e-6),
    mx.float16: Tolerance(2e-3, 2e-3),
    mx.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}
# A norm that rounds the other way moves one of D products by half a unit in the last place of the activations.
SCORED = {
    mx.float32: Tolerance(1e-5, 1e-5),
    mx.float16: Tolerance(3e-3, 2e-3),
    mx.bfloat16: Tolerance(2e-2, 1.6e-2),
}

CHAIN_ENTRIES = [
    Entry(
        QK_NORM_ROPE,
        cases=(
            Case("1 token, 16/2 heads of 256, rotary 64", lambda dtype: _qk(1, 1, (16, 2), 256, 64, dtype)),
            Case(
                "2 x 3 tokens, 3/1 heads of 80, all rotated, own positions, no gate",
                lambda dtype: _qk(2, 3, (3, 1), 80, 80, dtype, False, mx.random.randint(0, 99, (2, 3))),
            ),
            Case("1 x 2 tokens, 1/1 heads of 33, rotary 6", lambda dtype: _qk(1, 2, (1, 1), 33, 6, dtype)),
        ),
        summary="q/k norm, partial rotary and layout; the output gate stays where it is",
        tolerance=_ROTATED,
        benches=(
            Bench("1 token", lambda dtype: _qk(1, 1, (16, 2), 256, 64, dtype), mlx_qk, bytes=2 * 2 * 18 * 256),
            Bench(
                "4096 tokens",
                lambda dtype: _qk(1, 4096, (16, 2), 256, 64, dtype),
                mlx_qk,
                bytes=4096 * 2 * 2 * 18 * 256,
            ),
        ),
    ),
    Entry(
        APPEND_HEADS,
        cases=(
            Case("1 token, 8/1 heads of 256, 8 columns", lambda dtype: _append(1, 1, (8, 1), 256, 64, 8, 5, dtype)),
            Case("2 x 3 tokens to the end", lambda dtype: _append(2, 3, (4, 2), 64, 64, 11, 8, dtype)),
            Case("2 x 2 tokens into an empty tail", lambda dtype: _append(2, 2, (3, 1), 36, 6, 5, 0, dtype)),
            Case("2 x 2 tokens, each row elsewhere", lambda dtype: _append(2, 2, (2, 1), 64, 16, 7, (5, 1), dtype)),
        ),
        summary="q/k norm and rotation of new tokens, their keys and values in a tail of the cache",
        tolerance=_ROTATED,
        benches=(
            Bench(
                "1 token, 16/2 heads of 256, 256 columns",
                lambda dtype: _append(1, 1, (16, 2), 256, 64, 256, 100, dtype),
                bytes=2 * 2 * 2 * 2 * 256 * 256 + 2 * (2 * 16 + 4) * 256,
            ),
        ),
    ),
    Entry(
        OUTPUT_GATE,
        cases=(
            Case("1 x 2 tokens, 16 heads of 256", lambda dtype: _gate(1, 16, 2, 256, dtype)),
            Case("2 x 3 tokens, 3 heads of 33", lambda dtype: _gate(2, 3, 3, 33, dtype)),
        ),
        summary="attention's output gate, and the heads joined",
        benches=(
            Bench(
                "4096 tokens, 16 heads of 256",
                lambda dtype: _gate(1, 16, 4096, 256, dtype),
                mlx_gate,
                bytes=4096 * 3 * 2 * 16 * 256,
            ),
        ),
    ),
    Entry(
        GATED_RMS_NORM,
        cases=(
            Case("1 token, 32 heads of 128", lambda dtype: _gated_norm(1, 32, 128, dtype)),
            Case(
                "3 tokens, 3 heads of 40, gates inside wider rows",
                lambda dtype: _gated_norm(3, 3, 40, dtype, width=140, start=17),
            ),
        ),
        summary="DeltaNet's output norm times silu of its gate",
        benches=(
            Bench(
                "4096 tokens, 32 heads of 128",
                lambda dtype: _gated_norm(4096, 32, 128, dtype),
                mlx_gated_norm,
                bytes=4096 * 3 * 2 * 32 * 128,
            ),
        ),
    ),
    Entry(
        NORM_ROUTER,
        cases=(
            Case("2 rows of 512, 20 experts, 8 bits", lambda dtype: _router(2, 512, 20, dtype)),
            Case("1 row of 96, 9 experts, 4 bits in 32s", lambda dtype: _router(1, 96, 9, dtype, 32, 4)),
            Case("2 rows to a float32 stream", lambda dtype: _router(2, 128, 5, dtype, stream=mx.float32)),
        ),
        summary="residual add, RMSNorm and the router's logits",
        tolerance=SCORED,
        benches=(
            Bench(
                "1 row of 2048, 256 experts, 8 bits",
                lambda dtype: _router(1, 2048, 256, dtype),
                mlx_router,
                bytes=256 * (2048 + 2048 // 64 * 4) + 5 * 2 * 2048,
                operations=2 * 256 * 2048,
            ),
        ),
    ),
]

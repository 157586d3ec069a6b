"""The same, launch by launch: what the persistent forms are held to, and what runs where they do not."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.attention import Tail, decode_rows
from labkit.kernels.fused import append_heads, norm_router, residual_rms_norm
from labkit.kernels.gated_delta import decode_step
from labkit.kernels.grouped_matmul import decode_experts
from labkit.kernels.persistent.arguments import Attention, Cached, Delta, Sparse
from labkit.kernels.quantized_matmul import quantized_matmul
from labkit.kernels.routing import choose_experts


def sparse_half(
    update: mx.array, stream: mx.array, sparse: Sparse, eps: float, target: str | None = None
) -> list[mx.array]:
    """hidden and y, as `labkit.kernels.persistent.sparse_half`."""
    router = sparse.router
    hidden, x, logits = norm_router(
        update, stream, sparse.norm, tuple(router.arrays), eps,
        group_size=router.group_size, bits=router.bits, target=target,
    )  # fmt: skip
    indices, weights = choose_experts(
        logits, sparse.top_k, experts=sparse.experts, renormalise=sparse.renormalise, shared=sparse.shared,
        target=target,
    )  # fmt: skip
    return [hidden, decode_experts(x, sparse.gate, sparse.up, sparse.down, indices, weights, target=target)]


def linear_layer(
    update: mx.array,
    stream: mx.array,
    delta: Delta,
    tail: mx.array,
    state: mx.array,
    sparse: Sparse,
    eps: float,
    target: str | None = None,
) -> list[mx.array]:
    """hidden, y, the new state and the new tail, as `labkit.kernels.persistent.linear_layer`."""
    stream, x = residual_rms_norm(update, stream, delta.input_norm, eps, target=target)
    rows = x.shape[0]
    projected = quantized_matmul(x, delta.inputs, variant="few_rows", target=target).reshape(rows, 1, -1)
    (hk, hv), (dk, dv) = delta.heads, delta.dims
    channels, width = 2 * hk * dk + hv * dv, hv * dv
    mixed, state, tail = decode_step(
        projected, channels + width, channels + width + hv, channels, tail, state, delta.conv, delta.a_log,
        delta.dt_bias, delta.norm, eps, heads=delta.heads, dims=delta.dims, target=target,
    )  # fmt: skip
    added = quantized_matmul(mixed.reshape(rows, -1), delta.output, variant="few_rows", target=target)
    return [*sparse_half(added, stream, sparse, eps, target), state, tail]


def full_layer(
    update: mx.array,
    stream: mx.array,
    attention: Attention,
    cached: Cached,
    sparse: Sparse,
    eps: float,
    target: str | None = None,
) -> list[mx.array]:
    """hidden, y and the tails with the new column, as `labkit.kernels.persistent.full_layer`."""
    stream, x = residual_rms_norm(update, stream, attention.input_norm, eps, target=target)
    rows = x.shape[0]
    projected = quantized_matmul(x, attention.inputs, variant="few_rows", target=target).reshape(rows, 1, -1)
    q, *tail = append_heads(
        projected, attention.q_norm, attention.k_norm, cached.positions, cached.tail_keys, cached.tail_values,
        cached.write, eps=eps, rotary=attention.rotary, base=attention.base, target=target,
    )  # fmt: skip
    attended = decode_rows(
        q, cached.keys, cached.values, cached.first, cached.last, scale=q.shape[-1] ** -0.5, gates=projected,
        tail=Tail(*tail, cached.settled), target=target,
    )  # fmt: skip
    added = quantized_matmul(attended.reshape(rows, -1), attention.output, variant="few_rows", target=target)
    return [*sparse_half(added, stream, sparse, eps, target), *tail]

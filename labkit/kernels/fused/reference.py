"""The fused chains in plain MLX ops: the oracles of their kernels."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from labkit.kernels.quantized_matmul.reference import packed_of
from labkit.kernels.signature import Launch


def residual_rms_norm(launch: Launch) -> list[mx.array]:
    """hidden = x + residual, rounded, or the residual alone; normed = RMSNorm(hidden) * weight, in fp32."""
    x, residual, weight, eps, _ = launch.inputs
    hidden = residual.astype(mx.float32)
    if dict(launch.template)["ADDS"]:
        hidden = (x.astype(mx.float32) + hidden).astype(residual.dtype).astype(mx.float32)
    mean_square = mx.mean(hidden * hidden, axis=-1, keepdims=True)
    return [hidden, hidden * mx.rsqrt(mean_square + eps) * weight.astype(mx.float32)]


def norm_project(launch: Launch) -> list[mx.array]:
    """hidden as `residual_rms_norm`; its norm, rounded, times the transposed matrix."""
    x, residual, weight, eps = launch.inputs[:4]
    hidden, normed = residual_rms_norm(replace(launch, inputs=(x, residual, weight, eps, None)))
    return [hidden, normed.astype(launch.output_dtypes[1]).astype(mx.float32) @ packed_of(launch, 4).dequantize().T]


def swiglu(launch: Launch) -> list[mx.array]:
    """silu(gate) up, in fp32."""
    gate, up = (part.astype(mx.float32) for part in launch.inputs[:2])
    return [gate * mx.sigmoid(gate) * up]


def embedding_rows(launch: Launch) -> list[mx.array]:
    """scale * q + bias of the rows, in fp32; NaN for rows that are not there."""
    tokens, weights = launch.inputs[0].astype(mx.int64), packed_of(launch, 1)
    tokens = mx.where(tokens < 0, tokens + weights.n, tokens)
    there = (tokens >= 0) & (tokens < weights.n)
    flat = mx.where(there, tokens, 0).reshape(-1)
    taken = replace(weights, **{name: getattr(weights, name)[flat] for name in ("w", "scales", "biases")})
    rows = taken.dequantize().reshape(*tokens.shape, weights.k)
    return [mx.where(there[..., None], rows, mx.nan)]


def place_columns(launch: Launch) -> list[mx.array]:
    """First, last, settled and write, behind each other."""
    before, settled, padding, _, length = launch.inputs
    options, words = dict(launch.template), launch.output_shapes[0][0]
    times = options["REPEATED"]
    index = mx.arange(words // 2 - times, dtype=mx.int32)
    first = padding[index // length] if options["PADDED"] else mx.zeros_like(index)
    same = [mx.broadcast_to(count, (times,)) for count in (settled, before - settled)]
    return [mx.concatenate([first, before + 1 + index % length, *same])]

"""The attention, DeltaNet and router chains in plain MLX ops: the oracles of their kernels."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.signature import Launch


def qk_norm_rope(launch: Launch) -> list[mx.array]:
    """RMSNorm of each head, then the rotation of pairs (i, i + rotary / 2), heads before tokens."""
    queries, keys, q_weight, k_weight, frequency, positions, eps, _, length = launch.inputs
    template = dict(launch.template)
    dim, half = template["D"], template["ROTARY"] // 2
    if not template["PER_TOKEN"]:
        positions = positions[:, None] + mx.arange(length.item())
    angle = positions.astype(mx.float32)[:, None, :, None] * frequency[:half]
    cos, sin = mx.cos(angle), mx.sin(angle)

    return [
        _rotate(_rms_norm(x[..., :dim].astype(mx.float32), weight, eps).transpose(0, 2, 1, 3), cos, sin)
        for x, weight in ((queries, q_weight), (keys, k_weight))
    ]


def append_heads(launch: Launch) -> list[mx.array]:
    """Queries by token, and the tails with the new columns from `write` on; columns behind them are zero."""
    projected, q_weight, k_weight, frequency, positions, tail_keys, tail_values, write, eps = launch.inputs
    template = dict(launch.template)
    dim, heads, kv_heads, length = (template[name] for name in ("D", "HQ", "HK", "L"))
    rows = tail_keys.shape[0]
    ends = [2 * heads * dim, (2 * heads + kv_heads) * dim]
    queries, keys, values = (
        part.astype(mx.float32).reshape(rows, length, -1, dim) for part in mx.split(projected, ends, axis=-1)
    )
    angle = (positions[:, None] + mx.arange(length)).astype(mx.float32)[:, :, None, None]
    angle = angle * frequency[: template["ROTARY"] // 2]
    cos, sin = mx.cos(angle), mx.sin(angle)
    q = _rotate(_rms_norm(queries[:, :, ::2], q_weight, eps), cos, sin)
    k = _rotate(_rms_norm(keys, k_weight, eps), cos, sin)
    write = mx.broadcast_to(write if write.ndim == 2 else write[:1, None], (rows, 1))
    column = (mx.arange(template["C"]) - write)[:, None, :, None]
    source, fresh = mx.clip(column, 0, length - 1), (column >= 0) & (column < length)

    def appended(tail: mx.array, new: mx.array) -> mx.array:
        older = mx.where(column < 0, tail.astype(mx.float32), 0.0)
        return mx.where(fresh, mx.take_along_axis(new.swapaxes(1, 2), source, axis=2), older)

    return [q.reshape(rows * length, heads, dim), appended(tail_keys, k), appended(tail_values, values)]


def output_gate(launch: Launch) -> list[mx.array]:
    """attended * sigmoid(gate), tokens before heads."""
    attended, q_gate = (array.astype(mx.float32) for array in launch.inputs[:2])
    gate = q_gate[..., attended.shape[-1] :]
    return [(attended.transpose(0, 2, 1, 3) * mx.sigmoid(gate)).reshape(launch.output_shapes[0])]


def gated_rms_norm(launch: Launch) -> list[mx.array]:
    """RMSNorm(x) * weight * silu(z)."""
    x, z, weight, eps, _, width, start = launch.inputs
    heads, dim = x.shape[-2:]
    first = start.item()
    gate = z.reshape(-1, width.item())[:, first : first + heads * dim].reshape(x.shape).astype(mx.float32)
    return [_rms_norm(x.astype(mx.float32), weight, eps) * gate * mx.sigmoid(gate)]


def norm_router(launch: Launch) -> list[mx.array]:
    """hidden = x + residual, rounded; normed = RMSNorm(hidden) * weight, rounded; logits = normed @ router.T."""
    x, residual, weight, packed, scales, biases, eps, _ = launch.inputs
    template = dict(launch.template)
    hidden = (x.astype(mx.float32) + residual.astype(mx.float32)).astype(residual.dtype).astype(mx.float32)
    normed = _rms_norm(hidden, weight, eps).astype(x.dtype).astype(mx.float32)
    router = mx.dequantize(
        packed,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=template["GROUP"],
        bits=template["BITS"],
    )
    return [hidden, normed, normed @ router.T]


def _rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Pairs (i, i + rotary / 2) of the last axis turned by their angles."""
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return mx.concatenate([low * cos - high * sin, low * sin + high * cos, rest], axis=-1)


def _rms_norm(x: mx.array, weight: mx.array, eps: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(mx.float32)

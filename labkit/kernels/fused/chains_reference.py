"""The attention, DeltaNet and router chains in plain MLX ops: the oracles of their kernels."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.signature import Launch


def qk_norm_rope(launch: Launch) -> list[mx.array]:
    """RMSNorm of each head, then the rotation of pairs (i, i + rotary / 2), heads before tokens."""
    queries, keys, q_weight, k_weight, frequency, positions, eps, _, length = launch.inputs
    template = dict(launch.template)
    dim, rotary = template["D"], template["ROTARY"]
    if not template["PER_TOKEN"]:
        positions = positions[:, None] + mx.arange(length.item())
    angle = positions.astype(mx.float32)[:, None, :, None] * frequency[: rotary // 2]
    cos, sin = mx.cos(angle), mx.sin(angle)

    def normalise_and_rotate(x: mx.array, weight: mx.array) -> mx.array:
        x = _rms_norm(x[..., :dim].astype(mx.float32), weight, eps).transpose(0, 2, 1, 3)
        low, high, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
        return mx.concatenate([low * cos - high * sin, low * sin + high * cos, rest], axis=-1)

    return [normalise_and_rotate(queries, q_weight), normalise_and_rotate(keys, k_weight)]


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
    hidden = (x.astype(mx.float32) + residual.astype(mx.float32)).astype(x.dtype).astype(mx.float32)
    normed = _rms_norm(hidden, weight, eps).astype(x.dtype).astype(mx.float32)
    router = mx.dequantize(
        packed,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=template["GROUP"],
        bits=template["BITS"],
    )
    return [hidden, normed, normed @ router.T]


def _rms_norm(x: mx.array, weight: mx.array, eps: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(mx.float32)

"""The attention, DeltaNet and router chains: what to call."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.fused.launches import (
    APPEND_HEADS,
    GATED_RMS_NORM,
    MAX_ROUTED_ROWS,
    NORM_ROUTER,
    OUTPUT_GATE,
    QK_NORM_ROPE,
    append_heads_call,
    gated_rms_norm_call,
    norm_router_call,
    output_gate_call,
    qk_norm_rope_call,
)
from labkit.kernels.fused.residual import residual_rms_norm
from labkit.kernels.quantized_matmul import Packed, quantized_matmul


@takes_arrays
def qk_norm_rope(
    queries: mx.array,
    keys: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    positions: mx.array,
    *,
    eps: float,
    rotary: int,
    base: float = 10000.0,
    inverse_frequency: mx.array | None = None,
    target: str | None = None,
) -> tuple[mx.array, mx.array]:
    """Normalise each head of q and k, rotate its first `rotary` values, and lay the heads out for attention.

    Args:
        queries: [B, L, Hq, 2 D] with the output gate after each head's query, as Qwen3.5's q_proj gives it, or
            [B, L, Hq, D] without gates. The gate is not touched: `output_gate` reads it where it lies.
        keys: [B, L, Hk, D], same dtype.
        q_weight, k_weight: [D], of the norms.
        positions: [B] int32, of each row's first token, or [B, L], of every token. May be negative (left padding).
        rotary: values of a head that are rotated, even, at most D; pairs are (i, i + rotary / 2).
        base: of the rotary frequencies base ** (-2 i / rotary), unless `inverse_frequency` [rotary / 2] gives them.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        q [B, Hq, L, D] and k [B, Hk, L, D] in the inputs' dtype, computed in fp32 and rounded once.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.

    Source: `Qwen3NextAttention` of mlx-lm; RoFormer, Su et al. 2021 (arXiv 2104.09864).
    """
    call = qk_norm_rope_call(queries, keys, q_weight, k_weight, positions, eps, rotary, base, inverse_frequency)
    return tuple(QK_NORM_ROPE(**call, target=target))


@takes_arrays
def append_heads(
    projected: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    positions: mx.array,
    tail_keys: mx.array,
    tail_values: mx.array,
    write: mx.array,
    *,
    eps: float,
    rotary: int,
    base: float = 10000.0,
    target: str | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """`qk_norm_rope` of a few new tokens, whose keys and values become the next columns of a small tail.

    No kernel writes into its inputs, so the tail is copied: it is small, and the copy needs no launch of its own.

    Args:
        projected: [B, L, W] or [B * L, W], rows of one projection: each head's query and gate (2 D), all keys, all
            values.
        q_weight, k_weight: [D], of the norms. positions: [B] int32, of each row's first token.
        tail_keys, tail_values: [B, Hk, C, D], in projected's dtype; D a multiple of four.
        write: int32 [1 or more], whose first value is the column of the first new token, at most C - L; or [B, 1], each
            row's own.
        eps, rotary, base, target: as for `qk_norm_rope`.

    Returns:
        q [B * L, Hq, D], token by token as decode attention takes it; the two tails with the new columns, and zeros
        behind them.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.

    Source: as `qk_norm_rope`; the tail is the in-place rule's (`labkit.kernels.in_place`).
    """
    call = append_heads_call(projected, q_weight, k_weight, positions, tail_keys, tail_values, write, eps, rotary, base)
    return tuple(APPEND_HEADS(**call, target=target))


@takes_arrays
def output_gate(attended: mx.array, q_gate: mx.array, *, target: str | None = None) -> mx.array:
    """Gate the heads' outputs and join them for the output projection.

    Args:
        attended: [B, H, L, D]. q_gate: [B, L, H, 2 D], the gates in the second half of each head; same dtype.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [B, L, H * D]: attended * sigmoid(gate), in the inputs' dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: `Qwen3NextAttention` of mlx-lm.
    """
    return OUTPUT_GATE(**output_gate_call(attended, q_gate), target=target)[0]


@takes_arrays
def gated_rms_norm(
    x: mx.array, z: mx.array, weight: mx.array, eps: float, *, start: int = 0, target: str | None = None
) -> mx.array:
    """DeltaNet's output norm: RMSNorm of each head, times silu of its gate.

    Args:
        x: [..., H, D].
        z: [..., H, D], or [..., W] with H * D gates from column `start` on, as a fused projection leaves them; of x's
            dtype.
        weight: [D].
        eps: added to the mean square.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [..., H, D] in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: `Qwen3NextRMSNormGated` of mlx-lm; Gated DeltaNet, Yang et al. 2024 (arXiv 2412.06464).
    """
    return GATED_RMS_NORM(**gated_rms_norm_call(x, z, weight, eps, start), target=target)[0]


@takes_arrays
def norm_router(
    x: mx.array,
    residual: mx.array,
    weight: mx.array,
    router: tuple[mx.array, mx.array, mx.array],
    eps: float,
    *,
    group_size: int = 64,
    bits: int = 8,
    target: str | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Add to the residual stream, normalise, and score the experts.

    Args:
        x, residual: [T, D], one dtype, or a residual in float32. weight: [D].
        router: MLX's affine quantisation of [E, D]: packed uint32 [E, D * bits / 32], scales and biases
            [E, D / group_size]. A shared expert's gate can ride along as one more row.
        eps: added to the mean square.
        group_size: 32, 64 or 128. bits: 4 or 8.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        hidden [T, D] in residual's dtype and normed [T, D] in x's, logits [T, E] float32, never rounded to x's dtype: a
        score that is would now and then choose another expert. One launch up to 8 rows; beyond, the add and norm in one
        and a product that reuses the router's weights across rows.

    Raises:
        ValueError: shapes, dtypes or sizes that do not fit.

    Source: `Qwen3NextDecoderLayer` and `Qwen3NextSparseMoeBlock` of mlx-lm.
    """
    call = norm_router_call(x, residual, weight, router, eps, group_size, bits)
    if x.shape[0] <= MAX_ROUTED_ROWS:
        return tuple(NORM_ROUTER(**call, target=target))
    hidden, normed = residual_rms_norm(x, residual, weight, eps, target=target)
    scores = quantized_matmul(normed, Packed(*router, group_size, bits), dtype=mx.float32, target=target)
    return hidden, normed, scores

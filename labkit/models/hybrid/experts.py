"""The sparse MLP: a router chooses k of E experts for each token, and a shared expert works for all of them.

Source: Qwen3-Next's sparse block; the shared expert runs as further experts where its matrices allow it (packing.py).
"""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.fused import norm_router, residual_rms_norm
from labkit.kernels.grouped_matmul import DECODE_TOKENS, choose_tile, decode_experts, grouped_experts
from labkit.kernels.quantized_matmul import Packed
from labkit.kernels.routing import choose_experts, group_rows
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.matrix import Weights
from labkit.models.hybrid.mlp import DenseMLP
from labkit.models.hybrid.packing import ExpertWeights
from labkit.models.hybrid.plan import INVARIANT_TILE, Step

SORT_FROM = 64
"""Assignments from which MLX's gathered product is given sorted rows, as in mlx-lm."""


class Experts:
    """One layer's sparse MLP, with the norm before it."""

    def __init__(self, config: HybridConfig, weights: ExpertWeights, norm: mx.array):
        self.config, self.weights, self.norm = config, weights, norm
        self.shared = None if weights.shared is None else DenseMLP(weights.shared)
        self.groups = config.experts + weights.shared_slots

    def __call__(self, update: mx.array, hidden: mx.array, step: Step) -> tuple[mx.array, mx.array]:
        """update, hidden [B, L, D]: what the mixer adds, and the residual stream -> the stream, and what this adds."""
        shape = hidden.shape
        hidden, x, logits = self._norm_and_score(update.reshape(-1, shape[-1]), hidden.reshape(-1, shape[-1]), step)
        indices, weights, gate = self._choose(logits)
        y = self._products(x, indices, weights, step)
        if self.shared is not None:
            y = y + (gate * self.shared.product(x, step).astype(mx.float32)).astype(y.dtype)
        return hidden.reshape(shape), y.reshape(shape)

    def _norm_and_score(self, update: mx.array, hidden: mx.array, step: Step) -> tuple[mx.array, mx.array, mx.array]:
        """The stream, its norm, and fp32 scores [T, E + 1] of the experts and of the shared expert's gate."""
        router = self.weights.router.packed
        if step.plan.kernels and router is not None and not step.plan.invariant:
            return norm_router(
                update, hidden, self.norm, tuple(router.arrays), self.config.eps,
                group_size=router.group_size, bits=router.bits,
            )  # fmt: skip
        hidden, x = residual_rms_norm(update, hidden, self.norm, self.config.eps)
        return hidden, x, step.plan.product(x, self.weights.router).astype(mx.float32)

    def _choose(self, logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Experts and weights [T, k + shared slots], and the shared expert's gate [T, 1]."""
        config = self.config
        indices, weights = choose_experts(logits, config.top_k, experts=config.experts, renormalise=config.renormalise)
        gate = mx.sigmoid(logits[:, config.experts :])
        if slots := self.weights.shared_slots:
            tokens = logits.shape[0]
            further = mx.broadcast_to(mx.arange(config.experts, self.groups, dtype=mx.int32), (tokens, slots))
            indices = mx.concatenate([indices, further], axis=1)
            weights = mx.concatenate([weights, mx.broadcast_to(gate, (tokens, slots))], axis=1)
        return indices, weights, gate

    def _products(self, x: mx.array, indices: mx.array, weights: mx.array, step: Step) -> mx.array:
        gate, up, down = self.weights.gate, self.weights.up, self.weights.down
        packed = isinstance(gate, Packed)
        plan = step.plan
        if not (packed and plan.kernels) or (plan.variants.experts == "gather" and not plan.invariant):
            return self._gathered(x, indices, weights)
        if x.shape[0] <= DECODE_TOKENS and not plan.invariant:
            return decode_experts(x, gate, up, down, indices, weights)
        tile = choose_tile(indices.size, self.groups) if plan.variants.experts == "load" else 16
        tile = INVARIANT_TILE if plan.invariant else tile
        groups = group_rows(indices, self.groups, tile)
        return grouped_experts(x, gate, up, down, weights, groups.order, groups.block_map, tile)

    def _gathered(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """By MLX's gathered products: each row of x with its experts' matrices."""
        tokens, k = indices.shape
        flat = indices.reshape(-1)
        rows = mx.expand_dims(x, (-2, -3))  # [T, 1, 1, D]
        if sort := flat.size >= SORT_FROM:
            order = mx.argsort(flat)
            rows, chosen = mx.expand_dims(x[order // k], -2), flat[order]
        else:
            chosen = indices
        gate, up = (_gathered_product(rows, part, chosen, sort) for part in (self.weights.gate, self.weights.up))
        y = _gathered_product(gate * mx.sigmoid(gate) * up, self.weights.down, chosen, sort)
        if sort:
            y = y[mx.argsort(order)]
        y = y.reshape(tokens, k, -1)
        return (y * weights[..., None]).sum(axis=1).astype(x.dtype)


def _gathered_product(x: mx.array, part: Weights, experts: mx.array, are_sorted: bool) -> mx.array:
    if isinstance(part, Packed):
        return mx.gather_qmm(
            x, *part.arrays, rhs_indices=experts, transpose=True, group_size=part.group_size, bits=part.bits,
            sorted_indices=are_sorted,
        )  # fmt: skip
    return mx.gather_mm(x, part.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=are_sorted)

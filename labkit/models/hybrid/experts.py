"""The sparse MLP: a router chooses k of E experts for each token, and a shared expert works for all of them.

Source: Qwen3-Next's sparse block; the shared expert runs as further experts where its matrices allow it (packing.py).
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from labkit.kernels.fused import norm_router, residual_rms_norm
from labkit.kernels.fused.launches import MAX_ROUTED_ROWS
from labkit.kernels.grouped_matmul import (
    DECODE_TOKENS,
    choose_decode_experts,
    choose_tile,
    decode_experts,
    grouped_experts,
)
from labkit.kernels.quantized_matmul import DEQUANTIZE_FROM, Packed
from labkit.kernels.routing import choose_experts, route
from labkit.kernels.targets import device_target
from labkit.models.hybrid import persistent
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.matrix import Weights
from labkit.models.hybrid.mlp import DenseMLP
from labkit.models.hybrid.packing import ExpertWeights
from labkit.models.hybrid.plan import INVARIANT_TILE, Plan, Step

SORT_FROM = 64
"""Assignments from which MLX's gathered product is given sorted rows, as in mlx-lm."""


class Experts:
    """One layer's sparse MLP, with the norm before it."""

    def __init__(self, config: HybridConfig, weights: ExpertWeights, norm: mx.array):
        self.config, self.weights, self.norm = config, weights, norm
        self.shared = None if weights.shared is None else DenseMLP(weights.shared)
        self.groups = config.experts + weights.shared_slots

    def __call__(self, update: mx.array, hidden: mx.array, step: Step) -> tuple[mx.array, mx.array]:
        """update, hidden [..., D]: what the mixer adds, and the residual stream -> the stream, and what this adds."""
        shape = hidden.shape
        tokens = (step.tokens, shape[-1])
        if persistent.takes_half(step):
            parts = persistent.half(
                self.config, self.weights, self.norm, update.reshape(tokens), hidden.reshape(tokens)
            )
            return tuple(part.reshape(shape) for part in parts)
        hidden, x, logits = self._norm_and_score(update.reshape(tokens), hidden.reshape(tokens), step)
        y = self._products(x, logits, step)
        if self.shared is not None:
            gate = mx.sigmoid(logits[:, self.config.experts :])
            y = y + (gate * self.shared.product(x, step).astype(mx.float32)).astype(y.dtype)
        return hidden.reshape(shape), y.reshape(shape)

    def _norm_and_score(self, update: mx.array, hidden: mx.array, step: Step) -> tuple[mx.array, mx.array, mx.array]:
        """The stream, its norm, and scores [T, E + 1] of the experts and of the shared expert's gate."""
        router, plan = self.weights.router.packed, step.plan
        by_kernels = plan.kernels and router is not None and not plan.invariant
        # Further rows share the router's weights, in MLX's product or, for a step that keeps to our launches, in ours.
        by_product = plan.own and MAX_ROUTED_ROWS < step.tokens < DEQUANTIZE_FROM
        if by_kernels and not by_product:
            return norm_router(
                update, hidden, self.norm, tuple(router.arrays), self.config.eps,
                group_size=router.group_size, bits=router.bits,
            )  # fmt: skip
        hidden, x = residual_rms_norm(update, hidden, self.norm, self.config.eps)
        return hidden, x, plan.product(x, self.weights.router, mx.float32)

    def _products(self, x: mx.array, logits: mx.array, step: Step) -> mx.array:
        """The chosen experts' part of x [T, D], by scores [T, E + 1]."""
        config, plan, slots = self.config, step.plan, self.weights.shared_slots
        gate, up, down = self.weights.gate, self.weights.up, self.weights.down
        choice = {"experts": config.experts, "renormalise": config.renormalise, "shared": slots}
        by_kernels = plan.kernels and isinstance(gate, Packed)
        few = x.shape[0] <= DECODE_TOKENS and not plan.invariant
        by_mlx = plan.variants.experts in ("gather", "before") and not plan.invariant
        if not by_kernels or few or by_mlx:
            fused = by_kernels and few and plan.variants.fuse_experts and plan.variants.fuse_combine
            if fused and plan.variants.fuse_choice:
                return choose_decode_experts(x, gate, up, down, logits, config.top_k, **choice)
            indices, weights = choose_experts(logits, config.top_k, **choice)
            if fused:
                return decode_experts(x, gate, up, down, indices, weights)
            before = by_kernels and not few and plan.variants.experts == "before"
            return self._gathered(x, indices, weights, as_floats=before)
        tile = self._tile(x.shape[0], plan)
        if plan.variants.routing == "host" and not plan.invariant:
            indices, weights = choose_experts(logits, config.top_k, **choice)
            order, block_map = grouped_on_host(indices, self.groups, tile)
        else:
            routed = route(logits, config.top_k, tile, **choice)
            weights, order, block_map = routed.weights, routed.groups.order, routed.groups.block_map
        return grouped_experts(x, gate, up, down, weights, order, block_map, tile)

    def _tile(self, tokens: int, plan: Plan) -> int:
        if plan.invariant:
            return INVARIANT_TILE
        assignments = tokens * (self.config.top_k + self.weights.shared_slots)
        return choose_tile(assignments, self.groups) if plan.variants.experts == "load" else 16

    def _gathered(self, x: mx.array, indices: mx.array, weights: mx.array, *, as_floats: bool = False) -> mx.array:
        """By MLX's gathered products: each row of x with its experts' matrices, written as floats first or not."""
        tokens, k = indices.shape
        flat = indices.reshape(-1)
        rows = mx.expand_dims(x, (-2, -3))  # [T, 1, 1, D]
        if sort := flat.size >= SORT_FROM:
            order = mx.argsort(flat)
            rows, chosen = mx.expand_dims(x[order // k], -2), flat[order]
        else:
            chosen = indices
        parts = self.weights.gate, self.weights.up, self.weights.down
        if as_floats:
            parts = (mx.dequantize(*part.arrays, part.group_size, part.bits).astype(x.dtype) for part in parts)
        gate, up, down = parts
        gate, up = (_gathered_product(rows, part, chosen, sort) for part in (gate, up))
        y = _gathered_product(gate * mx.sigmoid(gate) * up, down, chosen, sort)
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
    # Told that they are sorted, MLX 0.32.4 is wrong on CUDA: tests/models/hybrid/test_cuda.py.
    told = are_sorted and device_target() != "cuda"
    return mx.gather_mm(x, part.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=told)


def grouped_on_host(indices: mx.array, experts: int, tile: int) -> tuple[mx.array, mx.array]:
    """`labkit.kernels.routing.group_rows` by numpy: the control, which waits for the device to know the indices.

    Returns:
        order [T * k], and a block map with exactly as many entries as there are blocks.
    """
    flat = np.array(indices).reshape(-1)
    order = np.argsort(flat, kind="stable").astype(np.int32)
    counts = np.bincount(flat, minlength=experts)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    blocks = [
        (expert, start + at, min(tile, count - at), 0)
        for expert, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True))
        for at in range(0, count, tile)
    ]
    return mx.array(order), mx.array(blocks, dtype=mx.int32)

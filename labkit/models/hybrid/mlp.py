"""The dense MLP: down(silu(gate x) up x), in every layer of dense checkpoints, and the shared expert of sparse ones."""

from __future__ import annotations

from functools import cached_property, lru_cache

import mlx.core as mx

from labkit.kernels.fused import residual_rms_norm, swiglu
from labkit.kernels.grouped_matmul import DECODE_TOKENS, decode_experts
from labkit.kernels.placement import on_device
from labkit.kernels.quantized_matmul import Packed
from labkit.models.hybrid.config import HybridConfig
from labkit.models.hybrid.matrix import Matrix, mapped
from labkit.models.hybrid.packing import DenseWeights
from labkit.models.hybrid.plan import Step


class DenseMLP:
    """The MLP alone."""

    def __init__(self, weights: DenseWeights):
        self.weights = weights

    def product(self, x: mx.array, step: Step) -> mx.array:
        """x [T, D] -> [T, D]."""
        if step.plan.kernels and self._as_expert is not None and self._few(x, step):
            return decode_experts(x, *self._as_expert, *_the_only(x.shape[0]))
        gate = step.plan.product(x, Matrix((self.weights.gate,)))
        up = step.plan.product(x, Matrix((self.weights.up,)))
        activate = swiglu if step.plan.kernels else _swiglu
        return step.plan.product(activate(gate, up), self.weights.down)

    def _few(self, x: mx.array, step: Step) -> bool:
        return x.shape[0] <= DECODE_TOKENS and step.plan.variants.fuse_experts and not step.plan.invariant

    @cached_property
    def _as_expert(self) -> tuple[Packed, Packed, Packed] | None:
        """The matrices as those of the only expert, for the kernels that fuse what stands between them."""
        parts = (self.weights.gate, self.weights.up, *self.weights.down.parts)
        if len(parts) != 3 or not all(isinstance(part, Packed) for part in parts):
            return None
        return tuple(mapped(lambda array: array[None], part) for part in parts)


class DenseBlock:
    """A dense layer's MLP, with the norm before it."""

    def __init__(self, config: HybridConfig, weights: DenseWeights, norm: mx.array):
        self.config, self.norm = config, norm
        self.mlp = DenseMLP(weights)

    def __call__(self, update: mx.array, hidden: mx.array, step: Step) -> tuple[mx.array, mx.array]:
        """update, hidden [..., D]: what the mixer adds, and the residual stream -> the stream, and what this adds."""
        hidden, x = residual_rms_norm(update, hidden, self.norm, self.config.eps)
        return hidden, self.mlp.product(x.reshape(step.tokens, x.shape[-1]), step).reshape(x.shape)


@lru_cache
def _the_only(tokens: int) -> tuple[mx.array, mx.array]:
    """The choice of the only expert, and all the weight for it: kept, since each would be a launch of every layer."""
    return on_device(mx.zeros((tokens, 1), mx.int32)), on_device(mx.ones((tokens, 1), mx.float32))


@mx.compile
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up

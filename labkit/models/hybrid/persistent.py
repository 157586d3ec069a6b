"""Layers of a decode step as one launch each: the switch `Variants.persistent`.

What a launch of this kind takes: one token of each of up to eight rows, packed weights, a shared expert that runs as
further experts, caches of the contiguous kind. Other steps of the same model go launch by launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from labkit.kernels.persistent import Attention, Cached, Delta, Sparse, full_layer, linear_layer, sparse_half
from labkit.kernels.quantized_matmul import FEW, Packed
from labkit.models.hybrid import attention_layer, delta_layer
from labkit.models.hybrid.config import LINEAR, HybridConfig, NotSpecialised
from labkit.models.hybrid.plan import Step

if TYPE_CHECKING:
    from labkit.models.hybrid.graph import Layer
    from labkit.models.hybrid.packing import ExpertWeights, ModelWeights


def check_weights(config: HybridConfig, weights: ModelWeights) -> None:
    """Refuse the switch for a model whose layers cannot be one launch.

    Raises:
        NotSpecialised: with what is missing.
    """
    lacks = ""
    if not config.sparse:
        lacks = "its MLPs are dense"
    elif not config.delta_fits_kernels or config.head_dim > 256 or config.head_dim % 64:
        lacks = "its heads have sizes that the kernels do not take"
    elif any(layer.mlp.shared_slots == 0 for layer in weights.layers):
        lacks = "its shared expert has not the experts' form"
    elif not all(_is_packed(layer) for layer in weights.layers):
        lacks = "its matrices are not all packed"
    if lacks:
        raise NotSpecialised(f"persistent launches do not take this model, {lacks}: leave the switch `persistent` off")


def _is_packed(layer: Any) -> bool:
    mixer, mlp = layer.mixer, layer.mlp
    joined = (mixer.inputs, mixer.output, mlp.router)
    return all(m.packed is not None for m in joined) and all(
        isinstance(m, Packed) for m in (mlp.gate, mlp.up, mlp.down)
    )


def takes_half(step: Step) -> bool:
    """Whether the sparse half of a step's layers is one launch."""
    plan = step.plan
    return plan.kernels and not plan.invariant and plan.variants.persistent != "off" and step.tokens <= FEW


def takes_layers(step: Step, paged: bool) -> bool:
    """Whether each of a step's layers is one launch."""
    alone = step.length == 1 and step.spans is None and not step.recording and not paged
    return takes_half(step) and step.plan.variants.persistent == "layers" and alone


def half(config: HybridConfig, weights: ExpertWeights, norm: mx.array, update: mx.array, hidden: mx.array) -> tuple:
    """The stream, and what the sparse MLP adds to it; update, hidden [T, D]."""
    return sparse_half(update, hidden, _sparse(config, weights, norm), config.eps)


def layers_through(layers: list[Layer], x: mx.array, memory: list[tuple], step: Step) -> tuple:
    """All layers: the stream, what is to be added, what each layer remembers. x [B, D]; memory: a tuple a layer."""
    stream, update, after = x, mx.zeros_like(x), []
    for layer, known in zip(layers, memory, strict=True):
        config = layer.mixer.config
        sparse = _sparse(config, layer.mlp.weights, layer.mlp.norm)
        if layer.kind == LINEAR:
            tail, state = delta_layer.Memory(*known)
            delta = _delta(config, layer)
            stream, update, state, tail = linear_layer(update, stream, delta, tail, state, sparse, config.eps)
            after.append((tail, state))
        else:
            held, columns = attention_layer.Memory(*known), step.columns
            cached = Cached(
                held.keys, held.values, held.tail_keys, held.tail_values, columns.first, columns.last,
                columns.settled, columns.write, step.positions,
            )  # fmt: skip
            attention = _attention(config, layer)
            stream, update, *tails = full_layer(update, stream, attention, cached, sparse, config.eps)
            after.append((held.keys, held.values, *tails))
    return stream, update, after


def _sparse(config: HybridConfig, weights: ExpertWeights, norm: mx.array) -> Sparse:
    return Sparse(
        norm, weights.router.packed, weights.gate, weights.up, weights.down,
        config.experts, config.top_k, weights.shared_slots, config.renormalise,
    )  # fmt: skip


def _delta(config: HybridConfig, layer: Layer) -> Delta:
    weights = layer.mixer.weights
    return Delta(
        layer.input_norm, weights.inputs.packed, weights.conv, weights.a_log, weights.dt_bias, weights.norm,
        weights.output.packed, (config.key_heads, config.value_heads), (config.key_dim, config.value_dim),
    )  # fmt: skip


def _attention(config: HybridConfig, layer: Layer) -> Attention:
    weights = layer.mixer.weights
    return Attention(
        layer.input_norm, weights.inputs.packed, weights.q_norm, weights.k_norm, weights.output.packed,
        (config.query_heads, config.kv_heads), config.rotary, config.rope_base,
    )  # fmt: skip

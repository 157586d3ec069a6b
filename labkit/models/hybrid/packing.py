"""A checkpoint's tensors become the layout that the kernels read, one layer at a time.

What shares its input lies in one matrix: DeltaNet's q, k, v, z, a and b; attention's q with its gates, k and v; the
router and the shared expert's gate. Gate and up projections of the experts stay two arrays with the same rows, which
the expert kernels read side by side. Where a shared expert has the experts' form and a multiple of their width, it
becomes further experts that every token chooses.

A layer is computed and its tensors let go before the next one is touched, so that the peak is the model and one
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx

from labkit.kernels.quantized_matmul import Packed
from labkit.models.files import LoadError
from labkit.models.hybrid.config import CONV_TAPS, LINEAR, MAX_EXPERTS, HybridConfig
from labkit.models.hybrid.matrix import Matrix, Weights, join, mapped, same_form, side_by_side, take


@dataclass(frozen=True)
class DeltaWeights:
    """A Gated DeltaNet mixer. `inputs`: q, k, v, then z, a and b."""

    inputs: Matrix
    conv: mx.array  # [channels, 4]
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    output: Matrix


@dataclass(frozen=True)
class AttentionWeights:
    """A gated attention mixer. `inputs`: each head's query and gate, then keys, then values."""

    inputs: Matrix
    q_norm: mx.array
    k_norm: mx.array
    output: Matrix


@dataclass(frozen=True)
class ExpertWeights:
    """A sparse MLP. `router`: a row an expert, and the shared expert's gate last.

    Attributes:
        gate, up: [E + shared_slots, I, D]. down: [E + shared_slots, D, I].
        shared_slots: how many experts at the end are parts of the shared one; 0 where it has matrices of its own.
        shared: its own matrices.
    """

    router: Matrix
    gate: Weights
    up: Weights
    down: Weights
    shared_slots: int
    shared: DenseWeights | None


@dataclass(frozen=True)
class DenseWeights:
    """An MLP: down(silu(gate x) up x)."""

    gate: Weights
    up: Weights
    down: Matrix


@dataclass(frozen=True)
class LayerWeights:
    """One block: norm, mixer, norm, MLP."""

    input_norm: mx.array
    mixer: DeltaWeights | AttentionWeights
    post_norm: mx.array
    mlp: ExpertWeights | DenseWeights


@dataclass(frozen=True)
class ModelWeights:
    """Everything. `head` is the embedding itself where they are tied."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    norm: mx.array
    head: Matrix

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, each counted once."""
        return sum({id(array): array.nbytes for array in held(self)}.values())


def held(weights: object) -> Iterator[mx.array]:
    """Every array in a structure of the classes above."""
    if isinstance(weights, mx.array):
        yield weights
    elif isinstance(weights, Packed):
        yield from weights.arrays
    elif isinstance(weights, tuple):
        for item in weights:
            yield from held(item)
    elif hasattr(weights, "__dataclass_fields__"):
        for field in fields(weights):
            yield from held(getattr(weights, field.name))


def pack(
    tensors: MutableMapping[str, mx.array],
    config: HybridConfig,
    dtype: mx.Dtype,
    keep: Callable[[LayerWeights], Any] | None = None,
) -> ModelWeights:
    """The model from its tensors, which are taken out of the mapping as they are used.

    Args:
        tensors: under mlx-lm's names of a loaded checkpoint, such as "language_model.model.norm.weight"; lazy or not.
        dtype: of floating weights. A_log and dt_bias stay as they are stored.
        keep: what becomes of each layer, for a graph with a layout of its own: the layer itself is let go.

    Raises:
        NotSpecialised: a quantisation that the kernels do not read. LoadError: a tensor is missing or misshapen.
    """
    tensors, vocabulary = _Taken(tensors), (config.vocabulary,)
    embedding = Matrix((take(tensors, "model.embed_tokens", vocabulary, config.hidden, dtype),))
    if config.tied:
        tensors.drop("lm_head.")
        head = embedding
    else:
        head = Matrix((take(tensors, "lm_head", vocabulary, config.hidden, dtype),))
    norm = tensors.vector("model.norm.weight", config.hidden).astype(dtype)
    tensors.settle((embedding, norm, head))
    layers = []
    for index, kind in enumerate(config.layer_kinds):
        prefix = f"model.layers.{index}"
        layer = tensors.settle(_layer(tensors, prefix, kind, config, dtype))
        layers.append(layer if keep is None else keep(layer))
    if left := tensors.left():
        raise LoadError(f"{len(left)} tensors have no place in the model, first {left[0]}: another architecture's?")
    return ModelWeights(embedding, tuple(layers), norm, head)


def _layer(tensors: _Taken, prefix: str, kind: str, config: HybridConfig, dtype: mx.Dtype) -> LayerWeights:
    mixer = _delta if kind == LINEAR else _attention
    mlp = _experts if config.sparse else _dense
    return LayerWeights(
        tensors.vector(f"{prefix}.input_layernorm.weight", config.hidden).astype(dtype),
        tensors.settle(mixer(tensors, prefix, config, dtype)),
        tensors.vector(f"{prefix}.post_attention_layernorm.weight", config.hidden).astype(dtype),
        mlp(tensors, f"{prefix}.mlp", config, dtype),
    )


def _delta(tensors: _Taken, prefix: str, config: HybridConfig, dtype: mx.Dtype) -> DeltaWeights:
    prefix = f"{prefix}.linear_attn"
    heads, width = config.value_heads, config.delta_width
    rows = {"qkv": config.conv_channels, "z": width, "a": heads, "b": heads}
    parts = (take(tensors, f"{prefix}.in_proj_{name}", (n,), config.hidden, dtype) for name, n in rows.items())
    return DeltaWeights(
        inputs=side_by_side(*parts),
        conv=tensors.vector(f"{prefix}.conv1d.weight", config.conv_channels, CONV_TAPS).astype(dtype),
        a_log=tensors.vector(f"{prefix}.A_log", heads),
        dt_bias=tensors.vector(f"{prefix}.dt_bias", heads),
        norm=tensors.vector(f"{prefix}.norm.weight", config.value_dim).astype(dtype),
        output=Matrix((take(tensors, f"{prefix}.out_proj", (config.hidden,), width, dtype),)),
    )


def _attention(tensors: _Taken, prefix: str, config: HybridConfig, dtype: mx.Dtype) -> AttentionWeights:
    prefix = f"{prefix}.self_attn"
    queries, kv = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    rows = {"q": 2 * queries, "k": kv, "v": kv}
    parts = (take(tensors, f"{prefix}.{name}_proj", (n,), config.hidden, dtype) for name, n in rows.items())
    return AttentionWeights(
        inputs=side_by_side(*parts),
        q_norm=tensors.vector(f"{prefix}.q_norm.weight", config.head_dim).astype(dtype),
        k_norm=tensors.vector(f"{prefix}.k_norm.weight", config.head_dim).astype(dtype),
        output=Matrix((take(tensors, f"{prefix}.o_proj", (config.hidden,), queries, dtype),)),
    )


def _experts(tensors: _Taken, prefix: str, config: HybridConfig, dtype: mx.Dtype) -> ExpertWeights:
    router = side_by_side(
        take(tensors, f"{prefix}.gate", (config.experts,), config.hidden, dtype),
        take(tensors, f"{prefix}.shared_expert_gate", (1,), config.hidden, dtype),
    )
    routed = f"{prefix}.switch_mlp"
    into, out_of = (config.experts, config.expert_width), (config.experts, config.hidden)
    gate, up = (take(tensors, f"{routed}.{name}_proj", into, config.hidden, dtype) for name in ("gate", "up"))
    down = take(tensors, f"{routed}.down_proj", out_of, config.expert_width, dtype)
    shared = _dense(tensors, f"{prefix}.shared_expert", config, dtype, config.shared_width)
    slots = _slots(config, gate, up, down, shared)
    if slots:
        # One at a time: they are most of a layer.
        gate = tensors.settle(join(gate, _cut_rows(shared.gate, slots)))
        up = tensors.settle(join(up, _cut_rows(shared.up, slots)))
        down = tensors.settle(join(down, _cut_columns(shared.down.parts[0], slots)))
    return ExpertWeights(router, gate, up, down, slots, None if slots else shared)


def _slots(config: HybridConfig, gate: Weights, up: Weights, down: Weights, shared: DenseWeights) -> int:
    """How many experts a shared expert makes; 0 if it does not divide into any."""
    slots, rest = divmod(config.shared_width, config.expert_width)
    if rest or config.experts + slots > MAX_EXPERTS:
        return 0
    own = shared.down.parts[0]
    if not (same_form(gate, shared.gate) and same_form(up, shared.up) and type(down) is type(own)):
        return 0
    if isinstance(down, Packed) and (down.bits, down.group_size) != (own.bits, own.group_size):
        return 0
    return slots


def _cut_rows(part: Weights, slots: int) -> Weights:
    """[slots * I, D] -> [slots, I, D]."""
    return mapped(lambda array: array.reshape(slots, -1, array.shape[-1]), part)


def _cut_columns(part: Weights, slots: int) -> Weights:
    """[D, slots * I] -> [slots, D, I]."""
    return mapped(lambda array: mx.contiguous(array.reshape(array.shape[0], slots, -1).swapaxes(0, 1)), part)


def _dense(
    tensors: _Taken, prefix: str, config: HybridConfig, dtype: mx.Dtype, width: int | None = None
) -> DenseWeights:
    width = width or config.intermediate
    gate, up = (take(tensors, f"{prefix}.{name}_proj", (width,), config.hidden, dtype) for name in ("gate", "up"))
    down = take(tensors, f"{prefix}.down_proj", (config.hidden,), width, dtype)
    return DenseWeights(gate, up, Matrix((down,)))


class _Taken(dict):
    """A checkpoint's tensors without the outer model's prefix; each can be taken once."""

    def __init__(self, tensors: MutableMapping[str, mx.array]):
        super().__init__()
        for name in list(tensors):
            self[name.removeprefix("language_model.")] = tensors.pop(name)

    def __getitem__(self, name: str) -> mx.array:
        if name not in self:
            raise LoadError(f"the weights lack {name}: fetch the checkpoint again")
        return self.pop(name)

    def get(self, name: str, default: mx.array | None = None) -> mx.array | None:
        return self.pop(name, default)

    def vector(self, name: str, *shape: int) -> mx.array:
        """A tensor of `shape`, dimensions of one aside."""
        found = self[name]
        if [size for size in found.shape if size != 1] != [size for size in shape if size != 1]:
            raise LoadError(f"{name} is {found.shape}, where the config has {shape}: they do not fit together")
        return found if found.shape == shape else found.reshape(shape)

    def drop(self, prefix: str) -> None:
        """Forget what the model does not use."""
        for name in [name for name in self if name.startswith(prefix)]:
            del self[name]

    def left(self) -> list[str]:
        """Tensors that no layer took; multi-token prediction is known, and left out."""
        return sorted(name for name in self if not name.startswith("mtp."))

    def settle(self, weights: Any) -> Any:
        """Compute the arrays of `weights`, so that nothing of the checkpoint stays behind them."""
        mx.eval(list(held(weights)))
        return weights

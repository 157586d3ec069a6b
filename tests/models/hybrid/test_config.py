"""What a config may say: honoured, or refused with its name and the remedy; nothing guessed."""

from __future__ import annotations

import pytest

from labkit.models import LoadError
from labkit.models.hybrid import HybridConfig, NotSpecialised
from labkit.models.hybrid.config import ATTENTION, LINEAR
from tests.models.hybrid.small import DENSE, TEXT, config


def without(key: str) -> dict:
    settings = config()
    del settings["text_config"][key]
    return settings


def test_sizes_are_read():
    sizes = HybridConfig.read(config())
    assert sizes.layer_kinds == (LINEAR, ATTENTION) * 2
    assert (sizes.conv_channels, sizes.delta_width, sizes.rotary) == (2 * 2 * 32 + 4 * 64, 256, 16)
    assert sizes.sparse
    assert not sizes.notes
    assert not HybridConfig.read(config(DENSE)).sparse


def test_layer_types_are_honoured_without_an_interval():
    kinds = [LINEAR, LINEAR, ATTENTION, LINEAR]
    settings = config(layer_types=kinds)
    del settings["text_config"]["full_attention_interval"]
    assert HybridConfig.read(settings).layer_kinds == tuple(kinds)
    assert HybridConfig.read(config(layer_types=[LINEAR, ATTENTION] * 2)).layer_kinds == (LINEAR, ATTENTION) * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (without("full_attention_interval"), "neither layer_types nor full_attention_interval"),
        (config(layer_types=[LINEAR] * 4), "disagree at layer 1"),
        (config(layer_types=[LINEAR, ATTENTION]), "lists 2 layers"),
        (config(layer_types=[LINEAR, "sliding_attention"] * 2), "sliding_attention"),
        (config(full_attention_interval=0), "full_attention_interval must be"),
        (without("rope_parameters"), "rope_theta"),
        (config(rope_parameters={"rope_type": "default"}), "rope_theta"),
        (config(hidden_size=None), "hidden_size"),
        (config(num_hidden_layers=2.5), "num_hidden_layers must be a whole number"),
        (config(num_key_value_heads=3), "not a multiple"),
        (config(rope_parameters={"rope_theta": 1e6, "partial_rotary_factor": 0.05}), "rotary values"),
    ],
)
def test_what_is_missing_or_contradicts_itself_is_refused(settings, message):
    with pytest.raises(LoadError, match=message):
        HybridConfig.read(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' has no specialised graph"),
        (config(attention_bias=True), "attention_bias is True"),
        (config(hidden_act="gelu"), "hidden_act is 'gelu'"),
        (config(linear_conv_kernel_dim=3), "linear_conv_kernel_dim is 3"),
        (config(decoder_sparse_step=2), "decoder_sparse_step is 2"),
        (config(mlp_only_layers=[0]), "mlp_only_layers"),
        (config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}), "rotary embedding of type 'yarn'"),
        (config(num_experts=600, num_experts_per_tok=2), "600 experts"),
    ],
)
def test_other_architectures_are_left_to_the_adapter(settings, message):
    with pytest.raises(NotSpecialised, match=message):
        HybridConfig.read(settings)


def test_what_is_left_out_is_said():
    settings = {**config(TEXT, mtp_num_hidden_layers=1), "vision_config": {"depth": 2}}
    notes = " ".join(HybridConfig.read(settings).notes)
    assert "vision tower is left out" in notes
    assert "multi-token prediction head is left out" in notes

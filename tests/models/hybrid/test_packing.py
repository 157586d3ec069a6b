"""Weights in the kernels' layout: every form of a checkpoint, its peak in memory, and what does not fit."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import labkit
from labkit.kernels.quantized_matmul import Packed
from labkit.models import LoadError, Rows
from labkit.models.hybrid import Hybrid, HybridConfig, NotSpecialised, pack
from labkit.models.hybrid.matrix import side_by_side
from tests.models.hybrid.small import DENSE, TEXT, config, models, prompt, random_module
from tests.tiny_models import write_tokenizer


def tensors(module) -> dict[str, mx.array]:
    return dict(tree_flatten(module.parameters()))


def write(folder, settings: dict, weights: dict[str, mx.array]):
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token_id": 257}))
    write_tokenizer(folder)
    return folder


def quantisation(bits: int = 4) -> dict:
    table = {"group_size": 64, "bits": bits}
    for layer in range(TEXT["num_hidden_layers"]):
        for gate in ("gate", "shared_expert_gate"):
            table[f"language_model.model.layers.{layer}.mlp.{gate}"] = {"group_size": 64, "bits": 8}
    return table


@pytest.mark.parametrize("bits", [4, 8, None])
def test_what_shares_its_input_lies_in_one_matrix(bits):
    weights = models("sparse", bits).hybrid.weights
    delta, attention = weights.layers[0], weights.layers[1]
    assert len(delta.mixer.inputs.parts) == len(attention.mixer.inputs.parts) == 1
    assert delta.mixer.inputs.n == 384 + 256 + 4 + 4
    assert attention.mixer.inputs.n == 2 * 256 + 2 * 128
    assert delta.mlp.router.n == 9
    # A shared expert of 128 is two experts of 64.
    assert delta.mlp.shared_slots == 2
    assert delta.mlp.shared is None


def test_a_shared_expert_that_is_no_multiple_keeps_its_own_matrices():
    settings = config(TEXT, shared_expert_intermediate_size=96, num_hidden_layers=2)
    module = random_module(settings, bits=None)
    model = Hybrid.from_module(module, settings)
    assert model.weights.layers[0].mlp.shared is not None
    tokens = prompt(9)
    ours = model(tokens, model.make_caches(), Rows.single(), logits="all").logits
    np.testing.assert_allclose(ours, module(tokens), atol=5e-4)


def test_matrices_of_other_forms_stay_apart_and_multiply_alike():
    four, eight = (Packed.quantize(mx.random.normal((16, 64)), bits=bits) for bits in (4, 8))
    joined = side_by_side(four, four, eight)
    assert [part.n for part in joined.parts] == [32, 16]
    assert joined.n == 48
    assert joined.packed is None


@pytest.mark.parametrize("text", [TEXT, DENSE], ids=["sparse", "dense"])
def test_packing_takes_every_tensor_and_stays_near_the_models_size(text, tmp_path):
    """From a file, as `load` does: the peak while packing is at most 1.1 times the checkpoint in memory."""
    settings = config(text, num_hidden_layers=24, vocab_size=512, hidden_size=256)
    weights = tensors(random_module(settings))
    path = str(tmp_path / "model.safetensors")
    mx.save_safetensors(path, weights, {"format": "mlx"})
    size, peaks = sum(array.nbytes for array in weights.values()), []
    del weights
    for _ in range(3):  # the least of them: MLX's threads may let go of a layer late, and add to what packing takes
        loaded = mx.load(path)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        packed = pack(loaded, HybridConfig.read(settings), mx.float32)
        peaks.append(mx.get_peak_memory() - before)
        assert not loaded, "the mapping is emptied as its tensors are used"
        assert abs(packed.nbytes - size) <= 0.01 * size
        del packed
    assert min(peaks) <= 1.1 * size, f"{min(peaks) / size:.3f} of the checkpoint"


@pytest.mark.parametrize("graph", ["specialised", "adapter"])
def test_a_checkpoint_with_a_vision_tower_and_a_draft_head_loads_as_text(graph, tmp_path):
    settings = config(TEXT, mtp_num_hidden_layers=1)
    weights = tensors(random_module(settings))
    settings |= {"vision_config": {"depth": 1}, "quantization": quantisation()}
    weights |= {"vision_tower.blocks.0.weight": mx.zeros((8, 8)), "language_model.mtp.norm.weight": mx.zeros((8,))}
    loaded = labkit.load(write(tmp_path / "vision", settings, weights), graph=graph)
    assert loaded.model(prompt(3), loaded.model.make_caches(), Rows.single()).logits.shape == (1, 1, 320)
    if graph == "specialised":
        assert len(loaded.notes) == 2


def test_layer_types_alone_load(tmp_path):
    """mlx-lm's module would put attention into every fourth layer whatever they say."""
    settings = config(TEXT, num_hidden_layers=3, full_attention_interval=3)
    weights = tensors(random_module(settings))
    del settings["text_config"]["full_attention_interval"]
    settings["text_config"]["layer_types"] = ["linear_attention", "linear_attention", "full_attention"]
    settings["quantization"] = quantisation()
    loaded = labkit.load(write(tmp_path / "kinds", settings, weights), graph="specialised")
    assert loaded.model.layer_kinds == ["linear_attention", "linear_attention", "full_attention"]
    settings["text_config"]["full_attention_interval"] = 3
    wanted = labkit.load(write(tmp_path / "interval", settings, weights), graph="adapter").model
    tokens = prompt(6)
    ours, theirs = (m(tokens, m.make_caches(), Rows.single()).logits for m in (loaded.model, wanted))
    np.testing.assert_allclose(ours, theirs, atol=5e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w: w.pop("language_model.model.norm.weight"), LoadError, "lack model.norm.weight"),
        (lambda w: w.update({"language_model.model.extra": mx.zeros((2,))}), LoadError, "have no place"),
        (
            lambda w: w.update({"language_model.model.layers.0.linear_attn.norm.weight": mx.zeros((5,))}),
            LoadError,
            "do not fit together",
        ),
        (
            lambda w: w.update({"language_model.model.layers.1.self_attn.k_proj.weight": mx.zeros((7, 16), mx.uint32)}),
            LoadError,
            "do not fit together",
        ),
        (lambda w: w.pop("language_model.lm_head.biases"), NotSpecialised, "without biases"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, error, message):
    weights = tensors(models().module)
    change(weights)
    with pytest.raises(error, match=message):
        pack(weights, HybridConfig.read(config()), mx.float32)


def test_a_width_that_no_kernel_reads_is_left_to_the_adapter():
    settings = config(TEXT, num_hidden_layers=2)
    with pytest.raises(NotSpecialised, match="4 or 8 bits"):
        Hybrid.from_module(random_module(settings, bits=6), settings)


def test_the_graph_is_chosen(tmp_path):
    settings = config(TEXT, num_hidden_layers=2) | {"quantization": quantisation()}
    folder = write(tmp_path / "model", settings, tensors(random_module(config(TEXT, num_hidden_layers=2))))
    with pytest.raises(LoadError, match="graph is one of"):
        labkit.load(folder, graph="fast")
    for graph, kind in (("adapter", "Adapter"), ("specialised", "Hybrid")):
        assert type(labkit.load(folder, graph=graph).model).__name__ == kind
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "llama"}))
    with pytest.raises(NotSpecialised, match="llama"):
        labkit.load(folder, graph="specialised")

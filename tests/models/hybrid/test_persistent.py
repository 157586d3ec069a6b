"""`Variants.persistent`: the same tokens, launch by launch or a layer at a time."""

from __future__ import annotations

import contextlib

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import use_target
from labkit.kernels.persistent import launches
from labkit.models import Rows
from labkit.models.hybrid import Hybrid, NotSpecialised, Variants
from tests.models.hybrid.small import DENSE, config, prompt, random_module, tiny_hybrid
from tests.models.hybrid.test_few_tokens import logits, one_layer_each, with_variants

KERNELS = {
    "sparse_half": launches.SPARSE_HALF,
    "linear_layer": launches.LINEAR_LAYER,
    "full_layer": launches.FULL_LAYER,
}


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """The persistent kernels that were launched, in order."""
    found: list[str] = []
    for name, forms in KERNELS.items():
        kernel = forms["plain"]
        reference = kernel.reference
        monkeypatch.setattr(kernel, "reference", lambda launch, n=name, r=reference: (found.append(n), r(launch))[1])
    return found


@pytest.mark.parametrize(
    ("switch", "used"), [("experts", ["sparse_half"] * 2), ("layers", ["linear_layer", "full_layer"])]
)
def test_a_step_is_the_plain_forms(switch, used, called):
    """By the oracles, bit for bit: a prompt goes the plain way, then each step the switch's."""
    model, tokens = with_variants(one_layer_each().hybrid, persistent=switch, compiled=False), prompt(14)
    with use_target("reference"):
        got = logits(model, tokens, [11, 1, 1, 1])
        assert called == 3 * used
        want = logits(with_variants(model), tokens, [11, 1, 1, 1])
    assert mx.array_equal(got, want)


def test_what_a_launch_a_layer_does_not_take_goes_launch_by_launch(called):
    """Several tokens of a row, as in a verification: the sparse halves alone."""
    model, tokens = with_variants(one_layer_each().hybrid, persistent="layers", compiled=False), prompt(14)
    with use_target("reference"):
        got, want = logits(model, tokens, [11, 3]), logits(with_variants(model), tokens, [11, 3])
    assert called == ["sparse_half"] * 2
    assert mx.array_equal(got, want)


def test_rows_of_a_batch_share_a_launch(called):
    model = with_variants(one_layer_each().hybrid, persistent="layers", compiled=False)
    tokens = mx.stack([prompt(10)[0], prompt(10, seed=5)[0]])
    parts = []
    with use_target("reference"):
        for each in (model, with_variants(model)):
            caches = each.make_caches(2)
            rows = lambda at: Rows(positions=mx.array([at, at], dtype=mx.int32))
            each(tokens[:, :9], caches, rows(0))
            parts.append(each(tokens[:, 9:], caches, rows(9)).logits)
    assert called == ["linear_layer", "full_layer"]
    assert mx.array_equal(*parts)


@pytest.mark.nightly
def test_the_text_of_whole_layers_in_the_simulator():
    both, tokens, parts = one_layer_each(), prompt(14), []
    for switch, target in (("layers", "simulator"), ("off", "reference")):
        model = with_variants(both.hybrid, persistent=switch)
        caches = model.make_caches()
        with use_target("reference"):
            model(tokens[:, :11], caches, Rows.single(0))
        with use_target(target):
            steps = [model(tokens[:, at : at + 1], caches, Rows.single(at)).logits for at in range(11, 14)]
        parts.append(mx.concatenate(steps, axis=1))
    np.testing.assert_allclose(*parts, atol=1e-4)


@pytest.mark.nightly
def test_a_trained_model_says_the_same():
    """tiny-hybrid's eight layers in the simulator, against MLX's operations."""
    plain = tiny_hybrid().hybrid
    tokens, parts = prompt(23) % plain.vocab_size, []
    for model, target in ((with_variants(plain, persistent="layers"), "simulator"), (plain, None)):
        caches = model.make_caches()
        model(tokens[:, :20], caches, Rows.single(0))
        with use_target(target) if target else contextlib.nullcontext():
            steps = [model(tokens[:, at : at + 1], caches, Rows.single(at)).logits for at in range(20, 23)]
        parts.append(mx.concatenate(steps, axis=1))
    np.testing.assert_allclose(*parts, atol=2e-4)


@pytest.mark.parametrize(
    ("settings", "bits", "says"),
    [
        (config(DENSE), 4, "its MLPs are dense"),
        (config(), None, "its matrices are not all packed"),
        (config(shared_expert_intermediate_size=192, moe_intermediate_size=128), 4, "shared expert"),
    ],
)
def test_a_model_that_it_does_not_fit_refuses_the_switch(settings, bits, says):
    module = random_module({**settings}, bits=bits)
    with pytest.raises(NotSpecialised, match=rf"{says}.*leave the switch `persistent` off"):
        Hybrid.from_module(module, settings, variants=Variants(persistent="layers"))

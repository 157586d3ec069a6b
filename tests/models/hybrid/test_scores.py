"""Logits and router scores of a model in 16 bits: float32, and nothing of their sums rounded off."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import mlx.core as mx
import pytest

from labkit.kernels import use_target
from labkit.models import Rows
from labkit.models.hybrid import Hybrid, Variants, experts
from tests.models.hybrid.small import DENSE, TEXT, config, prompt, random_module


@cache
def in_bf16(kind: str, variants: Variants, invariant: bool) -> Hybrid:
    settings = config(DENSE if kind == "dense" else TEXT, num_hidden_layers=2)
    module = random_module(settings, seed=1)
    return Hybrid.from_module(module, settings, mx.bfloat16, variants=variants, invariant=invariant)


def is_unrounded(x: mx.array) -> bool:
    """Whether float32 values use the bits that bf16 does not have."""
    assert x.dtype == mx.float32
    return mx.mean(x != x.astype(mx.bfloat16).astype(mx.float32)).item() > 0.9


MODES = {
    "default": (Variants(compiled=False), False),
    "own launches": (Variants(compiled=False, decode_rows="own"), False),
    "tiles": (Variants(compiled=False, decode_rows="tile"), False),
    "weights as floats first": (Variants(compiled=False, dequantise="before"), False),
    "invariant": (Variants(compiled=False), True),
}


@pytest.mark.parametrize("target", [None, "reference"])
@pytest.mark.parametrize("mode", MODES)
def test_logits_of_every_form_of_a_step(mode, target, monkeypatch):
    scores = []
    products = experts.Experts._products
    watched = lambda self, x, logits, step: scores.append(logits) or products(self, x, logits, step)
    monkeypatch.setattr(experts.Experts, "_products", watched)
    model, position = in_bf16("sparse", *MODES[mode]), 0
    caches = model.make_caches()

    with use_target(target) if target else nullcontext():
        for width, asked in ((12, "all"), (1, "last"), (3, "all"), (11, "last"), (2, mx.array([[1]]))):
            output = model(prompt(width, width), caches, Rows.single(position), logits=asked, hidden=width == 3)
            assert is_unrounded(output.logits), (mode, width)
            assert output.hidden is None or output.hidden.dtype == mx.bfloat16
            position += width
    assert len(scores) == 5 * 2
    assert all(is_unrounded(part) for part in scores)


def test_logits_of_a_dense_model_and_of_rows():
    model = in_bf16("dense", *MODES["default"])
    with use_target("reference"):
        assert is_unrounded(model(prompt(4, batch=3), model.make_caches(3), Rows.batch([0] * 3)).logits)


def test_a_head_of_plain_floats_gives_float32_as_mlx_rounds_them():
    settings = config(DENSE, num_hidden_layers=1)
    model = Hybrid.from_module(random_module(settings, bits=None), settings, mx.bfloat16)
    logits = model(prompt(4), model.make_caches(), Rows.single(), logits="all").logits
    assert logits.dtype == mx.float32
    assert not is_unrounded(logits)

"""What a model in 16 bits keeps in float32, and rounds nothing off: logits, router scores, and a stream asked for."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import mlx.core as mx
import pytest

from labkit.kernels import use_target
from labkit.kernels.targets import watched
from labkit.models import Rows
from labkit.models.hybrid import Hybrid, Variants, experts
from tests.models.hybrid.small import DENSE, TEXT, config, prompt, random_module


@cache
def in_bf16(kind: str, variants: Variants, invariant: bool) -> Hybrid:
    settings = config(DENSE if kind == "dense" else TEXT, num_hidden_layers=2)
    module = random_module(settings, seed=1)
    return Hybrid.from_module(module, settings, mx.bfloat16, variants=variants, invariant=invariant)


def is_unrounded(x: mx.array, share: float = 0.9) -> bool:
    """Whether at least this share of float32 values use the bits that bf16 does not have."""
    assert x.dtype == mx.float32
    return mx.mean(x != x.astype(mx.bfloat16).astype(mx.float32)).item() > share


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


WIDTHS = (12, 1, 3, 11, 2)
ADDING = ("residual_rms_norm", "norm_project_plain", "norm_router")


def streams(model: Hybrid, target: str | None, embedded: bool = False) -> tuple[list[mx.array], mx.array]:
    """The residual stream after each addition, and all logits, of forwards of `WIDTHS` tokens."""
    found, logits, caches, position = [], [], model.make_caches(), 0

    def watch(kernel, launch, outputs):
        if kernel.name in ADDING and dict(launch.template).get("ADDS", True):
            found.append(outputs[0])

    with use_target(target) if target else nullcontext(), watched(watch):
        for width in WIDTHS:
            tokens = prompt(width, width)
            given = {"embeddings": model.embed(tokens)} if embedded else {}
            logits.append(model(tokens, caches, Rows.single(position), logits="all", **given).logits)
            position += width
    return found, mx.concatenate(logits, axis=1)


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize("target", [None, "reference"])
@pytest.mark.parametrize("rows", ["gemv", "own"])
def test_a_float32_stream_is_never_rounded(rows, target, embedded):
    rounds, keeps = (
        in_bf16("sparse", Variants(compiled=False, decode_rows=rows, stream=stream), False)
        for stream in ("rounded", "float32")
    )
    rounded, exact = streams(rounds, target, embedded)[0], streams(keeps, target, embedded)[0]
    assert len(rounded) == len(exact) == len(WIDTHS) * 4  # in two layers
    assert {stream.dtype for stream in rounded} == {mx.bfloat16}
    # An embedding's values, few bits times few bits, are often numbers of bf16 as they are: so are some sums.
    assert all(is_unrounded(stream, 0.3) for stream in exact)
    assert keeps.embed(prompt(2)).dtype == mx.float32
    assert {cache.layout.arrays[0].dtype for cache in keeps.make_caches()} == {"bfloat16"}


def test_a_float32_stream_is_nearer_to_a_model_in_float32():
    settings = config(TEXT, num_hidden_layers=4)
    module = random_module(settings, seed=1)
    wanted = streams(Hybrid.from_module(module, settings, mx.float32), "reference")[1]
    far, near = (
        mx.mean(mx.abs(streams(Hybrid.from_module(module, settings, mx.bfloat16, variants=v), "reference")[1] - wanted))
        for v in (Variants(compiled=False), Variants(compiled=False, stream="float32"))
    )
    assert near.item() < far.item()


def test_a_stream_in_float32_and_persistent_launches_exclude_each_other():
    with pytest.raises(ValueError, match="persistent launches keep the stream"):
        Variants(stream="float32", persistent="layers")

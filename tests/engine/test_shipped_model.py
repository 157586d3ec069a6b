"""The engine on the shipped model: mlx-lm's tokens, seeds, a snapshot in the middle of an answer."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

import labkit
from labkit.models import Rows, zoo

pytestmark = pytest.mark.skipif(
    not any(zoo.tiny_hybrid().glob("model*.safetensors")), reason="tiny-hybrid's weights are not in this tree"
)


@pytest.fixture(scope="module")
def loaded() -> labkit.LoadedModel:
    return labkit.load("tiny-hybrid")


def test_greedy_tokens_are_mlx_lms(loaded):
    prompt = loaded.tokenizer.encode("In the beginning God created the heaven and the earth. And the")
    ours = labkit.Engine(loaded, prefill_chunk=8).generate(prompt, max_tokens=24, ignore_eos=True)
    module = labkit.load("tiny-hybrid", graph="adapter").model.module
    steps = generate_step(mx.array(prompt), module, max_tokens=24, prefill_step_size=8)
    assert list(ours.tokens) == [int(token) for token, _ in islice(steps, 24)]
    assert ours.text == loaded.tokenizer.decode(ours.tokens)


def test_seeds_reproduce(loaded):
    engine = labkit.Engine(loaded)
    options = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
    first = engine.generate("The index", **options)
    assert engine.generate("The index", seed=first.seed, **options).tokens == first.tokens


def test_a_snapshot_continues_with_the_same_bits(loaded):
    model = loaded.model
    caches = model.make_caches()
    model(mx.array([loaded.tokenizer.encode("A database is a")]), caches, Rows.single(), logits=None)
    position = next(cache.offset for cache in caches if cache.kind == "contiguous")
    restored = [type(c).restore(c.snapshot(), layout) for c, layout in zip(caches, model.layouts, strict=True)]
    token = mx.array([[100]])
    wanted = model(token, caches, Rows.single(position)).logits
    assert mx.array_equal(model(token, restored, Rows.single(position)).logits, wanted)


def test_its_kinds_and_sizes(loaded):
    model = loaded.model
    assert model.splits_head
    assert model.batches
    assert model.layer_kinds == ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 3 + [
        "full_attention"
    ]
    assert model.limits == {"append": ("recurrent",), "trim": ("recurrent",)}

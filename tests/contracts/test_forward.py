"""Contract 1, forward: rows are device arrays, read once before any cache changes; only what is asked for is scored."""

from __future__ import annotations

import inspect

import mlx.core as mx
import numpy as np
import pytest

from labkit.models import Model, Output, Rows
from tests.tiny_models import adapter


def test_every_model_is_a_model(hybrid):
    assert isinstance(hybrid.model, Model)
    wanted = inspect.signature(Model.__call__).parameters
    assert list(inspect.signature(type(hybrid.model).__call__).parameters) == list(wanted)
    assert len(hybrid.model.layer_kinds) == len(hybrid.model.layouts) == len(hybrid.model.make_caches())


@pytest.mark.parametrize("length", [1, 2, 8, 40])
@pytest.mark.parametrize("batch", [1, 3])
def test_shapes_for_decode_verification_and_chunks(hybrid, length, batch):
    model = hybrid.model
    tokens, rows = mx.zeros((batch, length), mx.int32), Rows.batch([0] * batch)
    output = model(tokens, model.make_caches(batch), rows, logits="all", hidden=True)
    assert isinstance(output, Output)
    assert output.logits.shape == (batch, length, model.vocab_size)
    assert output.hidden.shape[:2] == (batch, length)
    assert model(tokens, model.make_caches(batch), rows).logits.shape == (batch, 1, model.vocab_size)
    at = mx.zeros((batch, 2), mx.int32)
    assert model(tokens, model.make_caches(batch), rows, logits=at).logits.shape == (batch, 2, model.vocab_size)
    assert model(tokens, model.make_caches(batch), rows, logits=None).logits is None


def test_the_head_never_sees_a_position_that_was_not_asked_for(monkeypatch):
    model, seen = adapter("llama-untied"), []
    head = type(model.module.lm_head)
    call = head.__call__

    def spy(self, x):
        if self is model.module.lm_head:
            seen.append(x.shape[1])
        return call(self, x)

    monkeypatch.setattr(head, "__call__", spy)
    tokens = mx.zeros((1, 64), mx.int32)
    model(tokens, model.make_caches(), Rows.single())
    model(tokens, model.make_caches(), Rows.single(), logits=mx.array([[3, 9]]))
    assert seen == [1, 2]


def test_positions_are_read_once_before_any_cache_changes():
    # Keys and queries one position apart is what reading them again after the update gives. The rows say where they
    # stand, not the caches, which count tokens: media take fewer positions than tokens.
    model = adapter("llama")
    seen = []
    for layer in model.module.layers:
        rope = layer.self_attn.rope
        layer.self_attn.rope = lambda x, offset=0, rope=rope: seen.append(mx.array(offset)) or rope(x, offset=offset)
    caches = model.make_caches(2)
    model(mx.zeros((2, 3), mx.int32), caches, Rows.batch([0, 0]))
    seen.clear()
    model(mx.zeros((2, 2), mx.int32), caches, Rows.batch([7, 3]))
    assert len(seen) == 4
    assert all(offset.tolist() == [7, 3] for offset in seen)
    assert [cache.offset.tolist() for cache in caches] == [[9, 5], [9, 5]]


def test_two_uses_of_one_model_do_not_meet(hybrid):
    model = hybrid.model
    prompts = mx.array([[1, 2, 3, 4]]), mx.array([[9, 8, 7, 6]])
    alone = []
    for prompt in prompts:
        caches = model.make_caches()
        model(prompt[:, :3], caches, Rows.single(), logits=None)
        alone.append(model(prompt[:, 3:], caches, Rows.single(3)).logits)
    both = [model.make_caches() for _ in prompts]
    for caches, prompt in zip(both, prompts, strict=True):
        model(prompt[:, :3], caches, Rows.single(), logits=None)
    for caches, prompt, wanted in zip(both, prompts, alone, strict=True):
        assert mx.array_equal(model(prompt[:, 3:], caches, Rows.single(3)).logits, wanted)


def test_embeddings_take_the_place_of_tokens(hybrid):
    model = hybrid.model
    tokens = mx.array([[4, 5, 6]])
    embed = model.embed if hasattr(model, "embed") else model.module.language_model.model.embed_tokens
    embeddings = embed(tokens)
    wanted = model(tokens, model.make_caches(), Rows.single()).logits
    got = model(mx.zeros_like(tokens), model.make_caches(), Rows.single(), embeddings=embeddings).logits
    np.testing.assert_array_equal(got, wanted)

"""The specialised graph against the adapter around mlx-lm's module, on the same weights, in fp32 on a CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from labkit.caches import BatchedContiguous, commit
from labkit.kernels import use_target
from labkit.models import Rows
from labkit.models.contract import Model
from labkit.models.hybrid.plan import Plan, Step
from labkit.models.hybrid.variants import Variants
from tests.models.hybrid.small import models, prompt, tiny_hybrid

TOLERANCE = 5e-4
KINDS = [
    ("sparse", 4),
    ("sparse", 8),
    ("sparse", None),
    ("dense", 4),
    ("dense", None),
    ("hybrid", None),
    ("hybrid-moe", None),
]
WIDTHS = (5, 9, 1, 1, 3, 1, 20, 1, 8, 1)


@pytest.fixture(params=[None, "reference"], ids=["mlx-ops", "kernels"])
def target(request):
    """MLX's own operations, and the graph of a GPU with its kernels' references in their place."""
    if request.param is None:
        yield None
    else:
        with use_target(request.param):
            yield request.param


def uncompiled(model):
    """On a CPU MLX compiles C++ for minutes where a GPU needs milliseconds; test_few_tokens.py traces instead."""
    model.variants = Variants(compiled=False)
    return model


def agree(ours: mx.array, theirs: mx.array) -> None:
    assert mx.abs(ours - theirs).max().item() <= TOLERANCE
    assert mx.array_equal(mx.argmax(ours, axis=-1), mx.argmax(theirs, axis=-1))


def padded(rows: list[list[int]], left: bool = False) -> mx.array:
    width = max(map(len, rows))
    pads = [[0] * (width - len(row)) for row in rows]
    return mx.array([pad + row if left else row + pad for pad, row in zip(pads, rows, strict=True)])


@pytest.mark.parametrize(("kind", "bits"), KINDS)
def test_whole_sequences_and_steps(kind, bits, target):
    if target and (kind.startswith("hybrid") or bits == 8):
        pytest.skip("heads of 8 are not for kernels, and 8 bits take the way of 4")
    both = models(kind, bits)
    ours, theirs = uncompiled(both.hybrid), both.adapter
    assert isinstance(ours, Model)
    for widths in ((sum(WIDTHS),), WIDTHS):
        own, reference, position = ours.make_caches(), theirs.make_caches(), 0
        for width in widths:
            tokens, rows = prompt(width, position), Rows.single(position)
            wanted = theirs(tokens, reference, rows, logits="all").logits
            agree(ours(tokens, own, rows, logits="all").logits, wanted)
            position += width


def test_the_model_says_of_itself_what_the_adapter_says():
    both = models()
    for name in (
        "vocab_size",
        "num_layers",
        "layouts",
        "dtype",
        "splits_head",
        "accepts_embeddings",
        "batches",
        "limits",
    ):
        assert getattr(both.hybrid, name) == getattr(both.adapter, name), name
    assert list(both.hybrid.layer_kinds) == list(both.adapter.layer_kinds)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_rows_of_unequal_length(padding, target):
    both = models()
    ours, theirs = uncompiled(both.hybrid), both.adapter
    rows = [prompt(n, n)[0].tolist() for n in (4, 9, 23)]
    longest = max(map(len, rows))
    tokens = padded(rows, left=padding == "left")
    if padding == "left":
        pads = [longest - len(row) for row in rows]
        first = Rows.batch([-n for n in pads], left_padding=pads)
    else:
        first = Rows.batch([0, 0, 0], lengths=[len(row) for row in rows])
    own, reference = ours.make_caches(3), theirs.make_caches(3)
    agree(ours(tokens, own, first).logits, theirs(tokens, reference, first).logits)
    for step in range(3):
        tokens, now = prompt(1, step, batch=3), Rows.batch([len(row) + step for row in rows])
        agree(ours(tokens, own, now).logits, theirs(tokens, reference, now).logits)
    for mine, other in zip(own, reference, strict=True):
        if isinstance(mine, BatchedContiguous):
            assert mine.offset.tolist() == other.offset.tolist()
            assert mine.left_padding.tolist() == other.left_padding.tolist()


def test_rows_that_are_merged_filtered_extended_and_extracted(target):
    """Whatever happens to the rows, each goes on as it would have alone."""
    both = models()
    ours, theirs = uncompiled(both.hybrid), both.adapter
    alone, own = [], []
    for n in (7, 2, 12):
        tokens = prompt(n, n)
        alone.append(theirs.make_caches())
        theirs(tokens, alone[-1], Rows.single(), logits=None)
        own.append(ours.make_caches())
        ours(tokens, own[-1], Rows.single(), logits=None)
    at = [7, 2, 12]

    def step(caches: list, rows: list[int], seed: int) -> None:
        tokens = prompt(1, seed, batch=len(rows))
        together = ours(tokens, caches, Rows.batch([at[row] for row in rows])).logits
        for i, row in enumerate(rows):
            single = theirs(tokens[i : i + 1], alone[row], Rows.single(at[row])).logits
            agree(together[i : i + 1], single)
            at[row] += 1

    merged = [type(layer[0]).merge(layer) for layer in zip(own[0], own[1], strict=True)]
    step(merged, [0, 1], 1)
    step(merged, [0, 1], 2)
    for layer, newcomer in zip(merged, own[2], strict=True):
        layer.extend(newcomer)
    step(merged, [0, 1, 2], 3)
    for layer in merged:
        layer.filter([2, 1])
    step(merged, [2, 1], 4)
    single = [layer.extract(0) for layer in merged]
    restored = [type(cache).restore(cache.snapshot(), cache.layout) for cache in single]
    tokens = prompt(1, 9)
    wanted = theirs(tokens, alone[2], Rows.single(at[2])).logits
    agree(ours(tokens, restored, Rows.single(at[2])).logits, wanted)


@pytest.mark.parametrize("accepted", [0, 1, 3, 5])
def test_a_draft_is_verified_and_partly_kept(accepted, target):
    both = models()
    ours, theirs = uncompiled(both.hybrid), both.adapter
    own, reference = ours.make_caches(), theirs.make_caches()
    start, draft = prompt(6, 1), prompt(5, 2)
    for model, caches in ((ours, own), (theirs, reference)):
        model(start, caches, Rows.single(), logits=None)
    for cache in own:
        cache.checkpoint()
    logits = ours(draft, own, Rows.single(6), logits="all").logits
    commit(own, accepted)
    if accepted:
        kept = theirs(draft[:, :accepted], reference, Rows.single(6), logits="all").logits
        agree(logits[:, :accepted], kept)
    tokens, rows = prompt(1, 3), Rows.single(6 + accepted)
    agree(ours(tokens, own, rows).logits, theirs(tokens, reference, rows).logits)


def test_only_what_is_asked_for(target):
    model = uncompiled(models().hybrid)
    tokens, rows = prompt(7, 3, batch=2), Rows.batch([0, 0])
    everything = model(tokens, model.make_caches(2), rows, logits="all", hidden=True)
    assert everything.hidden.shape == (2, 7, 128)
    last = model(tokens, model.make_caches(2), rows)
    np.testing.assert_allclose(last.logits[:, 0], everything.logits[:, -1], atol=1e-4)
    chosen = model(tokens, model.make_caches(2), rows, logits=mx.array([[0, 3], [6, 2]])).logits
    np.testing.assert_allclose(chosen[1, 1], everything.logits[1, 2], atol=1e-4)
    assert model(tokens, model.make_caches(2), rows, logits=None) == (None, None)
    embedded = model(tokens, model.make_caches(2), rows, logits="all", embeddings=model.embed(tokens))
    np.testing.assert_allclose(embedded.logits, everything.logits, atol=1e-4)


def test_each_kind_of_layer_alone(target):
    """The mixers and MLPs one by one, so that an error names its layer."""
    both = models()
    model, layers = both.hybrid, both.module.layers
    plan = Plan.here(Variants(compiled=False), False)
    x, update = (mx.random.normal((1, 11, 128), key=mx.random.key(seed)) for seed in (1, 2))
    step = Step(plan, 1, 11, mx.array([0], mx.int32), mask="causal")
    for index, (layer, theirs) in enumerate(zip(model.graph.layers, layers, strict=True)):
        cache, reference = model.make_caches()[index], both.adapter.make_caches()[index]
        module = theirs.linear_attn if theirs.is_linear else theirs.self_attn
        wanted = module(x, None if theirs.is_linear else "causal", reference)
        projected = plan.product(x, layer.mixer.weights.inputs)
        np.testing.assert_allclose(layer.mixer(projected, cache, step), wanted, atol=1e-4)
        stream, added = layer.mlp(update, x, step)
        np.testing.assert_allclose(stream, x + update, atol=1e-6)
        np.testing.assert_allclose(added, theirs.mlp(theirs.post_attention_layernorm(x + update)), atol=1e-4)


def test_the_trained_model():
    both = tiny_hybrid()
    own, reference, position = both.hybrid.make_caches(), both.adapter.make_caches(), 0
    for width in (48, 1, 1, 4, 1):
        tokens, rows = prompt(width, position), Rows.single(position)
        wanted = both.adapter(tokens, reference, rows, logits="all").logits
        agree(both.hybrid(tokens, own, rows, logits="all").logits, wanted)
        position += width


def test_bad_rows_and_caches_are_named():
    model = models().hybrid
    with pytest.raises(ValueError, match="expected \\[rows, length\\]"):
        model(prompt(3), model.make_caches(), Rows.batch([0, 0]))
    with pytest.raises(ValueError, match="caches of"):
        model(prompt(3), model.make_caches()[:-1], Rows.single())
    with pytest.raises(ValueError, match="begin at positions"):
        model(prompt(3), model.make_caches(), Rows.single(4))
    with pytest.raises(ValueError, match="stand in for tokens"):
        model(prompt(3), model.make_caches(), Rows.single(), embeddings=mx.zeros((1, 3, 5)))

"""The invariant mode: a row has the same bits alone, beside others, behind padding, and in whatever chunks."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import use_target
from labkit.models import Rows
from labkit.models.hybrid import Hybrid
from tests.models.hybrid.small import DENSE, config, models, prompt, random_module


def invariant(model: Hybrid) -> Hybrid:
    return Hybrid(model.weights, model.config, model.dtype, invariant=True)


def in_chunks(model: Hybrid, tokens: mx.array, widths: list[int]) -> mx.array:
    caches, position, parts = model.make_caches(), 0, []
    for width in widths:
        part = tokens[:, position : position + width]
        parts.append(model(part, caches, Rows.single(position), logits="all").logits)
        position += width
    return mx.concatenate(parts, axis=1)


def first_difference(one: mx.array, other: mx.array) -> int | None:
    same = mx.all(one == other, axis=-1).reshape(-1).tolist()
    return None if all(same) else same.index(False)


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize(
    "target",
    [pytest.param(None, id="mlx-ops"), pytest.param("simulator", id="metal-text", marks=pytest.mark.nightly)],
)
def test_chunks_and_neighbours_change_no_bit(kind, target):
    if target:
        # Two layers, and as few tokens as have a chunk, a padded row and single steps in them.
        settings = config(
            **({"text": DENSE} if kind == "dense" else {}),
            **{"hidden_size": 64, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
            **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 32},
            **{"shared_expert_intermediate_size": 64, "num_hidden_layers": 2},
        )
        if kind == "dense":
            pytest.skip("the sparse model has every kernel of the dense one")
        model, length, cuts = invariant(Hybrid.from_module(random_module(settings), settings)), 7, [[1, 6]]
    else:
        model, length, cuts = invariant(models(kind).hybrid), 41, [[40, 1], [1] * 9 + [32], [13, 8, 20]]
    tokens, longer = prompt(length, 1) % 64, prompt(length + 5, 2) % 64
    context = use_target(target) if target else mx.stream(mx.default_device())
    with context:
        whole = in_chunks(model, tokens, [length])
        for widths in cuts:
            assert first_difference(whole, in_chunks(model, tokens, widths)) is None, widths
        padded = mx.concatenate([mx.zeros((1, 5), mx.int32), tokens], axis=1)
        rows = Rows.batch([-5, 0], left_padding=[5, 0])
        both = model(mx.concatenate([padded, longer]), model.make_caches(2), rows, logits="all").logits
        assert first_difference(whole, both[:1, 5:]) is None


def test_floats_are_refused_where_their_products_would_vary():
    model = invariant(models("sparse", None).hybrid)
    with use_target("simulator"), pytest.raises(ValueError, match="needs packed weights"):
        model(prompt(3), model.make_caches(), Rows.single())


def test_the_mode_is_off_by_default_and_says_the_same():
    model = models().hybrid
    assert not model.invariant
    tokens = prompt(20)
    plain, fixed = (m(tokens, m.make_caches(), Rows.single(), logits="all").logits for m in (model, invariant(model)))
    assert mx.abs(plain - fixed).max().item() < 1e-3

"""Decoding through kernels: one traceable function, tails that bound what an append moves, the Metal text itself."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from labkit.caches import Contiguous
from labkit.caches.tail import TAIL
from labkit.kernels import use_target
from labkit.kernels.quantized_matmul import Packed
from labkit.models import Rows
from labkit.models.adapter import Adapter
from labkit.models.hybrid import Hybrid, Variants, plan
from labkit.models.hybrid.matrix import Matrix
from tests.models.hybrid.small import SWITCHES, TEXT, Models, config, models, prompt, random_module, with_variants


@cache
def one_layer_each() -> Models:
    """A DeltaNet layer and an attention layer, both with experts, as small as kernels take them."""
    settings = config(TEXT, num_hidden_layers=2, num_experts=4, moe_intermediate_size=64)
    module = random_module(settings, seed=1)
    return Models(module, Adapter(module, settings), Hybrid.from_module(module, settings))


def logits(model, tokens: mx.array, widths: list[int]) -> mx.array:
    caches, position, parts = model.make_caches(), 0, []
    for width in widths:
        rows = Rows.single(position)
        parts.append(model(tokens[:, position : position + width], caches, rows, logits="all").logits)
        mx.eval(parts)
        position += width
    return mx.concatenate(parts, axis=1)


def test_the_metal_text_of_a_whole_model():
    """Every kernel of a forward in the simulator: a chunk through the forms for many rows, then a step. Other numbers
    of tokens are other forms of the same kernels: their gates hold those to the references."""
    small = {
        **{"hidden_size": 64, "vocab_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64},
        **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 32},
        **{"shared_expert_intermediate_size": 64, "num_experts": 4, "num_hidden_layers": 2},
    }
    settings = config(TEXT, **small)
    module = random_module(settings, seed=1)
    both = Models(module, Adapter(module, settings), Hybrid.from_module(module, settings))
    tokens, widths = prompt(10) % 64, [9, 1]
    with use_target("simulator"):
        ours = logits(both.hybrid, tokens, widths)
    np.testing.assert_allclose(ours, logits(both.adapter, tokens, widths), atol=5e-4)


def test_a_step_is_one_graph_of_its_arrays(monkeypatch, tmp_path):
    """What `mx.compile` needs on a GPU. Here the function is exported, which traces it, and the trace is run."""
    both = one_layer_each()
    model = with_variants(both.hybrid)
    traced = []

    def export(function):
        graphs: dict[tuple, tuple] = {}

        def call(arrays, spans, memory):
            flat = [*arrays, *spans, *(array for part in memory for array in part)]
            shapes = tuple((*array.shape, array.dtype) for array in flat)
            cut = [len(arrays), len(spans), *map(len, memory)]

            def nested(parts):
                rest, pieces = list(parts), []
                for count in cut:
                    pieces.append(tuple(rest[:count]))
                    del rest[:count]
                return list(pieces[0]), list(pieces[1]), pieces[2:]

            if shapes not in graphs:
                form = []

                def traceable(*parts):
                    asked, after = function(*nested(parts))
                    form[:] = [[item is not None for item in asked], [len(part) for part in after]]
                    return [item for item in asked if item is not None] + [a for part in after for a in part]

                path = str(tmp_path / f"step{len(traced)}.mlxfn")
                mx.export_function(path, traceable, *flat)
                traced.append(shapes)
                graphs[shapes] = mx.import_function(path), form
            run, (asked, lengths) = graphs[shapes]
            out = iter(run(*flat))
            return tuple(next(out) if here else None for here in asked), [
                tuple(next(out) for _ in range(n)) for n in lengths
            ]

        return call

    monkeypatch.setattr(mx, "compile", export)
    tokens, widths = prompt(20), [9, 1, 1, 1, 3, 1, 3, 1]
    with use_target("reference"):
        ours = logits(model, tokens, widths)
    np.testing.assert_allclose(ours, logits(both.adapter, tokens, widths), atol=5e-4)
    assert len(traced) == 2, "one graph for single tokens, one for three, whatever the position"


@pytest.mark.nightly
def test_a_compiled_step_on_the_cpu():
    """MLX compiles C++ for it, minutes of it."""
    both = one_layer_each()
    tokens, widths = prompt(12), [9, 1, 1, 1]
    with use_target("reference"):
        ours = logits(with_variants(both.hybrid), tokens, widths)
    np.testing.assert_allclose(ours, logits(both.adapter, tokens, widths), atol=5e-4)


def test_an_append_moves_the_tail_and_no_buffer():
    """Bytes that a step makes anew: the tail's, whatever the context; the buffers only when a tail is full."""
    cache = Contiguous(models().hybrid.layouts[1])
    context = 20 * TAIL
    cache.update_and_fetch(*[mx.zeros((1, 2, context, 64))] * 2)
    cache.reserve(context + 4 * TAIL)
    buffers, moved, settled = cache.keys, 0, 0
    for token in range(2 * TAIL + 3):
        keys, values, tail = cache.open_tail(1)
        if keys is not buffers:
            settled += 1
            moved += keys.nbytes + values.nbytes
            buffers = keys
        column = cache.size() - tail.settled
        news = mx.full((1, 2, 1, 64), float(token))
        arrays = [mx.slice_update(part, news, mx.array([column]), axes=(2,)) for part in (tail.keys, tail.values)]
        moved += sum(array.nbytes for array in arrays)
        cache.take_tail(*arrays, 1)
        assert all(array.shape == (1, 2, TAIL, 64) for array in arrays)
    tokens, tail_bytes, buffer_bytes = 2 * TAIL + 3, 2 * 2 * TAIL * 64 * 4, cache.nbytes
    assert moved <= tokens * tail_bytes + 2 * buffer_bytes
    assert moved / tokens < 1.2 * tail_bytes, "settling is spread over the tail's columns"
    written = cache.keys[0, 0, context : context + tokens, 0]
    assert mx.array_equal(written, mx.arange(tokens).astype(mx.float32))


@pytest.mark.parametrize("end", ["trim", "commit", "snapshot", "filter", "merge", "extract", "update_and_fetch"])
def test_a_cache_with_a_tail_does_what_one_without_does(end):
    """Every operation meets a tail that is neither empty nor full."""
    layout = models().hybrid.layouts[1]

    def filled(tailed: bool):
        cache = Contiguous(layout)
        cache.update_and_fetch(*[mx.random.normal((1, 2, 5, 64), key=mx.random.key(1))] * 2)
        if end in ("filter", "extract"):
            cache = Contiguous.merge([cache, cache])
        if end == "commit":
            cache.checkpoint()
        for seed in range(4):
            news = mx.random.normal((cache.batch_size, 2, 1, 64), key=mx.random.key(10 + seed))
            if not tailed:
                cache.update_and_fetch(news, news)
                continue
            _, _, tail = cache.open_tail(1)
            at = mx.array([cache.size() - tail.settled])
            cache.take_tail(*(mx.slice_update(part, news, at, axes=(2,)) for part in tail[:2]), 1)
        return cache

    def ended(cache):
        more = mx.ones((cache.batch_size, 2, 2, 64))
        if end == "trim":
            cache.trim(3)
            cache.update_and_fetch(more, more)
        elif end == "commit":
            cache.commit(2)
            cache.update_and_fetch(more, more)
        elif end == "snapshot":
            return type(cache).restore(cache.snapshot())
        elif end == "filter":
            cache.filter([1])
        elif end == "merge":
            return Contiguous.merge([cache, cache])
        elif end == "extract":
            return cache.extract(1)
        else:
            cache.update_and_fetch(more, more)
        return cache

    ours, wanted = ended(filled(True)), ended(filled(False))
    assert ours.size() == wanted.size()
    for mine, theirs in zip(ours.keys_and_values(), wanted.keys_and_values(), strict=True):
        assert mx.array_equal(mine, theirs)


@pytest.mark.parametrize(("name", "value"), SWITCHES)
def test_every_switch_computes_the_same(name, value):
    both = one_layer_each()
    tokens, widths = prompt(30), [26, 1, 1, 2]
    with use_target("reference"):
        ours = logits(with_variants(both.hybrid, **{"compiled": False, name: value}), tokens, widths)
    np.testing.assert_allclose(ours, logits(both.adapter, tokens, widths), atol=5e-4)


@pytest.mark.parametrize(
    ("target", "rows", "options", "inside"),
    [
        ("cuda", 1, {}, True),
        ("cuda", 4, {}, True),
        ("cuda", 5, {}, False),  # rows of 20 KB
        ("cuda", 1, {"fuse_norm": False}, False),
        ("cuda", 1, {"decode_rows": "tile"}, False),
        ("metal", 1, {}, False),  # MLX's product
        ("metal", 1, {"decode_rows": "own"}, True),
        ("metal", 2, {}, True),
        ("simulator", 8, {}, False),
        (None, 1, {}, False),
    ],
)
def test_projections_norm_their_rows_where_they_are_our_kernel(target, rows, options, inside, monkeypatch):
    weights = Packed(*(mx.zeros((6144, n), t) for n, t in ((256, mx.uint32), (32, mx.bfloat16), (32, mx.bfloat16))))
    called = []
    for name in ("norm_project", "residual_rms_norm"):
        monkeypatch.setattr(plan, name, lambda x, residual, *_, n=name: called.append(n) or (x, residual))
    monkeypatch.setattr(plan.Plan, "product", lambda self, x, matrix: x)
    x, norm = mx.zeros((rows, 2048), mx.bfloat16), mx.ones((2048,))
    for invariant in (False, True):
        computes = plan.Plan(target, Variants(**options), invariant)
        computes.norm_product(x, x, norm, 1e-6, Matrix((weights,)))
    assert called == ["norm_project" if inside else "residual_rms_norm", "residual_rms_norm"]


def test_a_switch_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="delta is one of 'auto'"):
        Variants(delta="fast")

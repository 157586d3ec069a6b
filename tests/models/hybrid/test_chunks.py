"""Chunks of a prompt: their memory is known beforehand, and their size does not change what is computed."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import targets, use_target
from labkit.models import Rows
from labkit.models.hybrid import Hybrid, HybridConfig, Variants
from labkit.models.hybrid.memory import GRID, LONGEST, chunk_memory, longest_chunk
from labkit.resources import data_folder
from tests.models.hybrid.small import TEXT, config, models, prompt, random_module
from tests.settled import settled_memory

NIGHTLY, KINDS = pytest.mark.nightly, ("linear_attention", "full_attention")
FULL = HybridConfig.read(json.loads((data_folder() / "configs" / "qwen3.6-35b-a3b.json").read_text()))


def stand_in(target, kernel, launch):
    """A kernel's outputs, of the right shapes, once its inputs are there: what MLX allocates, without the work."""
    ready = sum((array.reshape(-1)[:1].astype(mx.float32) * 0 for array in launch.inputs), mx.zeros((1,)))
    return [
        mx.broadcast_to(ready.astype(dtype), shape) + mx.array(0, dtype)
        for shape, dtype in zip(launch.output_shapes, launch.output_dtypes, strict=True)
    ]


@pytest.fixture(scope="module")
def model():
    """Wide enough that small arrays do not count, in bf16."""
    changes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}
    changes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128}
    changes |= {"linear_value_head_dim": 128, "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 2}
    settings = config(TEXT, **changes)
    # By kernels alone: MLX's own products of bf16 on a CPU work on copies in fp32.
    return Hybrid.from_module(random_module(settings), settings, mx.bfloat16, variants=Variants(dequantise="in_tile"))


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="on a GPU the recipe measures it")
@pytest.mark.parametrize(
    "kind", ["both", *(pytest.param(kind, marks=NIGHTLY) for kind in sorted(set(FULL.layer_kinds)))]
)
def test_the_predicted_memory_of_a_chunk_is_what_mlx_allocates(model, kind, monkeypatch):
    """The most of several rounds: how far MLX's thread is behind the one that allocates differs from run to run."""
    monkeypatch.setattr(targets, "run_on", stand_in)
    monkeypatch.setattr(Hybrid, "_check", lambda *_: None)
    chosen = [index for index, layer in enumerate(model.graph.layers) if kind in ("both", layer.kind)]
    monkeypatch.setattr(model.graph, "layers", [model.graph.layers[index] for index in chosen])
    context, length, measured = 1024, 2048, 0
    tokens = prompt(length)
    for _ in range(5):
        caches = model.make_caches()
        caches = [caches[index] for index in chosen]
        for cache in caches:
            if cache.kind == "contiguous":
                cache.update_and_fetch(*[mx.zeros((1, 1, context, 64), mx.bfloat16)] * 2)
        mx.eval(tokens, [cache.state for cache in caches])
        before = settled_memory()
        mx.reset_peak_memory()
        with use_target("simulator"):
            out = model(tokens, caches, Rows.single(context), logits=None, hidden=True)
            mx.eval(out.hidden, [cache.state for cache in caches])
        measured = max(measured, mx.get_peak_memory() - before)
        del out
    memory = chunk_memory(model.sizes, length, context=context, shared_slots=2, on_cuda=False)
    if kind == "linear_attention":
        memory = replace(memory, attention=0, growth=0)
    elif kind == "full_attention":
        memory = replace(memory, delta=0)
    assert measured <= memory.peak <= 2 * measured, f"measured {measured:,}, predicted {memory}"


def test_the_full_shape_stays_within_two_gigabytes():
    """128K tokens of prompt in chunks of 4,096: the temporary memory of the last one."""
    assert chunk_memory(FULL, 4096, context=131072 - 4096).peak <= 2 * 10**9
    assert chunk_memory(FULL, LONGEST, context=131072 - LONGEST).peak <= 2 * 10**9


@pytest.mark.parametrize("context", [0, 100_000])
def test_the_longest_chunk_fits_and_the_next_does_not(context):
    cost = lambda length: chunk_memory(FULL, length, context=context).peak
    for free in (10**8, 5 * 10**8, 10**9, 10**10):
        length = longest_chunk(cost, free)
        assert GRID <= length <= LONGEST
        assert length % GRID == 0
        if length > GRID:
            assert cost(length) <= free
        if length < LONGEST:
            assert cost(length + GRID) > free
    assert longest_chunk(cost, 0) == GRID


def test_memory_grows_with_everything_that_it_depends_on():
    least = chunk_memory(FULL, 1024, context=1000).peak
    for more in ({"length": 2048}, {"context": 100_000}, {"batch": 2}, {"itemsize": 4}, {"positions": 1024}):
        assert chunk_memory(FULL, **{"length": 1024, "context": 1000, **more}).peak > least, more


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunks_agree(chunk):
    """Within 5e-4 of logits near 10, in whatever pieces, which is also what separates the graph from mlx-lm's."""
    both = models()
    length = 24 if chunk == 1 else 66
    tokens = prompt(length, 1)
    whole, pieces = both.hybrid.make_caches(), both.hybrid.make_caches()
    wanted = both.hybrid(tokens, whole, Rows.single(), logits="all").logits
    parts = []
    for start in range(0, length, chunk):
        part = tokens[:, start : start + chunk]
        parts.append(both.hybrid(part, pieces, Rows.single(start), logits="all").logits)
    np.testing.assert_allclose(mx.concatenate(parts, axis=1), wanted, atol=5e-4)


@pytest.mark.parametrize("chunk", [1, 5, 9, 32])
def test_the_recurrent_scan_has_the_same_bits_in_any_chunks(chunk):
    """The mixer's recurrence alone: what stands before it are matrix products, which sum as their library likes."""
    from labkit.kernels.gated_delta import scan

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(sum(shape)))

    q, k, v = normal(1, 41, 2, 32) * 0.2, normal(1, 41, 2, 32) * 0.2, normal(1, 41, 4, 64)
    gates = -mx.abs(normal(1, 41, 4)), mx.sigmoid(normal(1, 41, 4))
    state = normal(1, 4, 64, 32)
    wanted, final = scan(q, k, v, *gates, state)
    parts = []
    for start in range(0, 41, chunk):
        cut = slice(start, start + chunk)
        y, state = scan(q[:, cut], k[:, cut], v[:, cut], *(gate[:, cut] for gate in gates), state)
        parts.append(y)
    assert mx.array_equal(mx.concatenate(parts, axis=1), wanted)
    assert mx.array_equal(state, final)

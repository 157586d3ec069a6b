"""Chunks of a prompt: their memory is known beforehand, and their size does not change what is computed."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import targets, use_target
from labkit.measure.end_to_end.filled import Filled
from labkit.measure.trace.capture import _one_launch as one_launch
from labkit.measure.trace.capture import record
from labkit.measure.trace.step import VIEWS
from labkit.models import Rows
from labkit.models.hybrid import Hybrid, HybridConfig, Variants, mlp
from labkit.models.hybrid.memory import chunk_memory
from labkit.models.hybrid.sending import IN_FLIGHT
from labkit.resources import data_folder
from tests.models.hybrid.small import DENSE, TEXT, config, models, prompt, random_module
from tests.settled import settled_memory

NIGHTLY, KINDS = pytest.mark.nightly, ("linear_attention", "full_attention")
FULL = HybridConfig.read(json.loads((data_folder() / "configs" / "qwen3.6-35b-a3b.json").read_text()))


def stand_in(target, kernel, launch):
    """A kernel's outputs, of the right shapes, once its inputs are there: what MLX allocates, without the work."""
    ready = sum((array.reshape(-1)[:1].astype(mx.float32) * 0 for array in launch.inputs), mx.zeros((1,)))
    return [
        mx.full(shape, ready.astype(dtype))
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
    """The most of several rounds: how far MLX's thread is behind the one that allocates differs from run to run, and
    what it has not let go of yet comes on top."""
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
        before, held = settled_memory(), sum(cache.nbytes for cache in caches)
        mx.reset_peak_memory()
        with use_target("simulator"):
            out = model(tokens, caches, Rows.single(context), logits=None, hidden=True)
            mx.eval(out.hidden, [cache.state for cache in caches])
        grown = sum(cache.nbytes for cache in caches) - held
        measured = max(measured, mx.get_peak_memory() - before - grown)
        del out
    memory = chunk_memory(model.sizes, length, context=context, shared_slots=2, on_cuda=False, sends=False)
    if kind == "linear_attention":
        memory = replace(memory, attention=0, growth=0)
    elif kind == "full_attention":
        memory = replace(memory, delta=0)
    assert measured / 1.2 <= memory.peak <= 2 * measured, f"measured {measured:,}, predicted {memory}"


@pytest.mark.parametrize("shape", ["sparse", "dense"])
@pytest.mark.parametrize("target", ["cuda", "metal"])
def test_what_is_ahead_counts_with_all_that_its_layers_make(model, shape, target, monkeypatch):
    """A GPU frees what a layer made once it has done it, so every array counts, not only those alive at a time."""
    if shape == "dense":
        settings = config(DENSE, hidden_size=256, intermediate_size=512)
        model = Hybrid.from_module(random_module(settings), settings, mx.bfloat16)
    context, length, pairs = 1024, 2048, model.graph.layers[:2]
    caches = Filled(model.layouts, context, None).into(model.make_caches())[:2]
    monkeypatch.setattr(Hybrid, "_check", lambda *_: None)
    monkeypatch.setattr(model.graph, "layers", pairs)

    def forward(tokens):
        parts = [model(tokens, caches, Rows.single(context), logits=None, hidden=True).hidden]
        return parts + [array for cache in caches for array in cache.state if isinstance(array, mx.array)]

    with as_launches(monkeypatch, target):
        captured = record(forward, mx.zeros((1, length), mx.int32))
    made = [value for op in captured.operations if op.name not in VIEWS for value in op.outputs]
    counted = sum(value.nbytes for value in made)
    memory = chunk_memory(
        model.sizes, length, context=context, on_cuda=target == "cuda", shared_slots=2 if shape == "sparse" else 0
    )
    assert {layer.kind for layer in pairs} == set(KINDS)
    assert len(pairs) == IN_FLIGHT
    # The embedding before the layers and the norm behind them are the stream's.
    assert counted <= memory.peak <= 1.25 * counted, f"counted {counted:,}, predicted {memory}"


@contextlib.contextmanager
def as_launches(monkeypatch, target):
    """Kernels of a GPU, and what is one launch of MLX there, as operations that nobody runs."""

    def launched(_, kernel, launch):
        names = [
            [f"{side}{i}" for i in range(n)]
            for side, n in (("in", len(launch.inputs)), ("out", len(launch.output_shapes)))
        ]
        stand_in = mx.fast.metal_kernel(name=kernel.name, input_names=names[0], output_names=names[1], source="")
        return stand_in(
            inputs=launch.inputs, output_shapes=launch.output_shapes, output_dtypes=launch.output_dtypes,
            grid=(1, 1, 1), threadgroup=(1, 1, 1),
        )  # fmt: skip

    monkeypatch.setattr(targets, "run_on", launched)
    single = [(mx.fast, "rms_norm"), (mx.fast, "scaled_dot_product_attention"), (mx, "contiguous"), (mx, "dequantize")]
    for owner, name in [*single, (mlp, "_swiglu")]:
        monkeypatch.setattr(owner, name, one_launch(name, getattr(owner, name)))
    with use_target(target):
        yield


def test_the_full_shape_stays_within_two_gigabytes():
    """128K tokens of prompt in chunks of 2,048, and of 4,096: the temporary memory of the last one."""
    for length in (2048, 4096):
        assert chunk_memory(FULL, length, context=131072 - length).peak <= 2 * 10**9


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

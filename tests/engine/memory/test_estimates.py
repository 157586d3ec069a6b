"""What a request is said to need, against what is measured, and against what must not change it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from copy import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.capacity import Budget
from labkit.engine.memory import Estimates
from labkit.measure.footprint import can_measure
from labkit.models import Model, Rows
from labkit.models.hybrid import Hybrid
from labkit.models.hybrid.memory import chunk_memory
from labkit.models.hybrid.native import NativeHybrid
from tests import tiny_models
from tests.engine.memory.footprint_child import ENVIRONMENT, filled
from tests.models.hybrid.small import models
from tests.settled import settled_memory

LENGTHS = st.integers(1, 5000)


ON_A_CPU = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="about a CPU's graphs")


def estimates(model: Model, kind: str | None = None) -> Estimates:
    loaded = SimpleNamespace(model=model, config=model.config, weights_bytes=0)
    return Estimates(loaded, Budget(loaded, 1 << 34), kind=kind)


def native() -> NativeHybrid:
    both = models()
    return NativeHybrid.from_module(both.module, both.adapter.config, threads=3)


def on_a_gpu() -> Hybrid:
    """The specialised graph, as far as its sizes go, as it is there."""
    model = copy(models().hybrid)
    model._sizes = lambda: {"itemsize": 2, "shared_slots": 2, "on_cuda": True, "sends": True}
    return model


GRAPHS = {name: partial(tiny_models.adapter, name) for name in ("llama", "hybrid", "sliding", "hybrid-moe")}
GRAPHS |= {"specialised": lambda: models().hybrid, "native": native, "on a GPU": on_a_gpu}


@pytest.fixture(scope="module", params=GRAPHS)
def known(request) -> Estimates:
    if request.param == "native" and mx.default_device() != mx.cpu:
        pytest.skip("a CPU's graph")
    return estimates(GRAPHS[request.param](), "cuda" if request.param == "on a GPU" else None)


@settings(max_examples=40)
@given(a=LENGTHS, b=LENGTHS, more=st.integers(0, 3000), chunk=st.integers(1, 512))
def test_needs_are_monotone_in_every_argument(known, a, b, more, chunk):
    assert known.need(a, b, chunk=chunk) <= known.need(a + more, b, chunk=chunk)
    assert known.need(a, b, chunk=chunk) <= known.need(a, b + more, chunk=chunk)
    assert known.transient(chunk, a) <= known.transient(chunk, a + more)
    assert known.transient(chunk, a) <= known.transient(chunk + more, a)
    assert known.transient(chunk, a) <= known.transient(chunk, a, rows=1 + more % 7)


def test_trap_48_answers_cost_their_keys_and_values_and_nothing_more(known):
    caches = known.caches(30, 8192, chunk=512) - known.caches(30, 15, chunk=512)
    assert known.need(30, 8192, chunk=512) - known.need(30, 15, chunk=512) == caches


def test_trap_48_a_large_request_changes_nothing_for_the_next():
    adapter = tiny_models.adapter("hybrid")
    known = estimates(adapter)
    before = known.need(30, 15, chunk=512)
    known.need(4000, 4000, chunk=512)
    measured(adapter, 32, 128)
    assert known.need(30, 15, chunk=512) == before == estimates(adapter).need(30, 15, chunk=512)


def measured(model: Model, chunk: int, context: int, rows: int = 1) -> int:
    """MLX's bytes at the peak of one forward beyond what was there before it; every layer's output is wanted."""
    caches = filled(model, rows, context)
    where = Rows.single(context) if rows == 1 else Rows.batch([context] * rows)
    mx.eval([cache.state for cache in caches])
    mx.clear_cache()
    before = settled_memory()
    mx.reset_peak_memory()
    logits = model(mx.zeros((rows, chunk), mx.int32), caches, where).logits
    mx.eval(logits, [cache.state for cache in caches])
    return mx.get_peak_memory() - before


def said(known: Estimates, chunk: int, context: int, rows: int = 1) -> int:
    before = known.caches(context, 0, chunk=1) if context else 0
    return known.transient(chunk, context, rows=rows) + rows * (known.caches(context, chunk, chunk=chunk) - before)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("chunk", "context"), [(64, 128), (128, 128), (128, 384)])
def test_trap_49_estimates_hold_against_measured_peaks(monkeypatch, head_dim, chunk, context):
    """Never a tenth below, whatever the head's width, nor far above."""
    monkeypatch.setitem(tiny_models.CONFIGS, "wide", {**tiny_models.CONFIGS["llama"], "head_dim": head_dim})
    adapter = tiny_models.adapter("wide")
    ratio = said(estimates(adapter), chunk, context) / measured(adapter, chunk, context)
    assert 0.9 <= ratio <= 1.6


@pytest.mark.parametrize(("chunk", "context"), [(64, 0), (64, 128)])
def test_trap_49_the_states_of_recurrent_layers_count_where_the_graph_keeps_them(chunk, context):
    adapter = tiny_models.adapter("hybrid")
    ratio = said(estimates(adapter), chunk, context) / measured(adapter, chunk, context)
    assert 0.9 <= ratio <= 1.6


@ON_A_CPU
@pytest.mark.parametrize("graph", ["specialised", "adapter"])
@pytest.mark.parametrize(("rows", "chunk", "context"), [(1, 96, 0), (2, 64, 256), (4, 1, 256)])
def test_estimates_hold_for_both_graphs_of_a_hybrid_its_prompts_and_its_rows(graph, rows, chunk, context):
    model = models().hybrid if graph == "specialised" else models().adapter
    ratio = said(estimates(model), chunk, context, rows) / measured(model, chunk, context, rows)
    assert 0.9 <= ratio <= 1.75


def test_on_a_gpu_the_graph_itself_says_what_is_in_flight():
    model = on_a_gpu()
    for chunk, context in ((64, 0), (2048, 4096)):
        said = estimates(model, "cuda").transient(chunk, context)
        assert said >= chunk_memory(model.sizes, chunk, context=context, shared_slots=2).sent > 0


def footprints(*cases: tuple[str, int, list[tuple[int, int, int]]]) -> list[list]:
    """What `footprint_child` said and measured of each."""
    command = [sys.executable, "-m", "tests.engine.memory.footprint_child", json.dumps(cases)]
    root = Path(__file__).parents[3]
    run = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, cwd=root)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


TOUCHED = 1_500_000
"""Bytes of the process's own pages that it gives back before a forward is measured, and needs again for any."""
MANY = list(itertools.product((1, 3), (1, 2, 31, 32, 96, 500), (0, 256, 2048)))
PROMPTS_AND_ROWS = [(1, 64, 0), (1, 256, 512), (1, 1, 255), (1, 1, 256), (8, 1, 256), (4, 64, 256)]


@ON_A_CPU
@pytest.mark.skipif(not can_measure(), reason="a process's high-water mark cannot be reset")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([("tiny-hybrid", 2, PROMPTS_AND_ROWS), ("dense", 1, [(1, 256, 256), (4, 1, 256)])], id="some"),
        pytest.param(
            [(kind, threads, MANY) for kind in ("tiny-hybrid", "dense") for threads in (1, 2, 3)],
            marks=pytest.mark.nightly,
            id="many",
        ),
    ],
)
def test_the_native_graph_takes_of_the_process_what_it_says(cases):
    """All that is taken: arrays of MLX, of NumPy, and of the compiled loops; and `TOUCHED`."""
    for *case, said, measured in footprints(*cases):
        assert measured - TOUCHED <= said <= 2 * measured + 100_000, (case, said, measured)

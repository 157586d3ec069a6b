"""What a request is said to need, against what is measured, and against what must not change it."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.capacity import Budget
from labkit.engine.memory import Estimates
from labkit.models import Rows
from labkit.models.adapter import Adapter
from tests import tiny_models
from tests.settled import settled_memory

LENGTHS = st.integers(1, 5000)


def estimates(adapter: Adapter) -> Estimates:
    loaded = SimpleNamespace(model=adapter, config=adapter.config, weights_bytes=0)
    return Estimates(loaded, Budget(loaded, 1 << 34))


@pytest.fixture(scope="module", params=["llama", "hybrid", "sliding", "hybrid-moe"])
def known(request) -> Estimates:
    return estimates(tiny_models.adapter(request.param))


@given(a=LENGTHS, b=LENGTHS, more=st.integers(0, 3000), chunk=st.integers(1, 512))
def test_needs_are_monotone_in_every_argument(known, a, b, more, chunk):
    assert known.need(a, b, chunk=chunk) <= known.need(a + more, b, chunk=chunk)
    assert known.need(a, b, chunk=chunk) <= known.need(a, b + more, chunk=chunk)
    assert known.transient(chunk, a) <= known.transient(chunk, a + more)
    assert known.transient(chunk, a) <= known.transient(chunk + more, a)


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


def measured(adapter: Adapter, chunk: int, context: int) -> int:
    """Bytes at the peak of one forward beyond what was there before it; every layer's output is wanted."""
    caches, step = adapter.make_caches(), 128
    for start in range(0, context, step):
        adapter(mx.zeros((1, step), mx.int32), caches, Rows.single(start), logits=None)
        mx.eval([cache.state for cache in caches])
    mx.clear_cache()
    before = settled_memory()
    mx.reset_peak_memory()
    logits = adapter(mx.zeros((1, chunk), mx.int32), caches, Rows.single(context)).logits
    mx.eval(logits, [cache.state for cache in caches])
    return mx.get_peak_memory() - before


def said(known: Estimates, chunk: int, context: int) -> int:
    return (
        known.transient(chunk, context) + known.caches(context, chunk, chunk=chunk) - known.caches(context, 0, chunk=1)
    )


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

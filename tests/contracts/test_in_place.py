"""Contract 5, in place: a step moves what it changes, not what it keeps. `labkit.kernels.in_place` states the rule."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.caches import Contiguous, Rotating
from labkit.kernels import in_place

TOKENS = 4096


def filled(make, batch: int) -> Contiguous | Rotating:
    """A long cache with room for some tokens; with several rows, of a batched class and unequally long."""
    rows = [make() for _ in range(batch)]
    for shorter, row in enumerate(rows):
        row.update_and_fetch(*[mx.zeros((1, 4, TOKENS - 8 - shorter, 64))] * 2)
    cache = type(rows[0]).merge(rows) if batch > 1 else rows[0]
    for _ in range(2):
        cache.update_and_fetch(*[mx.zeros((batch, 4, 1, 64))] * 2)
        mx.eval(cache.state[:4])
    return cache


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="on a GPU the allocator's pool hides what is allocated")
@pytest.mark.parametrize("make", [Contiguous, lambda: Rotating(TOKENS)], ids=["contiguous", "rotating"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("face", ["update_and_fetch", "append"])
def test_a_decode_step_copies_no_buffer(make, batch, face):
    cache = filled(make, batch)
    token = mx.ones((batch, 4, 1, 64))
    mx.eval(token)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    getattr(cache, face)(token, token)
    mx.eval(cache.state[:4])
    assert mx.get_peak_memory() - before < cache.nbytes / 20


def test_the_rule_is_written_where_kernels_read_it():
    assert in_place.Segments
    assert "in-place rule" in in_place.__doc__

"""Contract 5, in place: a step moves what it changes, not what it keeps. `labkit.kernels.in_place` states the rule."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.caches import Contiguous, Paged, Pages, Rotating
from labkit.caches.layout import keys_and_values
from labkit.caches.tail import TAIL

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


def test_beside_a_tail_a_step_leaves_the_buffers_alone():
    """Where no kernel writes in place: the buffers are made anew once in a tail's tokens, however long they are."""
    layout, start, steps = keys_and_values("contiguous", *[mx.zeros((1, 2, 1, 8))] * 2), 1000, 2 * TAIL + 5
    cache = Contiguous(layout)
    cache.append(*[mx.zeros((1, 2, start, 8))] * 2)
    cache.reserve(start + steps)
    buffers = set()
    for step in range(steps):
        keys, _, tail = cache.open_tail(1)
        buffers.add((id(keys), tail.settled))
        column = mx.arange(TAIL)[:, None] == cache.size() - tail.settled
        cache.take_tail(*(mx.where(column, step, part) for part in (tail.keys, tail.values)), 1)
    assert {settled for _, settled in buffers} == {start, start + TAIL, start + 2 * TAIL}
    assert len(buffers) == 3
    assert cache.keys_and_values()[0][0, 0, start:, 0].tolist() == list(range(steps))


def test_pages_are_written_once_in_a_tail(monkeypatch):
    pages, writes = Pages(100, 16, tail_tokens=64), []
    write = Pages.write
    monkeypatch.setattr(Pages, "write", lambda self, *what: (writes.append(len(what[0])), write(self, *what)))
    row = Paged(pages)
    for _ in range(640):
        row.append(*[mx.zeros((1, 2, 1, 8))] * 2)
    assert writes == [4] * 9  # the tenth tail is full, and moves when the next token comes

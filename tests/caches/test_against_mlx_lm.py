"""mlx-lm's own classes as a live oracle: same calls, same masks, same columns, same state, bit for bit.

Left out are the cells where mlx-lm is undefined: rows filtered before the first token, right-padded input whose last
chunk is one token on a ring, blocks on a ring that has turned while a short row still has padding.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as oracle

from labkit.caches import BatchedContiguous, BatchedRecurrent, BatchedRotating, Contiguous, Recurrent, Rotating

WINDOW = 6
H, D, DV = 2, 4, 3


def random_tokens(batch: int, length: int, seed: int) -> tuple[mx.array, mx.array]:
    key = mx.random.key(seed)
    return (
        mx.random.normal((batch, H, length, D), key=key),
        mx.random.normal((batch, H, length, DV), key=mx.random.split(key)[0]),
    )


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, mx.array):
        return isinstance(ours, mx.array) and ours.shape == theirs.shape and mx.array_equal(ours, theirs).item()
    return type(ours) is type(theirs) and ours == theirs


PLAIN = {"return_array": False, "window_size": None}


def advance_both(ours: Any, theirs: Any, batch: int, length: int, seed: int) -> None:
    assert same(ours.make_mask(length, **PLAIN), theirs.make_mask(length, **PLAIN))
    keys, values = random_tokens(batch, length, seed)
    for mine, other in zip(ours.update_and_fetch(keys, values), theirs.update_and_fetch(keys, values), strict=True):
        assert same(mine, other)
    assert same_columns(ours, theirs)


def same_columns(ours: Any, theirs: Any) -> bool:
    """Equal states; of buffers, the columns in use (free room may differ)."""
    used = ours._idx if hasattr(ours, "_idx") else ours.offset
    for mine, other in zip(ours.state, theirs.state, strict=True):
        if isinstance(other, mx.array) and other.ndim == 4:
            if getattr(ours, "rotated", False):
                used = max(mine.shape[2], other.shape[2])
            mine, other = mine[:, :, :used], other[:, :, :used]
        if not same(mine, other):
            return False
    return True


SERIAL = {
    "contiguous": (Contiguous, oracle.KVCache),
    "rotating": (lambda: Rotating(WINDOW), lambda: oracle.RotatingKVCache(WINDOW)),
    "rotating, first tokens kept": (lambda: Rotating(WINDOW, 2), lambda: oracle.RotatingKVCache(WINDOW, keep=2)),
}


@pytest.mark.parametrize("kind", SERIAL)
@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.one_of(st.just(1), st.integers(1, 9)), min_size=1, max_size=12))
def test_serial_classes(kind, lengths):
    ours, theirs = (make() for make in SERIAL[kind])
    for seed, length in enumerate(lengths):
        advance_both(ours, theirs, 1, length, seed)
        for window in (3, WINDOW):
            for n, as_array in ((1, False), (3, False), (3, True)):
                options = {"window_size": window, "return_array": as_array}
                assert same(ours.make_mask(n, **options), theirs.make_mask(n, **options))
        assert ours.size() == theirs.size()
        assert ours.is_trimmable() == theirs.is_trimmable()
        assert ours.empty() == theirs.empty()


@pytest.mark.parametrize("kind", SERIAL)
def test_state_moves_to_mlx_lm_and_back(kind):
    ours, theirs = (make() for make in SERIAL[kind])
    for seed, length in enumerate([5, 1, 4, 1]):
        advance_both(ours, theirs, 1, length, seed)
    theirs = type(theirs).from_state(ours.state)
    ours = type(ours).from_state(tuple(mx.array(x) if isinstance(x, mx.array) else x for x in theirs.state))
    advance_both(ours, theirs, 1, 1, 99)


BATCHED = {
    "contiguous": (Contiguous, BatchedContiguous, oracle.KVCache, oracle.BatchKVCache),
    "rotating": (
        lambda: Rotating(WINDOW),
        BatchedRotating,
        lambda: oracle.RotatingKVCache(WINDOW),
        oracle.BatchRotatingKVCache,
    ),
}


def prefilled(make: Any, length: int, seed: int) -> Any:
    cache = make()
    cache.update_and_fetch(*random_tokens(1, length, seed))
    return cache


@pytest.mark.parametrize("kind", BATCHED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_batched_classes(kind, data):
    make, mine, make_theirs, other = BATCHED[kind]
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    ours = mine.from_rows([prefilled(make, n, 100 + i) for i, n in enumerate(lengths)])
    theirs = other.merge([prefilled(make_theirs, n, 100 + i) for i, n in enumerate(lengths)])
    assert same_columns(ours, theirs)
    batch = len(lengths)
    operations = data.draw(
        st.lists(st.sampled_from(["step", "step", "block", "padded", "filter", "extend"]), max_size=10)
    )
    for seed, operation in enumerate(operations):
        if operation == "step":
            advance_both(ours, theirs, batch, 1, seed)
        elif operation == "block" and not getattr(ours, "rotated", False):
            advance_both(ours, theirs, batch, data.draw(st.integers(2, 9)), seed)
        elif operation == "padded" and not getattr(ours, "rotated", False):
            counts = data.draw(st.lists(st.integers(1, 6), min_size=batch, max_size=batch))
            width = max(2, *counts)
            for cache in (ours, theirs):
                cache.prepare(lengths=counts, right_padding=[width - n for n in counts])
            advance_both(ours, theirs, batch, width, seed)
            for cache in (ours, theirs):
                cache.finalize()
        elif operation == "filter":
            keep = data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=3, unique=True))
            ours.filter(keep)
            theirs.filter(keep)
            batch = len(keep)
        elif operation == "extend" and batch < 6:
            length = data.draw(st.integers(1, 12))
            ours.extend(prefilled(make, length, 200 + seed))
            theirs.extend(other.merge([prefilled(make_theirs, length, 200 + seed)]))
            batch += 1
        assert same_columns(ours, theirs), operation
    for row in range(batch):
        assert same_columns(ours.extract(row), theirs.extract(row))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_recurrent(data):
    def row(make: Any, i: int) -> Any:
        cache = make(2)
        cache[0] = mx.full((1, 3, 4), float(i + 1))
        cache[1] = mx.full((1, 2, 4), -float(i + 1))
        return cache

    count = data.draw(st.integers(1, 4))
    ours = BatchedRecurrent.from_rows([row(Recurrent, i) for i in range(count)])
    theirs = oracle.ArraysCache.merge([row(oracle.ArraysCache, i) for i in range(count)])
    for n in data.draw(st.lists(st.integers(1, 5), max_size=4)):
        lengths = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
        for cache in (ours, theirs):
            cache.prepare(lengths=lengths)
        assert same(ours.make_mask(n), theirs.make_mask(n))
        for cache in (ours, theirs):
            cache.advance(n)
        assert same(ours.lengths, theirs.lengths)
        assert same(ours.make_mask(2), theirs.make_mask(2))
        for cache in (ours, theirs):
            cache.finalize()
    ours.extend(row(Recurrent, 9))
    theirs.extend(row(oracle.ArraysCache, 9))
    keep = data.draw(st.lists(st.integers(0, count), min_size=1, max_size=count, unique=True))
    ours.filter(keep)
    theirs.filter(keep)
    for i in (0, 1):
        assert same(ours[i], theirs[i])
        assert same(ours.extract(0)[i], theirs.extract(0)[i])

"""Rows that come and go, snapshots, sizes: what holds for every kind of cache."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_cache

from labkit.caches import (
    OPERATIONS,
    BatchedContiguous,
    BatchedRecurrent,
    BatchedRotating,
    Contiguous,
    Foreign,
    Recurrent,
    Rotating,
    Unsupported,
    commit,
    lacking,
)
from tests.settled import falls_to

WINDOW = 8
MAKERS = {"contiguous": Contiguous, "rotating": lambda: Rotating(WINDOW), "recurrent": Recurrent}
BATCHED = {"contiguous": BatchedContiguous, "rotating": BatchedRotating, "recurrent": BatchedRecurrent}


def fill(cache, length: int, seed: int, chunk: int = 64):
    """`length` random tokens through the cache."""
    if isinstance(cache, Recurrent):
        cache[0] = mx.random.normal((1, 3, 5), key=mx.random.key(seed))
        cache[1] = mx.random.normal((1, 2, 4, 4), key=mx.random.key(seed + 1))
        cache.advance(length)
        return cache
    tokens = mx.random.normal((1, 2, length, 4), key=mx.random.key(seed)).astype(mx.bfloat16)
    for start in range(0, length, chunk):
        part = tokens[:, :, start : start + chunk]
        cache.update_and_fetch(part, part * 2)
    return cache


def content(cache) -> dict[str, np.ndarray]:
    arrays, scalars = cache._pack()
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()} | {
        name: np.array(value) for name, value in scalars.items()
    }


def assert_same(a, b) -> None:
    first, second = content(a), content(b)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4), chunk=st.sampled_from([1, 3, 64]))
def test_merge_then_extract_is_the_identity(kind, lengths, chunk):
    rows = [fill(MAKERS[kind](), n, 10 * i, chunk) for i, n in enumerate(lengths)]
    merged = type(rows[0]).merge(rows)
    assert isinstance(merged, BATCHED[kind])
    assert merged.batch_size == len(lengths)
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        back = merged.extract(i)
        if kind == "rotating":  # a block leaves more columns than the window; merging keeps the window
            assert back.offset == length
            kept = min(length, WINDOW)
            assert mx.array_equal(back.temporal(back.keys), row.temporal(row.keys)[..., -kept:, :])
        else:
            assert_same(back, row)


@pytest.mark.parametrize("kind", MAKERS)
def test_an_extracted_row_keeps_no_other_row_alive(kind):
    make = MAKERS[kind]
    batch = type(make()).merge([fill(make(), 6, i) for i in range(2)])
    wide = [mx.zeros((64, 2, 4096, 4)) for _ in range(2)]
    if kind == "recurrent":
        batch.cache = wide
    else:
        batch.keys, batch.values = wide
        batch.offset = batch._idx + mx.zeros((64,), mx.int32)
        batch.left_padding = mx.zeros((64,), mx.int32)
        batch._idx = batch._offset = 4096
        batch.offset = mx.full((64,), 4096)
        batch.max_size = 4096
    mx.eval(batch.state)
    del wide
    gc.collect()
    full = mx.get_active_memory()
    single = batch.extract(3)
    mx.eval([x for x in single.state if isinstance(x, mx.array)], getattr(single, "cache", []))
    del batch
    gc.collect()
    assert falls_to(full - 60 * single.nbytes)


@pytest.mark.parametrize(
    "make",
    [Contiguous, lambda: BatchedContiguous([0]), lambda: Rotating(512), lambda: BatchedRotating(512, [0])],
    ids=["contiguous", "batched contiguous", "rotating", "batched rotating"],
)
@pytest.mark.parametrize("length", [200, 256])  # a part of a buffer, and all of one
def test_a_cache_keeps_no_wider_array_alive_of_which_it_was_given_parts(make, length):
    """Queries, keys and values of one product lie beside each other: 18 heads, of which two are for the cache."""
    gc.collect()
    mx.synchronize()
    before = mx.get_active_memory()
    joined = mx.random.normal((1, length, 18, 64), key=mx.random.key(1)).transpose(0, 2, 1, 3)
    wanted = [np.array(joined[:, head : head + 1]) for head in (16, 17)]
    cache = make()
    cache.update_and_fetch(joined[:, 16:17], joined[:, 17:])
    mx.eval(cache.state)
    del joined
    gc.collect()
    assert falls_to(before + cache.nbytes + 20_000)
    for buffer, array in zip((cache.keys, cache.values), wanted, strict=True):
        np.testing.assert_array_equal(buffer[..., :length, :], array)


def test_fresh_rows_that_join_a_warm_recurrent_batch_get_no_neighbours_state():
    warm = BatchedRecurrent.from_rows([fill(Recurrent(), 3, 7)])
    sentinel = warm[1]
    warm.extend(BatchedRecurrent(2, batch=2))
    assert warm.batch_size == 3
    assert all(state.shape[0] == 3 for state in warm.cache)
    assert mx.array_equal(warm[1][:1], sentinel)
    warm.filter([2])
    assert warm.batch_size == 1
    assert all((state == 0).all() for state in warm.cache)
    with pytest.raises(IndexError, match="batch of 1"):
        warm.filter([1])


def test_warm_rows_that_join_a_fresh_recurrent_batch():
    fresh = BatchedRecurrent(2, batch=2)
    row = fill(Recurrent(), 3, 7)
    fresh.extend(row)
    assert [state.shape[0] for state in fresh.cache] == [3, 3]
    assert_same(fresh.extract(2), row)
    assert not fresh[1][:2].any()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("batched", [False, True])
def test_snapshot_and_restore(kind, batched):
    cache = fill(MAKERS[kind](), 11, 3, chunk=1)
    if batched:
        cache = type(cache).merge([cache, fill(MAKERS[kind](), 4, 5)])
    data = cache.snapshot()
    assert isinstance(data, bytes)
    restored = type(cache).restore(data, cache.layout)
    assert_same(cache, restored)
    assert restored.layout == cache.layout
    assert restored.batch_size == cache.batch_size
    for damaged in (data[:-3], b"", data[:40], b"\0" * len(data)):
        with pytest.raises(ValueError, match="snapshot"):
            type(cache).restore(damaged)
    other = {"contiguous": Recurrent, "rotating": Contiguous, "recurrent": Contiguous}[kind]
    with pytest.raises(ValueError, match="is of a"):
        other.restore(data)


def test_a_snapshot_of_another_layout_is_refused():
    data = fill(Contiguous(), 5, 1).snapshot()
    other = Contiguous()
    other.update_and_fetch(*[mx.zeros((1, 2, 1, 4), mx.float16)] * 2)
    with pytest.raises(ValueError, match="layout"):
        Contiguous.restore(data, other.layout)
    assert Rotating(8, layout=None).layout is None
    assert fill(Rotating(8), 3, 1).layout.fingerprint != fill(Rotating(9), 3, 1).layout.fingerprint


def test_trimmed_tokens_never_leave_with_a_snapshot_or_an_extracted_row():
    cache = Contiguous()
    tokens = mx.arange(10, dtype=mx.float32).reshape(1, 1, 10, 1)
    cache.update_and_fetch(tokens, tokens)
    cache.trim(4)
    arrays, _ = cache._pack()
    assert arrays["keys"].shape[2] == 6
    assert b"\x00\x00\x10\x41" not in cache.snapshot(), "9.0, of a trimmed token"
    batch = Contiguous.merge([cache, cache])
    assert batch.extract(0).keys.max().item() == 5
    assert cache.keys_and_values()[0].max().item() == 5


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 700), chunk=st.sampled_from([1, 5, 300]))
def test_bytes_for_is_what_it_takes(kind, tokens, chunk):
    cache = fill(MAKERS[kind](), tokens, 0, chunk if kind != "contiguous" or chunk > 1 else 64)
    said = cache.bytes_for(tokens, chunk=chunk)
    assert cache.nbytes <= said
    if kind != "rotating":
        assert cache.nbytes == said
    assert said <= cache.bytes_for(tokens + 1, chunk=chunk)
    assert said <= cache.bytes_for(tokens, chunk=chunk + 1)
    batch = type(cache).merge([cache, cache])
    assert batch.bytes_for(tokens, chunk=chunk) == 2 * said


def test_the_size_of_an_unknown_layout_is_no_guess():
    with pytest.raises(ValueError, match="layout"):
        Contiguous().bytes_for(3)


def test_recurrent_spans():
    cache = BatchedRecurrent.from_rows([fill(Recurrent(), 1, i) for i in (0, 10)])
    before = list(cache.cache)
    cache.checkpoint()
    after = [[state + i for i in (1, 2, 3)] for state in before]
    for i in range(2):
        cache[i] = after[i][-1]
        cache.record(i, mx.stack(after[i], axis=1))
    cache.advance(3)
    cache.commit([0, 2])
    for i in range(2):
        assert mx.array_equal(cache[i][0], before[i][0])
        assert mx.array_equal(cache[i][1], after[i][1][1])
    cache.checkpoint()
    cache[0] = cache[0] * 2
    cache.advance(2)
    with pytest.raises(Unsupported, match="recorded no states"):
        cache.commit([1, 2])
    cache.rollback()
    assert mx.array_equal(cache[0][0], before[0][0])


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("refuses", ["recurrent", "foreign", "without a checkpoint"])
def test_layers_commit_together_or_not_at_all(refuses, place):
    """Whichever layer refuses, first or last: the others hold what they held, and may be rolled back."""
    good = fill(Contiguous(), 5, 1)
    if refuses == "recurrent":
        bad = fill(Recurrent(), 5, 1)
    else:
        bad = Foreign(mlx_cache.KVCache()) if refuses == "foreign" else fill(Rotating(WINDOW), 5, 1)
    caches = [good, bad] if place else [bad, good]
    for cache in caches:
        if cache is good or refuses != "without a checkpoint":
            cache.checkpoint()
    fill(good, 4, 2)
    fill(bad if refuses != "foreign" else bad.inner, 4, 2)
    before = content(good)
    with pytest.raises((Unsupported, ValueError)):
        commit(caches, 2)
    after = content(good)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    good.rollback()
    assert good.offset == 5


@pytest.mark.parametrize("kind", MAKERS)
def test_rollback_restores_every_bit(kind):
    cache = fill(MAKERS[kind](), 13, 1, chunk=1)
    before = content(cache)
    cache.checkpoint()
    fill(cache, 1, 5)
    fill(cache, 4, 6)
    cache.rollback()
    after = content(cache)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    with pytest.raises(ValueError, match="checkpoint"):
        cache.commit(1)


@pytest.mark.parametrize(
    "make", [*MAKERS.values(), *(lambda c=c: c.merge([c(), c()]) for c in (Contiguous, Recurrent))]
)
def test_what_a_kind_does_not_support_it_refuses(make):
    cache = make()
    calls = {
        "trim": lambda: cache.trim(1),
        "merge": lambda: type(cache).merge([cache]),
        "extend": lambda: cache.extend(cache),
        "filter": lambda: cache.filter([0]),
        "extract": lambda: cache.extract(0),
        "append": lambda: cache.append(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1))),
    }
    for operation in OPERATIONS - cache.supports:
        with pytest.raises(Unsupported, match=cache.kind):
            calls[operation]()


def test_what_is_lacking_is_told_by_operation_and_kind():
    serial = [Contiguous(), Recurrent()]
    batched = [type(cache).merge([cache, cache]) for cache in serial]
    assert lacking(serial, batched) == {"append": ("recurrent",), "trim": ("recurrent",)}


def test_a_cache_of_mlx_lm_that_has_no_class_here():
    from mlx_lm.models.cache import ChunkedKVCache

    cache = Foreign(ChunkedKVCache(4))
    cache.inner.update_and_fetch(mx.zeros((1, 1, 3, 2)), mx.zeros((1, 1, 3, 2)))
    assert "merge" not in cache.supports
    assert "trim" in cache.supports
    assert cache.trim(1) == 1
    for refused in (lambda: Foreign.merge([cache]), cache.snapshot, lambda: cache.extract(0)):
        with pytest.raises(Unsupported, match="ChunkedKVCache"):
            refused()
    cache.checkpoint()
    cache.inner.update_and_fetch(mx.zeros((1, 1, 2, 2)), mx.zeros((1, 1, 2, 2)))
    cache.rollback()
    assert cache.inner.offset == 2


def test_rows_whose_queries_see_nothing_stay_finite_and_leave_others_alone():
    keys = mx.random.normal((2, 2, 5, 8), key=mx.random.key(0))
    queries = mx.random.normal((2, 2, 3, 8), key=mx.random.key(1))
    mask = mx.ones((2, 1, 3, 5), mx.bool_)
    full = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.3, mask=mask)
    mask[0] = False
    part = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.3, mask=mask)
    assert mx.isfinite(part).all()
    assert mx.array_equal(part[1], full[1])

"""What no cache may answer with memory that is not its own: rows that are not there, trims by less than nothing."""

from __future__ import annotations

import contextlib
import random

import mlx.core as mx
import pytest

from labkit.caches import Contiguous, Rotating
from tests.caches.test_rows_and_bytes import MAKERS, content, fill


def batch_of(kind: str, *lengths: int):
    rows = [fill(MAKERS[kind](), n, 10 * i) for i, n in enumerate(lengths)]
    return type(rows[0]).merge(rows)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("rows", [[2], [-1], [0, 99], [10**6]])
def test_rows_that_are_not_there(kind, rows):
    batch = batch_of(kind, 4, 6)
    before = content(batch)
    with pytest.raises(IndexError, match="batch of 2"):
        batch.filter(rows)
    with pytest.raises(IndexError, match="batch of 2"):
        batch.extract(rows[-1])
    assert all((content(batch)[name] == value).all() for name, value in before.items())


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("rows", [[True, False], mx.array([False, True]), [0.5], ["1"], [None]], ids=str)
def test_rows_are_named_by_numbers(kind, rows):
    """A mask of truth values would keep rows 1 and 0."""
    batch = batch_of(kind, 4, 6)
    before = content(batch)
    with pytest.raises(ValueError, match="by their numbers"):
        batch.filter(rows)
    assert all((content(batch)[name] == value).all() for name, value in before.items())


@pytest.mark.parametrize("kind", MAKERS)
def test_a_row_may_be_kept_twice_and_a_batch_join_itself(kind):
    batch = batch_of(kind, 4, 6)
    batch.filter([1, 1])
    batch.extend(batch)
    wanted = content(fill(MAKERS[kind](), 6, 10))
    for row in range(4):
        found = content(batch.extract(row))
        assert all((found[name] == value).all() for name, value in wanted.items())


@pytest.mark.parametrize("make", [Contiguous, lambda: Rotating(8)])
@pytest.mark.parametrize("batched", [False, True])
def test_trims_by_more_than_is_there_and_by_less_than_nothing(make, batched):
    cache = fill(make(), 5, 1)
    cache = type(cache).merge([cache, cache]) if batched else cache
    for wrong in (-3, 1.5, "1", None):
        with pytest.raises(ValueError, match=f"{wrong!r} tokens"):
            cache.trim(wrong)
    assert cache.trim(99) == 5
    assert cache.trim(1) == 0


@pytest.mark.parametrize("sizes", [(0,), (-1,), (2.5,), (None,), ("8",), (8, 8), (8, -1)])
def test_rings_that_hold_nothing(sizes):
    with pytest.raises(ValueError, match="a ring holds at least one"):
        Rotating(*sizes)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_snapshot_with_a_damaged_header_restores_the_same_or_not_at_all(kind):
    cache = fill(MAKERS[kind](), 5, 0)
    data, wanted = cache.snapshot(), content(cache)
    header = int.from_bytes(data[:8], "little") + 8
    rng = random.Random(kind)
    for _ in range(150):
        at = rng.randrange(header)
        flipped = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        with contextlib.suppress(ValueError):
            found = content(type(cache).restore(flipped))
            assert all((found[name] == value).all() for name, value in wanted.items()), at
    for length in (0, 1, 7, 8, header - 1, header, len(data) - 1):
        with pytest.raises(ValueError, match="bytes are no"):
            type(cache).restore(data[:length])

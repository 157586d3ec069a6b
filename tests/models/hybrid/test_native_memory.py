"""Caches that compiled loops write in place, and the addresses that they are told."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from labkit.models import Rows
from labkit.models.hybrid.native.records import address
from tests.models.hybrid.native_model import native, same_content
from tests.models.hybrid.small import prompt

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="loops for machines whose device is the CPU")


def memory_of(caches: list) -> list[int]:
    return [view.__array_interface__["data"][0] for cache in caches for view in cache._host.arrays]


def test_a_step_writes_its_tokens_into_the_same_memory():
    model = native()
    caches = model.make_caches()
    model(prompt(40, 1), caches, Rows.single(), logits=None)
    before, size = memory_of(caches), sum(cache.nbytes for cache in caches)
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    for position in range(40, 60):
        model(prompt(1, position), caches, Rows.single(position), logits=None)
    assert memory_of(caches) == before
    assert sum(cache.nbytes for cache in caches) == size == sum(c.bytes_for(60) for c in caches)
    assert mx.get_peak_memory() - active < size / 20


def test_what_a_reader_holds_never_changes():
    model = native()
    caches = model.make_caches()
    model(prompt(40, 1), caches, Rows.single(), logits=None)
    twins = [cache.copy() for cache in caches]
    lazy = [cache.keys[..., :40, :] + 0 if cache.kind == "contiguous" else cache[1] + 0 for cache in caches]
    kept = [cache.state for cache in caches]
    wanted = [np.array(cache.keys[..., :40, :] if cache.kind == "contiguous" else cache[1]) for cache in caches]
    for cache in caches:
        if cache.kind == "contiguous":
            cache.trim(10)
    for position in range(30, 45):
        model(prompt(1, position), caches, Rows.single(position), logits=None)
    for i, cache in enumerate(caches):
        held = kept[i][0][..., :40, :] if cache.kind == "contiguous" else kept[i][0][1]
        np.testing.assert_array_equal(held, wanted[i])
        np.testing.assert_array_equal(lazy[i], wanted[i])
    fresh = model.make_caches()
    model(prompt(40, 1), fresh, Rows.single(), logits=None)
    assert same_content(twins, fresh)


def test_reading_a_recurrent_state_costs_one_copy_and_a_column_none():
    model = native()
    caches = model.make_caches()
    model(prompt(40, 1), caches, Rows.single(), logits=None)
    before = memory_of(caches)
    mx.eval([cache.state for cache in caches])
    model(prompt(1, 2), caches, Rows.single(40), logits=None)
    moved = [a != b for a, b in zip(before, memory_of(caches), strict=True)]
    kinds = [cache.kind for cache in caches for _ in range(2)]
    assert moved == [kind == "recurrent" for kind in kinds]


def test_every_way_to_an_address_gives_the_same():
    written, empty = np.arange(6, dtype=np.float32), np.empty(0, np.int64)
    read_only = written[:]
    read_only.flags.writeable = False
    for array in (written, written[2:], read_only, empty, np.zeros(1, np.dtype([("x", "i8")]))):
        assert address(array) == array.ctypes.data


@pytest.mark.parametrize("array", [np.zeros(4), np.zeros(4, np.int32), np.zeros((4, 4), np.float32).T])
def test_only_what_native_code_reads_has_an_address(array):
    with pytest.raises(AssertionError, match="native code"):
        address(array)

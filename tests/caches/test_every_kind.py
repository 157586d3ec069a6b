"""What every class of cache keeps to, plain or paged, one row or several: spans, copies, stored bytes, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from labkit.caches import (
    BatchedContiguous,
    BatchedRecurrent,
    BatchedRotating,
    BlockPool,
    Cache,
    Contiguous,
    Paged,
    PagedWindow,
    Pages,
    Recurrent,
    Rotating,
    Unsupported,
)
from labkit.caches.layout import keys_and_values
from labkit.caches.paged_reads import int32s
from labkit.caches.recurrent_slots import SlottedRecurrent

WINDOW = 8
BATCHED = {Contiguous: BatchedContiguous, Rotating: BatchedRotating, Recurrent: BatchedRecurrent}


class Kind(NamedTuple):
    """`make` a cache, `plain`: the class that its bytes are of."""

    make: Callable[[], Cache]
    plain: type[Cache]


def kinds() -> dict[str, Kind]:
    """Every serial class, those of a pool all in one."""
    pages, windows, slots = Pages(200, 4), Pages(200, 4), BlockPool(200, 1)
    return {
        "contiguous": Kind(Contiguous, Contiguous),
        "rotating": Kind(lambda: Rotating(WINDOW), Rotating),
        "recurrent": Kind(Recurrent, Recurrent),
        "paged": Kind(lambda: Paged(pages), Contiguous),
        "paged window": Kind(lambda: PagedWindow(windows, WINDOW), Rotating),
        "slotted": Kind(lambda: SlottedRecurrent(slots), Recurrent),
    }


def write(cache: Cache, length: int, seed: int) -> Cache:
    """`length` random tokens a row through the cache, whose layer records its states."""
    batch = cache.batch_size
    if cache.kind == "recurrent":
        states = mx.random.normal((batch, length, 3), key=mx.random.key(seed))
        for index in range(2):
            cache.record(index, states + index)
            cache[index] = states[:, -1] + index
        cache.advance(length)
        return cache
    tokens = mx.random.normal((batch, 2, length, 4), key=mx.random.key(seed))
    cache.update_and_fetch(tokens, tokens * 2)
    return cache


def content(cache: Cache) -> dict[str, np.ndarray]:
    """What a cache holds, as it is stored."""
    arrays, scalars = cache.dump()
    return {name: np.array(value) for name, value in (arrays | scalars).items()}


def assert_same(a: Cache, b: Cache) -> None:
    first, second = content(a), content(b)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.fixture(params=kinds())
def kind(request) -> Kind:
    return kinds()[request.param]


@pytest.fixture
def batch(kind) -> Cache:
    """Three rows of several lengths."""
    rows = [write(kind.make(), length, length) for length in (6, 4, 11)]
    return type(rows[0]).merge(rows)


@pytest.fixture(params=["serial", "batched"])
def warm(request, kind) -> Cache:
    """A cache that holds some tokens."""
    return write(kind.make(), 5, 0) if request.param == "serial" else request.getfixturevalue("batch")


def test_no_span_takes_out_what_came_before_it(warm):
    before = content(warm)
    warm.checkpoint()
    write(warm, 2, 7)
    with pytest.raises(ValueError, match="cannot keep -1 tokens"):
        warm.commit(-1)
    warm.rollback()
    for name, value in content(warm).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_rows_neither_come_nor_go_within_a_span(batch):
    other = batch.extract(1)
    batch.checkpoint()
    write(batch, 2, 7)
    within = content(batch)
    for change in (lambda: batch.filter([0]), lambda: batch.extend(other)):
        with pytest.raises(ValueError, match="after a checkpoint: commit or roll back first"):
            change()
    assert all((content(batch)[name] == value).all() for name, value in within.items())
    batch.commit(1)
    batch.filter([2, 0])
    batch.extend(other)
    assert batch.batch_size == 3


COLUMNS = [name for name in kinds() if name not in ("recurrent", "slotted")]


def _wrong(batch: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of keys and values that continue no cache of `batch` rows of 2 heads of 4."""
    right = (batch, 2, 3, 4)
    return {
        "rows": ((batch + 1, 2, 3, 4),) * 2,
        "heads": ((batch, 1, 3, 4),) * 2,
        "width": ((batch, 2, 3, 1),) * 2,
        "values of another width": (right, (batch, 2, 3, 5)),
        "values of fewer tokens": (right, (batch, 2, 1, 4)),
        "keys of fewer tokens": ((batch, 2, 1, 4), right),
        "values of one row": (right, (batch + 2, 2, 3, 4)),
        "no head axis": ((batch, 3, 4),) * 2,
    }


@pytest.mark.parametrize("what", _wrong(1))
@pytest.mark.parametrize("face", ["update_and_fetch", "append"])
@pytest.mark.parametrize("kind", [kinds()[name] for name in COLUMNS], ids=COLUMNS, indirect=False)
def test_a_refused_update_changes_nothing(request, kind, face, what):
    """Bytes, offset, mask and span are what they were, and what comes next is right: MLX would spread one head over
    two, or raise when the offset had moved."""
    rows = [write(kind.make(), length, length) for length in (6, 4, 11)]
    for cache in (write(kind.make(), 5, 0), type(rows[0]).merge(rows)):
        twin = cache.copy()
        for each in (cache, twin):
            each.checkpoint()
            write(each, 2, 3)
        before = content(cache)
        offset, size, nbytes = str(cache.offset), cache.size(), cache.nbytes
        keys, values = (mx.ones(shape) for shape in _wrong(cache.batch_size)[what])
        with pytest.raises(ValueError, match=r"go on in a .* cache of \d rows of keys \[2, 4\].*nothing was written"):
            getattr(cache, face)(keys, values)
        assert (str(cache.offset), cache.size(), cache.nbytes) == (offset, size, nbytes)
        assert all((content(cache)[name] == value).all() for name, value in before.items())
        for n in (1, 3):
            masks = [each.make_mask(n, return_array=True) for each in (cache, twin)]
            assert masks[0] is masks[1] or mx.array_equal(*masks)
        for each in (cache, twin):
            write(each, 1, 4)
            each.commit(3)
        assert_same(cache, twin)


@pytest.mark.parametrize("kind", [kinds()[name] for name in COLUMNS], ids=COLUMNS, indirect=False)
def test_a_refused_first_update_leaves_an_empty_cache(kind):
    cache = kind.make()
    layout = cache.layout
    for shapes in (((1, 2, 3, 4), (1, 2, 2, 4)), ((2, 4), (2, 4)), ((1, 2, 3, 4), (2, 2, 3, 4))):
        with pytest.raises(ValueError, match="nothing was written"):
            cache.update_and_fetch(*(mx.ones(shape) for shape in shapes))
        assert cache.empty()
        assert (cache.size(), cache.layout) == (0, layout)
    assert_same(write(cache, 3, 1), write(kind.make(), 3, 1))


def test_a_copy_holds_the_same_and_neither_sees_the_others_tokens(warm):
    before, twin = content(warm), warm.copy()
    assert (twin.batch_size, twin.layout) == (warm.batch_size, warm.layout)
    write(twin, 3, 8)
    assert all((content(warm)[name] == value).all() for name, value in before.items())
    alone = warm.copy()
    write(warm, 1, 9)
    assert all((content(alone)[name] == value).all() for name, value in before.items())


def test_a_copy_of_fresh_rows_has_as_many():
    fresh = BatchedRecurrent(2, batch=3)
    assert fresh.copy().batch_size == 3


def test_stored_bytes_are_the_plain_classes_and_go_on_with_the_same_bits(kind, warm):
    data, plain = warm.snapshot(), BATCHED[kind.plain] if warm.batched else kind.plain
    both = plain.restore(data), type(warm).restore(data)
    for seed in range(3):
        for cache in both:
            write(cache, 1, seed)
        assert_same(*both)


def test_a_fresh_cache_that_is_restored_knows_the_layout_it_is_for():
    layout = write(Contiguous(), 1, 0).layout
    assert Contiguous.restore(Contiguous().snapshot(), layout).bytes_for(3) > 0


def test_a_span_of_several_forwards_keeps_the_states_after_any_of_its_tokens():
    cache = write(Recurrent(), 1, 0)
    for kept in range(6):
        tried, states = cache.copy(), []
        tried.checkpoint()
        for seed, length in ((1, 2), (2, 3)):
            write(tried, length, seed)
            states.append(mx.random.normal((1, length, 3), key=mx.random.key(seed)))
        tried.commit(kept)
        wanted = mx.concatenate(states, axis=1)[:, kept - 1] if kept else cache[0]
        assert mx.array_equal(tried[0], wanted)


def test_padding_within_a_span_is_no_token_that_could_be_kept():
    rows = [write(Recurrent(), 1, i) for i in range(2)]
    for kept in ([0, 0], [2, 1], [3, 4], [9, 9]):
        batch = Recurrent.merge(rows)
        before = batch[0]
        batch.checkpoint()
        batch.prepare(lengths=[2, 4], right_padding=[2, 0])
        write(batch, 4, 5)
        batch.finalize()
        write(batch, 1, 6)
        batch.commit(kept)
        first, second = (mx.random.normal((2, n, 3), key=mx.random.key(seed)) for n, seed in ((4, 5), (1, 6)))
        tokens = [mx.concatenate([first[0, :2], second[0]]), mx.concatenate([first[1], second[1]])]
        for row, n in enumerate(kept):
            wanted = tokens[row][min(n, len(tokens[row])) - 1] if n else before[row]
            assert mx.array_equal(batch[0][row], wanted), (row, n)


def test_rows_are_merged_by_one_copy():
    """Not one by one, each copying all that came before it."""
    rows = [Recurrent() for _ in range(8)]
    for row in rows:
        row[0] = row[1] = mx.zeros((1, 1 << 16))
    rows[3] = Recurrent()
    mx.eval([row.state for row in rows])
    mx.clear_cache()
    active = mx.get_active_memory()
    mx.reset_peak_memory()
    batch = Recurrent.merge(rows)
    mx.eval(batch.state)
    assert mx.get_peak_memory() - active <= 1.3 * batch.nbytes
    assert batch.batch_size == 8


def test_a_layer_that_counts_no_tokens_keeps_no_part_of_a_span():
    cache = write(Recurrent(), 1, 0)
    cache.checkpoint()
    cache[0] = cache[0] * 2  # as mlx-lm's Mamba does: the states change, and nothing is said of how many tokens passed
    with pytest.raises(Unsupported, match="does not say how many have passed"):
        cache.commit(1)
    cache.rollback()
    assert_same(cache, write(Recurrent(), 1, 0))


@pytest.mark.parametrize("name", ["contiguous", "paged"])
def test_rows_that_are_left_within_their_padding(name):
    """The others left: what all remaining columns are is padding, and more of it is to come."""
    made = kinds()[name].make
    batch = type(made()).merge([made(), made()])
    batch.prepare(left_padding=[0, 7])
    write(batch, 4, 0)
    batch.filter([1])
    assert batch.offset.tolist() == [-3]
    assert batch.left_padding.tolist() == [3]
    tokens = mx.arange(6 * 8, dtype=mx.float32).reshape(1, 2, 6, 4)
    batch.update_and_fetch(tokens, tokens)
    assert batch.offset.tolist() == [3]
    single = batch.extract(0)
    keys = (single.plain_cache() if name == "paged" else single).keys_and_values()[0]
    assert mx.array_equal(keys, tokens[:, :, 3:])


@pytest.mark.parametrize("window", [600, 8])
def test_a_ring_takes_no_more_than_it_said_after_a_chunk_and_single_tokens(window):
    ring = write(Rotating(window), 255, 0)
    for tokens in range(256, 800):
        write(ring, 1, tokens)
        assert ring.nbytes <= ring.bytes_for(tokens, chunk=255)


@pytest.mark.parametrize("batched", [False, True])
def test_a_host_that_writes_sees_what_the_other_face_wrote(batched):
    """The buffer is copied when a reader holds it: the host's own view is of the old one then."""
    tokens = mx.ones((1, 2, 2, 4))
    cache = Contiguous(keys_and_values("contiguous", tokens, tokens))
    cache = Contiguous.merge([cache]) if batched else cache

    def by_host(value: float) -> None:
        for view in cache.host_columns(1, 1):
            view[:, :, cache.size()] = value
        cache.advance_columns(1)

    by_host(7)
    held = cache.copy()
    mx.eval(cache.update_and_fetch(tokens * 8, tokens * 8))
    by_host(9)
    assert cache.keys_and_values()[0][0, 0, :, 0].tolist() == [7, 8, 8, 9]
    assert held.keys_and_values()[0][0, 0, :, 0].tolist() == [7]


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="about buffers that the host writes")
@pytest.mark.parametrize("batched", [False, True])
def test_a_buffer_that_grew_leaves_no_old_one_in_the_pool(batched):
    """A prompt's layers grow one after the other in a chunk: their old buffers together would be a whole cache more."""
    tokens = mx.ones((1, 2, 1, 64))
    layers = [Contiguous(keys_and_values("contiguous", tokens, tokens)) for _ in range(4)]
    layers = [Contiguous.merge([cache]) if batched else cache for cache in layers]
    for cache in layers:
        cache.host_columns(1000, 1)
        cache.advance_columns(1000)
    mx.clear_cache()
    held = sum(cache.nbytes for cache in layers)
    for cache in layers:
        cache.host_columns(1000, 1)
        cache.advance_columns(1000)
    assert sum(cache.nbytes for cache in layers) >= 1.9 * held
    assert mx.get_cache_memory() <= held / 4


def test_numbers_that_are_kept_serve_the_engines_of_all_threads():
    """MLX lets only the thread that built an array evaluate it, and two engines may have rows of the same lengths."""
    int32s.cache_clear()
    told: list[list[int]] = []

    def engine(read) -> None:
        told.append(read(int32s((1, 2, 3))))
        mx.clear_streams()  # as an engine's thread ends

    for read in (lambda array: [], mx.array.tolist):
        thread = threading.Thread(target=engine, args=(read,))
        thread.start()
        thread.join()
    assert told == [[], [1, 2, 3]]

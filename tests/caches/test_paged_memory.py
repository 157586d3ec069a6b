"""Bytes: what pages save, what a step copies, and that every byte of a moment is accounted for."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.caches import Contiguous, Layout, Paged, PagedKV, Pages, Recurrent, Rotating, Table, Unsupported, block_keys
from labkit.caches.layout import ArraySpec
from tests.settled import settled_memory

HEADS, DIM = 2, 32
LAYOUT = Layout("contiguous", tuple(ArraySpec(name, (HEADS, DIM), "float32", True) for name in ("keys", "values")))


def tokens(count: int) -> tuple[mx.array, mx.array]:
    return tuple(mx.random.normal((1, HEADS, count, DIM)) for _ in "kv")


def active(make) -> tuple[int, object]:
    """Bytes of arrays that are alive after `make`, and what it made."""
    before = settled_memory()
    made = make()
    return settled_memory() - before, made


def rows_of(lengths: list[int], shared: int, pages: Pages | None) -> object:
    """A batch of rows whose first `shared` tokens are the same; contiguous without pages."""
    common, rows = tokens(shared) if shared else None, []
    for n, length in enumerate(lengths):
        prompt = [*range(shared), *range(1000 * (n + 1), 1000 * (n + 1) + length - shared)]
        table = None if pages is None else Table(pages.pool, block_keys(prompt, pages.block_tokens))
        row = Contiguous() if pages is None else Paged(pages, table)
        parts = [common, tokens(length - shared)] if shared else [tokens(length)]
        for part in parts:
            row.update_and_fetch(*part)
        mx.eval(row.state[:4])
        rows.append(row)
    batch = type(rows[0]).merge(rows)
    mx.eval(batch.state[:4])
    return batch


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="counts what MLX's CPU allocator holds")
@pytest.mark.parametrize(
    ("lengths", "shared", "most"),
    [([2048 + 8 * n for n in range(8)], 2048, 1 / 4), ([4000, *[40] * 7], 0, 1 / 2)],
    ids=["eight with a long prefix", "very unequal lengths"],
)
def test_pages_save_what_they_should(lengths, shared, most):
    contiguous, _ = active(lambda: rows_of(lengths, shared, None))
    paged, kept = active(lambda: (pages := Pages(4000, 16), rows_of(lengths, shared, pages)))
    assert contiguous >= len(lengths) * max(lengths) * LAYOUT.bytes_per_token
    assert paged >= (shared or sum(lengths)) * LAYOUT.bytes_per_token
    assert paged <= most * contiguous, f"{paged / contiguous:.3f}"
    pages, batch = kept
    # What is said to be held is no more than what is; a number of an earlier test may have gone meanwhile.
    assert pages.nbytes + pages.tail_bytes <= paged + 64
    assert batch.nbytes <= paged + 64


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="on a GPU the allocator's pool hides what is allocated")
@pytest.mark.parametrize("rows", [1, 3])
def test_appending_copies_no_pool(rows):
    """Through a full tail and a flush: in place on a CPU, and every finished block is written once."""
    pages = Pages(2000, 16)
    batch = rows_of([2000 + 5 * n for n in range(rows)], 0, pages)
    token = tuple(mx.ones((rows, HEADS, 1, DIM)) for _ in "kv")
    for step in range(40):
        mx.eval(token)
        mx.reset_peak_memory()
        before, room = mx.get_active_memory(), pages.keys.shape[0]
        batch.append(*token)
        mx.eval(batch.state)
        if pages.keys.shape[0] == room:  # else the pool grew, once in a long while
            assert mx.get_peak_memory() - before < pages.nbytes / 8, step
    assert pages.written_bytes == pages.pool.used * 16 * LAYOUT.bytes_per_token


def kv(**options) -> PagedKV:
    caches = [Contiguous(LAYOUT), Rotating(24), Recurrent(1)]
    window = Layout("rotating", LAYOUT.arrays, 24)
    state = Layout("recurrent", (ArraySpec("state0", (3, 5), "float32", False),))
    return PagedKV(caches, [LAYOUT, window, state], **({"pool_bytes": 1 << 20, "block_tokens": 8} | options))


def test_every_byte_of_a_moment_is_accounted_for():
    pools = kv()
    rows = [pools.make_caches(range(40), total=80)[0] for _ in range(3)]
    for n, row in enumerate(rows):
        for cache in row[:2]:
            cache.update_and_fetch(*tokens(40 + 3 * n))
        row[2][0] = mx.zeros((1, 3, 5))
    now = pools.snapshot()
    assert now["held"] == now["used"] + now["idle"] + now["unfilled"] == pools.nbytes
    assert (now["rows"], now["tokens"]) == (3, 40 + 43 + 46)
    assert (
        now["saved"] == 2 * 5 * 8 * LAYOUT.bytes_per_token * 2
    )  # five blocks of three rows lie there once, in two layers
    assert pools.slots.used == 3
    for row in rows:
        for cache in row:
            cache.release()
    after = pools.snapshot()
    assert (after["used"], after["rows"], pools.used, pools.faults()) == (0, 0, 0, [])
    assert after["held"] == after["idle"] > 0


@pytest.mark.parametrize("layers", [1, 5, 30])
def test_every_recurrent_layer_has_a_slot_for_every_row(layers):
    """Models have dozens of such layers; a pool of slots for a few of them ended rows that had been admitted."""
    state = Layout("recurrent", (ArraySpec("state0", (3, 5), "float32", False),))
    caches, layouts = [Contiguous(LAYOUT), *[Recurrent(1)] * layers], [LAYOUT, *[state] * layers]
    pools = PagedKV(caches, layouts, pool_bytes=1 << 20, block_tokens=8, max_rows=3)
    rows = [pools.make_caches(range(8), total=16)[0] for _ in range(3)]
    for row in rows:
        for cache in row[1:]:
            cache[0] = mx.zeros((1, 3, 5))
    assert pools.slots.used == 3 * layers
    batches = [type(one[0]).merge(list(one)) for one in list(zip(*rows, strict=True))[1:]]
    copies = [cache.copy() for cache in rows[0][1:]]
    assert pools.slots.used == 4 * layers
    for cache in (*batches, *copies, *(cache for row in rows for cache in row)):
        cache.release()
    assert pools.slots.used == 0


def test_room_is_counted_in_blocks_and_shared_ones_count_once():
    pools = kv(pool_bytes=20 * kv().block_bytes)
    assert pools.blocks == 20
    assert pools.blocks_needed(47) == 5  # the rest stays in the tail
    assert pools.fits(160)
    assert not pools.fits(168)
    row, shared = pools.make_caches(range(80), total=120)
    assert shared == 0
    assert not pools.fits(48)
    row[0].update_and_fetch(*tokens(80))
    row[1].update_and_fetch(*tokens(80))
    assert not pools.fits(48)
    assert pools.fits(120, range(80))  # ten of its fifteen blocks are there
    with pytest.raises(Exception, match="21 blocks of 8 tokens are needed and 20 of 20 are free"):
        pools.require(168)


def test_a_model_that_cannot_be_paged_is_refused_at_once():
    with pytest.raises(Unsupported, match="cannot lie in pages"):
        PagedKV([Rotating(8, keep=2)], [Layout("rotating", LAYOUT.arrays, 8)], pool_bytes=1 << 20)
    with pytest.raises(Unsupported, match="no layer of this model remembers tokens"):
        PagedKV([Recurrent(1)], [Layout("recurrent", ())], pool_bytes=1 << 20)
    with pytest.raises(ValueError, match=r"a block of 8 tokens takes \d+ bytes in all layers: pool_bytes 5 holds none"):
        kv(pool_bytes=5)

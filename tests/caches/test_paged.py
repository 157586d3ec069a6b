"""Paged caches against the plain ones, with tolerance zero, and against rows as lists of tokens.

Both kinds go through the same random life: chunks, merges, joins, leaves, single tokens, padded chunks, spans that are
taken back, forks. After each write the columns that a query can see are compared, the masks, and attention's bits.
"""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from labkit.caches import BatchedPaged, BatchedPagedWindow, Contiguous, Paged, PagedWindow, PoolExhausted, Rotating
from labkit.caches.block_table import Table, block_keys
from labkit.caches.pages import Pages

# A life is short to read as it is; to shrink one takes minutes.
LIFE = (Phase.explicit, Phase.reuse, Phase.generate)
H, D, DV, WINDOW, VOCABULARY = 2, 4, 3, 6, 512
KEYS = mx.random.normal((VOCABULARY, H, D), key=mx.random.key(1))
VALUES = mx.random.normal((VOCABULARY, H, DV), key=mx.random.key(2))
QUERY = mx.random.normal((1, H, 1, D), key=mx.random.key(3))


def tokens_as_arrays(rows: list[list[int]]) -> tuple[mx.array, mx.array]:
    index = mx.array(rows, dtype=mx.int32)
    return KEYS[index].swapaxes(1, 2), VALUES[index].swapaxes(1, 2)


class Pair:
    """A plain cache and a paged one that get the same tokens, and the rows as lists."""

    def __init__(self, kind: str, pages: Pages):
        self.kind, self.pages = kind, pages
        self.plain = self.paged = None
        self.rows: list[list[int]] = []

    def fresh(self, tokens: list[int], chunk: int, table: Table | None = None) -> None:
        self.plain = Contiguous() if self.kind == "contiguous" else Rotating(WINDOW)
        self.paged = Paged(self.pages, table) if self.kind == "contiguous" else PagedWindow(self.pages, WINDOW, table)
        self.rows = [[]]
        for start in range(0, len(tokens), chunk):
            self.write([tokens[start : start + chunk]])

    def write(self, new: list[list[int]]) -> None:
        """Rows of unequal length are padded on the right."""
        length, lengths = max(map(len, new)), [len(row) for row in new]
        padded = [[*row, *[VOCABULARY - 1] * (length - len(row))] for row in new]
        if min(lengths) < length:
            for cache in (self.plain, self.paged):
                cache.prepare(lengths=lengths, right_padding=[length - n for n in lengths])
        masks = self.plain.make_mask(length, return_array=True), self.paged.make_mask(length, return_array=True)
        assert same(*masks)
        arrays = tokens_as_arrays(padded)
        plain, paged = self.plain.update_and_fetch(*arrays), self.paged.update_and_fetch(*arrays)
        assert [x.shape for x in plain] == [x.shape for x in paged]
        queries = mx.broadcast_to(QUERY, (len(new), H, length, D))
        outs = [
            np.array(mx.fast.scaled_dot_product_attention(queries, *x, scale=0.7, mask=masks[0]))
            for x in (plain, paged)
        ]
        for b, n in enumerate(lengths):
            np.testing.assert_array_equal(outs[0][b, :, :n], outs[1][b, :, :n])
        if min(lengths) < length:
            self.plain.finalize()
            self.paged.finalize()
        for row, more in zip(self.rows, new, strict=True):
            row.extend(more)
        assert same(self.paged.offset, self.plain.offset)

    def check(self) -> None:
        plain, paged = self.plain, self.paged
        assert (paged.size(), paged.batch_size, paged.empty()) == (plain.size(), plain.batch_size, plain.empty())
        assert same(paged.offset, plain.offset)
        if plain.batched:
            assert same(paged.left_padding, plain.left_padding)
        for b, row in enumerate(self.rows):
            single = (paged.extract(b) if paged.batched else paged).plain_cache()
            if not row:
                continue
            keys = single.keys if self.kind == "contiguous" else single.newest()[0]
            # The next query sees itself and WINDOW - 1 before it.
            kept = row if self.kind == "contiguous" else row[1 - WINDOW :]
            np.testing.assert_array_equal(keys[:, :, -len(kept) :], tokens_as_arrays([kept])[0])
        assert self.pages.pool.faults() == []


def same(a, b) -> bool:
    if isinstance(b, mx.array):
        return isinstance(a, mx.array) and a.shape == b.shape and mx.array_equal(a, b).item()
    return a == b


TOKENS = st.integers(0, VOCABULARY - 2)


@st.composite
def prompts(draw, maximum: int = 24, minimum: int = 1) -> list[int]:
    first, step = draw(TOKENS), draw(st.sampled_from([1, 7]))
    return [(first + step * i) % (VOCABULARY - 1) for i in range(draw(st.integers(minimum, maximum)))]


@pytest.mark.parametrize("kind", ["contiguous", "rotating"])
@pytest.mark.parametrize(("block", "tail"), [(1, 1), (8, 8), (16, 48), (256, 256)])
@settings(max_examples=8, deadline=None, phases=LIFE)
@given(data=st.data())
def test_a_random_life_gives_the_same_bits(kind, block, tail, data):
    pages = Pages(400, block, tail_tokens=tail)
    draw = data.draw
    batch = Pair(kind, pages)
    batch.fresh(draw(prompts()), draw(st.sampled_from([1, 5, 32])))
    batch.plain, batch.paged = (type(cache).merge([cache]) for cache in (batch.plain, batch.paged))
    batch.check()
    for _ in range(draw(st.integers(2, 12))):
        count = len(batch.rows)
        action = draw(st.sampled_from(["decode", "decode", "join", "leave", "chunk", "span", "extract", "trim"]))
        if action == "decode":
            first = draw(TOKENS)
            for step in range(draw(st.integers(1, 12))):
                batch.write([[(first + 17 * step + 5 * b) % (VOCABULARY - 1)] for b in range(count)])
        elif action == "join" and count < 5:
            other = Pair(kind, pages)
            other.fresh(draw(prompts()), draw(st.sampled_from([1, 5, 32])))
            batch.plain.extend(other.plain)
            batch.paged.extend(other.paged)
            batch.rows += other.rows
        elif action == "leave" and count > 1:
            kept = draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
            batch.plain.filter(kept)
            batch.paged.filter(kept)
            batch.rows = [batch.rows[b] for b in kept]
        elif action == "chunk":
            batch.write([draw(prompts(8)) for _ in range(count)])
        elif action == "span":
            batch.plain.checkpoint()
            batch.paged.checkpoint()
            before = [list(row) for row in batch.rows]
            for _ in range(draw(st.integers(1, 2))):
                batch.write([draw(prompts(5)) for _ in range(count)])
            accepted = draw(st.lists(st.integers(0, 10), min_size=count, max_size=count))
            batch.plain.commit(accepted)
            batch.paged.commit(accepted)
            batch.rows = [row[: len(old) + n] for row, old, n in zip(batch.rows, before, accepted, strict=True)]
        elif action == "extract":
            b = draw(st.integers(0, count - 1))
            single = Pair(kind, pages)
            single.plain, single.paged = batch.plain.extract(b), batch.paged.extract(b)
            single.rows = [list(batch.rows[b])]
            single.write([draw(prompts(5))])  # into a fork: the batch must not see it
        elif action == "trim" and batch.plain.is_trimmable() and min(map(len, batch.rows)) > 1:
            n = draw(st.integers(1, min(map(len, batch.rows)) - 1))
            assert batch.plain.trim(n) == batch.paged.trim(n)
            batch.rows = [row[:-n] for row in batch.rows]
        batch.check()
    del batch
    single = other = None
    gc.collect()
    assert pages.pool.used == 0
    assert pages.pool.faults() == []


@pytest.mark.parametrize("kind", ["contiguous", "rotating"])
@settings(max_examples=8, deadline=None, phases=LIFE)
@given(data=st.data())
def test_a_lone_row_gives_the_same_bits(kind, data):
    pages = Pages(100, data.draw(st.sampled_from([1, 3, 8])))
    row = Pair(kind, pages)
    row.fresh(data.draw(prompts()), data.draw(st.sampled_from([1, 5, 32])))
    for _ in range(data.draw(st.integers(1, 10))):
        action = data.draw(st.sampled_from(["write", "span", "trim", "padded"]))
        if action == "write":
            row.write([data.draw(prompts(9))])
        elif action == "span":
            row.plain.checkpoint()
            row.paged.checkpoint()
            before = list(row.rows[0])
            for padded in data.draw(st.lists(st.booleans(), min_size=1, max_size=2)):
                if padded:
                    write_padded(row, data)
                else:
                    row.write([data.draw(prompts(5))])
            kept = data.draw(st.integers(0, 10))
            row.plain.commit(kept)
            row.paged.commit(kept)
            row.rows = [row.rows[0][: len(before) + kept]]
        elif action == "trim" and row.plain.is_trimmable() and len(row.rows[0]) > 1:
            n = data.draw(st.integers(1, len(row.rows[0]) - 1))
            assert row.plain.trim(n) == row.paged.trim(n)
            row.rows = [row.rows[0][:-n]]
        elif action == "padded":
            write_padded(row, data)
        row.check()


def write_padded(row: Pair, data: st.DataObject) -> None:
    new, surplus = data.draw(prompts(4)), data.draw(st.integers(1, 3))
    for cache in (row.plain, row.paged):
        cache.prepare(lengths=[len(new)], right_padding=[surplus])
        cache.update_and_fetch(*tokens_as_arrays([new + [VOCABULARY - 1] * surplus]))
        cache.finalize()
    row.rows[0] += new


@pytest.mark.parametrize("kind", ["contiguous", "rotating"])
def test_left_padding_takes_no_block(kind):
    pages, lengths = Pages(40, 4), [11, 2, 6]
    width = max(lengths)
    plain = (Contiguous() if kind == "contiguous" else Rotating(WINDOW)).merge(
        [Contiguous() if kind == "contiguous" else Rotating(WINDOW) for _ in lengths]
    )
    paged = BatchedPaged(pages, [0] * 3) if kind == "contiguous" else BatchedPagedWindow(pages, WINDOW, [0] * 3)
    rows = [list(range(100 * b, 100 * b + n)) for b, n in enumerate(lengths)]
    arrays = tokens_as_arrays([[VOCABULARY - 1] * (width - len(row)) + row for row in rows])
    pair = Pair(kind, pages)
    pair.plain, pair.paged, pair.rows = plain, paged, rows
    for start, end in ((0, 7), (7, 11)):
        for cache in (plain, paged):
            if start == 0:
                cache.prepare(left_padding=[width - n for n in lengths])
            cache.update_and_fetch(*(x[:, :, start:end] for x in arrays))
    pair.check()
    for step in range(9):
        pair.write([[step], [step + 20], [step + 40]])


def filled(pages: Pages, lengths: list[int], start: int = 0) -> list[Paged]:
    rows = []
    for b, n in enumerate(lengths):
        row = Paged(pages)
        row.update_and_fetch(*tokens_as_arrays([[(start + 31 * b + i) % 500 for i in range(n)]]))
        rows.append(row)
    return rows


@pytest.mark.parametrize("length", [1, 13])
def test_exhaustion_leaves_everything_as_it_was(length):
    pages = Pages(6, 4)
    batch = Paged.merge(filled(pages, [12, 8]))  # five blocks of six
    batch.update_and_fetch(*tokens_as_arrays([[5, 6, 7], [8, 9, 10]]))
    batch.update_and_fetch(*tokens_as_arrays([[5], [8]]))
    before = [np.array(x) for x in batch.plain_cache().keys_and_values()], batch.offset.tolist(), pages.pool.stats()
    for _ in range(2):
        with pytest.raises(PoolExhausted, match=r"blocks of 4 tokens are needed and 1 of 6 are free"):
            batch.update_and_fetch(*tokens_as_arrays([[1] * length] * 2))
        after = batch.plain_cache().keys_and_values()
        for one, other in zip(before[0], after, strict=True):
            np.testing.assert_array_equal(one, other)
        assert (batch.offset.tolist(), pages.pool.stats()) == before[1:]
        assert pages.pool.faults() == []
    batch.filter([0])
    batch.update_and_fetch(*tokens_as_arrays([[1]]))  # there is room now


def test_forks_share_finished_blocks_and_never_see_each_others_writes():
    pages = Pages(20, 4)
    (parent,) = filled(pages, [11])
    batch = Paged.merge([parent])
    forks = [batch.extract(0) for _ in range(3)]
    assert pages.pool.used == 2
    for b, fork in enumerate(forks):
        fork.update_and_fetch(*tokens_as_arrays([[200 + b] * 6]))
    assert pages.pool.used == 2 + 3 * 2
    want = [i % 500 for i in range(11)]
    for b, fork in enumerate(forks):
        np.testing.assert_array_equal(fork.plain_cache().keys, tokens_as_arrays([want + [200 + b] * 6])[0])
    np.testing.assert_array_equal(parent.plain_cache().keys, tokens_as_arrays([want])[0])


def test_taking_tokens_out_of_a_shared_block_copies_what_remains():
    pages = Pages(20, 4)
    (parent,) = filled(pages, [12])
    fork = Paged.merge([parent]).extract(0)
    fork.trim(6)  # into the second block, which the parent reads
    assert pages.pool.stats().shared == 1
    fork.update_and_fetch(*tokens_as_arrays([[300] * 7]))
    np.testing.assert_array_equal(parent.plain_cache().keys, tokens_as_arrays([list(range(12))])[0])
    np.testing.assert_array_equal(fork.plain_cache().keys, tokens_as_arrays([[*range(6), *[300] * 7]])[0])


def test_equal_prompts_are_stored_once():
    pages, prompt = Pages(50, 4), list(range(40, 62))
    keys = block_keys(prompt, 4)
    rows = []
    for b in range(4):
        row = Paged(pages, Table(pages.pool, keys))
        row.update_and_fetch(*tokens_as_arrays([prompt]))
        row.update_and_fetch(*tokens_as_arrays([[b]]))
        rows.append(row)
    assert pages.pool.used == 5
    for b, row in enumerate(rows):
        np.testing.assert_array_equal(row.plain_cache().keys, tokens_as_arrays([[*prompt, b]])[0])
    rows[0].release()
    rows[1].release()
    assert pages.pool.used == 5
    np.testing.assert_array_equal(rows[2].plain_cache().keys, tokens_as_arrays([[*prompt, 2]])[0])


@pytest.mark.parametrize("kind", ["contiguous", "rotating"])
@pytest.mark.parametrize("rows", [1, 3])
def test_snapshots_are_the_plain_class_s(kind, rows):
    pages, pairs = Pages(60, 4), []
    for b in range(rows):
        pair = Pair(kind, pages)
        pair.fresh(list(range(b, b + 9 + b)), 5)
        for step in range(4):
            pair.write([[step]])
        pairs.append(pair)
    plain, paged = pairs[0].plain, pairs[0].paged
    if rows > 1:
        plain, paged = (type(first).merge([getattr(p, name) for p in pairs])
                        for first, name in ((plain, "plain"), (paged, "paged")))  # fmt: skip
    both = Pair(kind, pages)
    data = paged.snapshot()
    both.plain, both.rows = type(plain).restore(data), [list(row) for pair in pairs for row in pair.rows]
    both.paged = type(paged).restore(data)
    both.pages = both.paged.pages
    both.check()
    for step in range(12):
        both.write([[step + 7 * b] for b in range(rows)])
    other = Pair(kind, pages)  # and a plain cache into a shared pool
    other.plain, other.paged = type(plain).restore(data), type(paged).adopt(type(plain).restore(data), pages)
    other.rows = [list(row) for pair in pairs for row in pair.rows]
    for step in range(12):
        other.write([[step + 9 * b] for b in range(rows)])


def test_blocks_that_leave_the_window_are_given_back():
    pages = Pages(100, 4)
    row, whole = PagedWindow(pages, WINDOW), []
    for chunk in (30, *[1] * 40):
        row.update_and_fetch(*tokens_as_arrays([[5] * chunk]))
        whole.append(pages.pool.used)
    assert whole[0] == 7  # a chunk's own queries look back over all of it
    assert max(whole[2:]) <= -(-WINDOW // 4) + 1
    assert pages.pool.touched == 7


def test_rows_of_two_pools_cannot_join():
    one, other = filled(Pages(9, 4), [5]), filled(Pages(9, 4), [5])
    with pytest.raises(ValueError, match="rows of several pools cannot decode together"):
        Paged.merge(one + other)


def test_a_pool_takes_tokens_of_one_kind():
    pages = Pages(9, 4)
    filled(pages, [5])
    keys, values = (spec.shape for spec in pages.layout.arrays)
    for dtype, (heads, width), message in (
        (mx.float16, values, "this pool holds"),
        (mx.float32, keys, r"go on in a contiguous cache of any rows of keys .* and values"),
    ):
        tokens = mx.zeros((1, *keys[:1], 3, keys[1]), dtype), mx.zeros((1, heads, 3, width), dtype)
        assert keys != values
        with pytest.raises(ValueError, match=message):
            Paged(pages).update_and_fetch(*tokens)


def test_tails_must_be_whole_blocks():
    with pytest.raises(ValueError, match="tail_tokens must be a multiple of block_tokens 16, not 24"):
        Pages(9, 16, tail_tokens=24)

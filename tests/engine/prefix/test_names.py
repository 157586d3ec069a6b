"""Hash chain and grid: equal names mean equal bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.prefix import Grid, hashing

TOKENS = list(range(100, 140))


def names(tokens=TOKENS, *, model="m", numerics="n", layouts=("a", "b"), width=8, extra=(), chunks=()):
    return hashing.chain(hashing.root(model, numerics, list(layouts), width), tokens, width, extra, chunks)


def test_a_chain_names_whole_blocks_only():
    assert [len(names(TOKENS[:n])) for n in (0, 7, 8, 9, 16, 40)] == [0, 0, 1, 1, 2, 5]
    assert names()[:2] == names(TOKENS[:16])


@pytest.mark.parametrize("changed", range(40))
def test_one_token_changes_its_block_and_all_behind_it(changed):
    other = [*TOKENS]
    other[changed] += 1
    same = [a == b for a, b in zip(names(), names(other), strict=True)]
    assert same == [block < changed // 8 for block in range(5)]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "m2"},
        {"numerics": "n2"},
        {"layouts": ("b", "a")},
        {"layouts": ("ab",)},
        {"layouts": ("a", "b", "")},
        {"extra": ("adapter 1",)},
        {"model": "mn", "numerics": ""},
    ],
    ids=str,
)
def test_whatever_the_bytes_depend_on_changes_every_name(other):
    assert not set(names()) & set(names(**other))


def test_another_width_is_another_chain():
    assert not set(names()) & set(names(width=4))


def test_an_extra_key_counts_from_its_token_on():
    plain, image = names(), names(extra=[(17, "image")])
    assert [a == b for a, b in zip(plain, image, strict=True)] == [True, True, False, False, False]
    assert names(extra=[(17, "image")]) != names(extra=[(18, "image")])
    assert names(extra=[(0, "x")]) == names(extra="x") == names(extra=["x"])
    assert names(extra=[(3, "b"), (1, "a")]) == names(extra=[(1, "a"), (3, "b")])
    assert names(extra=["ab", "c"]) != names(extra=["a", "bc"])


@pytest.mark.parametrize("extra", [[1], [("a", 1)], [(1, "a", "b")], [b"x"]])
def test_other_extra_keys_are_refused(extra):
    with pytest.raises(ValueError, match="extra key"):
        names(extra=extra)


def test_chunks_that_were_cut_are_part_of_the_name():
    cut = names(chunks=[(8,), (3, 5)])
    assert cut[:1] == names()[:1]
    assert not set(cut[1:]) & set(names()[1:])
    assert cut != names(chunks=[(8,), (5, 3)])
    assert names(chunks=[(8,), (8,)]) == names()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.binary(max_size=3), max_size=3), min_size=2, max_size=2, unique_by=lambda fields: tuple(fields)
    )
)
def test_no_two_lists_of_fields_read_alike(lists):
    assert hashing.digest(*lists[0]) != hashing.digest(*lists[1])


def test_tokens_that_are_none_are_refused():
    with pytest.raises(ValueError, match="32-bit"):
        names([*TOKENS[:7], 1 << 40])


@pytest.mark.parametrize("width", [0, 1, -8, 2.0, True, None])
def test_a_width_that_is_none_is_refused(width):
    with pytest.raises(ValueError, match="width"):
        Grid(width)


def test_chunks_are_grouped_by_block():
    grid = Grid(8)
    assert grid.by_block([8, 3, 5, 8, 2]) == [(8,), (3, 5), (8,)]
    for crossing in ([9], [3, 6], [8, 4, 5], [0], [-1]):
        with pytest.raises(ValueError, match="crosses its end"):
            grid.by_block(crossing)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200), st.integers(2, 20))
def test_chunks_end_on_the_grid_or_at_the_limit(start, more, width):
    grid, limit = Grid(width), start + more
    end = grid.end(start, limit)
    assert end == limit or end % width == 0
    assert start < end <= start + width or end == limit == start

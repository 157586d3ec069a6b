"""The allocator against a model in sets and lists: no sequence of operations loses, doubles or mixes up a block."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.caches.block_pool import NULL, BlockPool, PoolExhausted
from labkit.caches.block_table import Table, block_keys


@settings(max_examples=60, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 12), size=st.integers(1, 4))
def test_any_sequence_keeps_the_books(data, capacity, size):
    pool, tables, models = BlockPool(capacity, size), [], []
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["new", "grow", "fork", "cut", "drop", "release", "forget"]))
        if action == "new" or not tables:
            tables.append(Table(pool))
            models.append([])
            continue
        i = data.draw(st.integers(0, len(tables) - 1))
        table, model = tables[i], models[i]
        if action == "grow":
            count = data.draw(st.integers(1, 4))
            used = {block for blocks in models for block in blocks} - {NULL}
            if len(used) + count > capacity:
                with pytest.raises(PoolExhausted) as caught:
                    pool.require(table.new_blocks_needed(count, set()))
                assert caught.value.record["free_blocks"] == capacity - len(used)
                continue
            new = table.grow(count)
            assert not set(new) & used
            assert len(set(new)) == count
            model += new
        elif action == "fork":
            tables.append(table.fork())
            models.append(list(model))
        elif action == "cut":
            kept = data.draw(st.integers(0, len(model)))
            table.cut(kept)
            del model[kept:]
        elif action == "drop":
            n = data.draw(st.integers(0, len(model)))
            table.drop_first(n)
            model[:n] = [NULL] * n
        else:
            if action == "release":
                table.release()
            del tables[i], models[i], table
        assert pool.faults() == []
        assert [table.blocks for table in tables] == models
        assert pool.used == len({block for blocks in models for block in blocks} - {NULL})
    tables.clear()
    table = None
    assert pool.used == 0
    assert pool.faults() == []


def test_freed_blocks_are_used_again_before_new_ones():
    pool = BlockPool(8, 4)
    a, b = Table(pool), Table(pool)
    a.grow(3)
    b.grow(2)
    a.release()
    b.grow(3)
    assert pool.touched == 5
    assert sorted(b.blocks) == [1, 2, 3, 4, 5]


def test_exhaustion_names_the_numbers_and_the_remedy():
    pool = BlockPool(3, 16)
    Table(pool)
    with pytest.raises(PoolExhausted, match="5 blocks of 16 tokens are needed and 3 of 3 are free: let rows leave"):
        pool.allocate(5)
    assert pool.used == 0


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_a_pool_of_nothing_is_refused(bad):
    with pytest.raises(ValueError, match="capacity must be a whole number of at least 1"):
        BlockPool(bad, 16)
    with pytest.raises(ValueError, match="block_tokens must be a whole number of at least 1"):
        BlockPool(4, bad)


def test_keys_are_of_everything_before():
    a, b = list(range(12)), [*range(8), 99, *range(9, 12)]
    keys = block_keys(a, 4)
    assert len(keys) == 3
    assert block_keys(b, 4)[:2] == keys[:2]
    assert block_keys(b, 4)[2] != keys[2]
    assert block_keys([5, *a[1:]], 4)[1] != keys[1]  # equal tokens behind other ones
    assert block_keys(a, 4, ["adapter 1"])[0] != keys[0]
    assert block_keys(a, 4, [(7, "image")])[0] == keys[0]
    assert block_keys(a, 4, [(7, "image")])[1] != keys[1]
    assert block_keys(a[:7], 4) == keys[:1]
    assert block_keys([1, 256], 2) != block_keys([257, 0], 2)


def test_equal_prompts_share_blocks_while_one_of_them_lives():
    pool, keys = BlockPool(8, 4), block_keys(range(12), 4)
    first, second = Table(pool, keys), Table(pool, keys)
    assert first.grow(3) == [1, 2, 3]
    assert second.new_blocks_needed(3, set()) == 0
    assert second.grow(3) == [NULL] * 3  # nothing to write
    assert pool.stats().saved == 3
    first.release()
    assert Table(pool, keys).new_blocks_needed(3, set()) == 0
    second.release()
    assert Table(pool, keys).new_blocks_needed(3, set()) == 3
    assert pool.faults() == []


def test_two_rows_of_one_write_count_a_shared_block_once():
    pool, keys = BlockPool(3, 4), block_keys(range(12), 4)
    tables, planned = [Table(pool, keys), Table(pool, keys)], set()
    assert sum(table.new_blocks_needed(3, planned) for table in tables) == 3
    assert [table.grow(3) for table in tables] == [[1, 2, 3], [NULL] * 3]


def test_what_is_written_anew_has_no_key():
    pool, keys = BlockPool(8, 4), block_keys(range(12), 4)
    row, other = Table(pool, keys), Table(pool, keys)
    row.grow(3)
    row.cut(1)
    row.grow(1)  # other tokens than the prompt's
    other.grow(3)
    assert other.blocks[0] == row.blocks[0]
    assert other.blocks[1] != row.blocks[1]
    assert pool.faults() == []


def test_promises_are_not_given_twice():
    pool = BlockPool(10, 4)
    first = Table(pool, promised=6)
    assert (pool.promised, pool.unpromised) == (6, 4)
    first.grow(2)
    assert (pool.promised, pool.unpromised) == (4, 4)
    twin = first.fork()
    assert pool.unpromised == 0  # both may come to need four more
    twin.release()
    first.drop_first(1)
    assert (pool.promised, pool.unpromised) == (5, 4)
    first.release()
    assert (pool.promised, pool.unpromised) == (0, 10)


def test_the_books_tell_a_leak():
    pool = BlockPool(4, 4)
    table = Table(pool)
    table.grow(2)
    pool.share(table.blocks[0])
    assert pool.faults() == ["block 1 has 2 references and 1 tables"]
    pool.give_back([1])
    del pool.references[2]
    assert any("block 2 has 0 references and 1 tables" in fault for fault in pool.faults())

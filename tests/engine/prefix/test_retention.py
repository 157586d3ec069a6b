"""Which boundaries keep a state: the policy alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.prefix.retention import Retention, Snapshot, gaps, level_of
from labkit.engine.prefix.tree import Tree


def line(blocks: int, nbytes: int = 1) -> list[Snapshot]:
    """One chain with a state at every boundary."""
    return [Snapshot(str(d), d, d == blocks, False, used=blocks, nbytes=nbytes) for d in range(1, blocks + 1)]


def kept(policy: Retention, snapshots: list[Snapshot], protect=()) -> set[int]:
    gone = set(policy.surplus(snapshots, protect))
    return {snapshot.depth for snapshot in snapshots if snapshot.key not in gone}


def test_the_levels_of_the_lattice():
    assert [level_of(depth) for depth in range(1, 17)] == [0, 1, 0, 2, 0, 1, 0, 3, 0, 1, 0, 2, 0, 1, 0, 4]


@pytest.mark.parametrize(("budget", "left"), [(20, {*range(1, 21)}), (11, {*range(2, 21, 2)}), (6, {*range(4, 21, 4)})])
def test_what_is_left_is_spread_evenly(budget, left):
    assert kept(Retention(budget_bytes=budget), line(20)) >= left
    assert len(kept(Retention(budget_bytes=budget), line(20))) <= budget


def test_the_lattice_is_nested_and_its_price_is_bounded():
    before = {*range(1, 65)}
    for budget in range(64, 1, -1):
        now = kept(Retention(budget_bytes=budget), line(64))
        assert now <= before, "what is kept with less was kept with more"
        assert 64 in now
        spacing = 1
        while 64 // spacing > budget:
            spacing *= 2
        assert max(gaps(now, 64)) < spacing, "nobody computes a whole cell of the lattice again"
        before = now


def test_without_the_lattice_the_old_end_of_a_chain_is_lost():
    plain = kept(Retention(budget_bytes=8, lattice=False), line(64))
    assert max(gaps(plain, 64)) > 4 * max(gaps(kept(Retention(budget_bytes=8), line(64)), 64))


def test_newest_and_branching_states_outrank_the_lattice():
    snapshots = [Snapshot(str(d), d, d in (7, 13), d == 5, used=1, nbytes=1) for d in range(1, 17)]
    assert {5, 7, 13} <= kept(Retention(budget_bytes=4), snapshots)
    assert not {5, 7, 13} & kept(Retention(budget_bytes=2, keep_newest=False, keep_branching=False), snapshots)


def test_among_newest_states_the_longest_unused_goes_first():
    snapshots = [Snapshot(str(d), d, True, False, used=d % 3, nbytes=1) for d in range(1, 7)]
    assert kept(Retention(budget_bytes=4), snapshots) == {1, 2, 4, 5}


def test_what_is_protected_stays_whatever_the_budget():
    assert kept(Retention(budget_bytes=0), line(5), protect={"3"}) == {3}


@pytest.mark.parametrize("option", [{"budget_bytes": -1}, {"interval": 0}, {"interval": 1.5}])
def test_a_policy_that_is_none_is_refused(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        Retention(**option)


def test_a_running_prefill_takes_states_at_its_interval_and_where_they_are_wanted():
    policy = Retention(interval=4)
    taken = [d for d in range(1, 11) if policy.takes(d, last=d == 10, branching=d == 3)]
    assert taken == [3, 4, 8, 10]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.booleans(), st.integers(1, 5))), st.integers(0, 60))
def test_the_budget_holds(items, budget):
    snapshots = [
        Snapshot(str(i), depth, newest, branching, used=i, nbytes=size)
        for i, (depth, newest, branching, size) in enumerate(items)
    ]
    gone = set(Retention(budget_bytes=budget).surplus(snapshots))
    left = sum(snapshot.nbytes for snapshot in snapshots if snapshot.key not in gone)
    assert left <= budget
    if gone:
        last = snapshots[int(Retention(budget_bytes=budget).surplus(snapshots)[-1])]
        assert left + last.nbytes > budget, "no state goes that need not"


def test_the_tree_knows_newest_and_branching_states():
    tree = Tree()
    for chain in (["a", "b", "c"], ["a", "b", "d"], ["e"]):
        tree.add(chain, "root")
    for key in "abce":
        tree.get(key).state_bytes = 10
    found = {s.key: (s.newest, s.branching, s.depth) for s in tree.snapshots()}
    assert found == {"a": (False, False, 1), "b": (False, True, 2), "c": (True, False, 3), "e": (True, False, 1)}
    assert tree.state_bytes == 40
    tree.gone("c.state")
    assert "c" not in {s.key for s in tree.snapshots()}
    tree.gone("c.columns")
    assert tree.get("c") is None
    assert {s.key: s.branching for s in tree.snapshots()}["b"] is False


def test_the_tree_is_learnt_from_headers_in_any_order():
    headers = {
        f"{key}.{part}": {"key": key, "part": part, "parent": parent, "depth": depth, "bytes": "7"}
        for key, parent, depth, part in [
            ("b", "a", "2", "state"),
            ("b", "a", "2", "columns"),
            ("a", "root", "1", "columns"),
            ("z", "y", "9", "state"),
        ]
    }
    tree = Tree()
    tree.learn(headers)
    assert tree.get("a").children == {"b"}
    assert {s.key: s.newest for s in tree.snapshots()} == {"b": True, "z": True}
    tree.gone("a.columns")
    assert tree.get("a") is None

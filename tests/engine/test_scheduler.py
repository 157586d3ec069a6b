"""The policy alone: plans from plain data, without arrays."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.scheduler import AGEING_SECONDS, PADDING_SHARE, Plan, Prompt, Scheduler, due

GRID = 16


def simulate(seed: int, *, chunk: int | None = None, pack: bool = True, shared: bool = True) -> list[tuple]:
    """Random prompts arrive, are computed and decode for a while -> every plan with the lanes that there were then."""
    draw, scheduler = random.Random(seed), Scheduler(GRID)
    prompts: list[Prompt] = []
    rows: dict[str, int] = {}  # tokens that are still to come
    plans, arrivals, number = [], draw.randint(1, 12), 0
    while number < arrivals or prompts or rows:
        if number < arrivals and draw.random() < 0.4:
            prompts.append(Prompt(f"p{number}", 0, draw.choice([1, 5, 17, 40, 100]), alone=not pack))
            number += 1
        lanes = (["shared"] if rows else []) if shared else list(rows)
        plan = scheduler.plan(prompts, lanes, chunk)
        if plan.kind == "idle":
            assert not prompts
            assert not rows
            continue
        plans.append((plan, lanes))
        if plan.kind == "decode":
            for id in list(rows) if shared else [plan.lane]:
                rows[id] -= 1
                if not rows[id]:
                    del rows[id]
            continue
        spans = dict(zip(plan.rows, plan.spans, strict=True))
        for prompt in prompts:
            if prompt.id in spans:
                start, end = spans[prompt.id]
                assert start == prompt.done < end <= prompt.goal
                assert end == prompt.goal or end % GRID == 0 or chunk, "chunks end on the grid"
                assert (start // GRID) == (end - 1) // GRID, "and never reach across it"
                if end == prompt.goal:
                    rows[prompt.id] = draw.randint(1, 6)
        prompts = [
            replace(p, done=spans[p.id][1]) if p.id in spans else p
            for p in prompts
            if p.id not in spans or spans[p.id][1] < p.goal
        ]
        assert len(plans) < 3000, "everything ends"
    return plans


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 4]), st.booleans(), st.booleans())
def test_a_running_row_waits_for_at_most_one_chunk(seed, chunk, pack, shared):
    plans = simulate(seed, chunk=chunk, pack=pack, shared=shared)
    chunks = [place for place, (plan, _) in enumerate(plans) if plan.kind == "prefill"]
    for place in chunks:
        plan, _ = plans[place]
        assert len(plan.rows) * max(end - start for start, end in plan.spans) <= (chunk or GRID)
    for first, second in pairwise(chunks):
        decoded = {plan.lane for plan, _ in plans[first + 1 : second]}
        stayed = set(plans[first][1]) & set(plans[second][1])
        assert stayed <= decoded, "whoever was there at both chunks had a token between them"


def test_between_two_chunks_every_lane_decodes_once():
    scheduler, prompt = Scheduler(GRID), [Prompt("p", 0, 1000)]
    kinds = [scheduler.plan(prompt, ["a", "b", "c"]) for _ in range(12)]
    assert [plan.lane or "chunk" for plan in kinds] == ["chunk", "a", "b", "c"] * 3


def test_one_prompt_of_twenty_chunks_leaves_half_the_steps_to_a_running_row():
    # An engine whose prompts ran back to back kept a running stream to a seventh of its speed.
    scheduler, done, kinds = Scheduler(GRID), [0, 0, 0], []
    while any(d < 20 * GRID for d in done):
        prompts = [Prompt(f"p{i}", d, 20 * GRID) for i, d in enumerate(done) if d < 20 * GRID]
        plan = scheduler.plan(prompts, ["row"])
        kinds.append(plan.kind)
        for id, (_, end) in zip(plan.rows, plan.spans, strict=True):
            done[int(id[1:])] = end
    assert kinds.count("decode") / len(kinds) >= 0.5 - 1 / len(kinds)
    assert all(a != "prefill" or b != "prefill" for a, b in pairwise(kinds))


def test_the_first_in_line_loses_at_most_every_other_chunk_to_short_ones():
    scheduler, long, turns = Scheduler(GRID), 0, []
    for number in range(40):
        plan = scheduler.plan([Prompt("long", long, 10_000), Prompt(f"short{number}", 0, 10)], [])
        turns.append(plan.rows[0][:4])
        if plan.rows == ("long",):
            long = plan.spans[0][1]
    assert turns.count("long") == 20


@pytest.mark.parametrize("length", [5, 40])
def test_a_short_prompt_behind_a_long_one_waits_for_one_chunk_of_it_a_chunk(length):
    scheduler, done = Scheduler(GRID), {"long": 0, "short": 0}
    goals = {"long": 100 * GRID, "short": length}
    scheduler.plan([Prompt("long", 0, goals["long"])], [])
    turns = []
    while done["short"] < length:
        plan = scheduler.plan([Prompt(id, at, goals[id]) for id, at in done.items()], [])
        turns.append(plan.rows[0])
        done[plan.rows[0]] = plan.spans[0][1]
    chunks = -(-length // GRID)
    assert turns == (["short", "long"] * chunks)[:-1]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, GRID), min_size=1, max_size=12))
def test_packed_prompts_fit_into_a_chunk_with_little_padding(lengths):
    plan = Scheduler(64).plan([Prompt(f"p{i}", 0, n) for i, n in enumerate(lengths)], [])
    sizes = [end - start for start, end in plan.spans]
    columns = len(sizes) * max(sizes)
    assert plan.rows[0] == "p0", "the first in line is always among them"
    assert columns <= 64
    assert columns - sum(sizes) <= PADDING_SHARE * columns


def test_who_follows_is_not_computed_and_who_must_be_alone_is_alone():
    prompts = [Prompt("a", 0, 10, follows=True), Prompt("b", 0, 10), Prompt("c", 0, 10, alone=True), Prompt("d", 0, 9)]
    assert Scheduler(64).plan(prompts, []).rows == ("b", "d")
    assert Scheduler(64).plan(prompts[2:], []).rows == ("c",)
    assert Scheduler(64).plan(prompts[:1], []) == Plan("idle")


def test_a_smaller_chunk_still_ends_on_the_grid():
    scheduler, done, ends = Scheduler(GRID), 0, []
    while done < 40:
        plan = scheduler.plan([Prompt("p", done, 40)], [], chunk=6)
        done = plan.spans[0][1]
        ends.append(done)
    assert ends == [6, 12, 16, 22, 28, 32, 38, 40]


@pytest.mark.parametrize("priority", [1, 3])
def test_priorities_overtake_and_nobody_starves(priority):
    patient = due(0, 0.0)
    soon, late = due(priority, 1.0), due(priority, priority * AGEING_SECONDS + 1.0)
    assert soon < patient < late

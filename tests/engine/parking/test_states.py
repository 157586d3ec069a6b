"""The state machine alone: its table, and decisions on plain data. No array, no clock, no disk."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from labkit.engine.parking import (
    ENDS,
    LINE,
    LIVE,
    TRANSITIONS,
    IllegalMove,
    Ledger,
    Policy,
    Room,
    Row,
    State,
    Trigger,
    after,
)
from tests.engine.parking.world import CEILING, GRID, WEIGHTS, World
from tests.nightly import many


def test_the_table_is_closed_and_every_end_can_be_reached():
    assert not any(state in ENDS for state, _ in TRANSITIONS), "an end is an end"
    reached = {State.WAITING}
    while more := {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached:
        reached |= more
    assert reached == set(State)
    assert set(State) == LIVE | LINE | ENDS
    assert len(LIVE) + len(LINE) + len(ENDS) == len(State)
    for state in set(State) - ENDS:
        assert after(state, Trigger.ABORT) is State.ABORTED


def test_every_other_move_is_refused_and_names_both():
    for state, trigger in itertools.product(State, Trigger):
        if (state, trigger) not in TRANSITIONS:
            with pytest.raises(IllegalMove, match=f"{state} cannot {trigger}"):
                after(state, trigger)


def row(id, state, *, live=0, order=0.0, **options) -> Row:
    return Row(id, (order,), state=state, live=live, **options)


@pytest.mark.parametrize(
    ("rows", "kind", "victims"),
    [
        # A prompt goes before a row that decodes, however small it is.
        ([row("d", State.DECODING, live=90), row("p", State.PREFILLING, live=10)], "park", ("p",)),
        # The largest; of equals, the newest.
        ([row("a", State.PREFILLING, live=10), row("b", State.PREFILLING, live=20)], "park", ("b",)),
        ([row("a", State.DECODING, live=9), row("b", State.DECODING, live=9, order=1.0)], "pause", ("b",)),
        # A prompt that was parked too often stays; a row that cannot be stored stays.
        ([row("p", State.PREFILLING, live=9, parks=3), row("d", State.DECODING, live=1)], "pause", ("d",)),
        ([row("d", State.DECODING, live=9, pausable=False), row("e", State.DECODING, live=1)], "pause", ("e",)),
        # The only row is left alone.
        ([row("d", State.DECODING, live=9)], None, ()),
        ([row("d", State.DECODING, live=9, pausable=False), row("w", State.WAITING)], None, ()),
    ],
)
def test_who_gives_memory_back(rows, kind, victims):
    ledger = Ledger(Policy(patience=2))
    for one in rows:
        ledger.add(one)
    ledger.polled("hard")
    action = ledger.relieve("hard")
    assert (action and action.kind, action.ids if action else ()) == (kind, victims)
    assert ledger.relieve("soft") is None
    assert ledger.relieve("emergency").ids == tuple(r.id for r in rows if r.state in LIVE)


def test_the_only_row_is_put_aside_after_patience_or_above_the_ceiling():
    for above, polls in ((False, 2), (True, 1)):
        ledger = Ledger(Policy(patience=2))
        ledger.add(row("d", State.DECODING, live=9))
        for _ in range(polls - 1):
            ledger.polled("hard")
            assert ledger.relieve("hard") is None
        ledger.polled("hard")
        assert ledger.relieve("hard", above_ceiling=above).kind == "pause"


@pytest.mark.parametrize("pressure", ["park", "single-victim"])
def test_one_victim_and_then_a_look(pressure):
    ledger = Ledger(Policy(pressure=pressure, patience=0))
    for name, live in (("a", 5), ("b", 7), ("c", 6)):
        ledger.add(row(name, State.DECODING, live=live, pausable=False))
    ledger.polled("hard")
    assert ledger.relieve("hard").ids == ("b",)
    ledger.move("b", Trigger.ABORT)
    assert ledger.relieve("hard") is None, "its memory is awaited before another goes"
    ledger.polled("hard")
    assert ledger.relieve("hard").ids == ("c",)


@pytest.mark.parametrize(
    "wrong",
    [{"pressure": "panic"}, {"reserve": "all"}, {"max_parks": -1}, {"patience": 1.5}, {"stall_seconds": 0}],
)
def test_policies_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Policy(**wrong)


class Pressure(RuleBasedStateMachine):
    """Arrivals, cancels, pressure from outside and disk faults in any order, against what must always hold."""

    @initialize(
        policy=st.builds(
            Policy,
            reserve=st.sampled_from(["nothing", "prompts", "answers"]),
            max_parks=st.integers(0, 3),
            patience=st.integers(0, 3),
            calm_polls=st.integers(1, 3),
        )
    )
    def begin(self, policy):
        self.world, self.number = World(policy), 0

    @rule(prompt=st.integers(1, 700), answers=st.integers(1, 300))
    def arrive(self, prompt, answers):
        self.number += 1
        fits = self.world.submit(f"r{self.number}", prompt, answers)
        assert fits == (WEIGHTS + prompt + answers + 5 <= self.world.guard.capacity_bytes)

    @precondition(lambda self: self.world.sims)
    @rule(data=st.data())
    def cancel(self, data):
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.sims))))

    @rule(outside=st.sampled_from([0, 0, 300, 700, 800, 850, 900, 1000, 1100]))
    def press(self, outside):
        self.world.meter.outside = outside

    @rule(pool=st.integers(0, 2000))
    def pool(self, pool):
        self.world.meter.pool = pool

    @rule(saves=st.booleans(), loads=st.booleans())
    def disk(self, saves, loads):
        self.world.saves_fail, self.world.loads_fail = saves, loads

    @rule(count=st.integers(1, 40))
    def steps(self, count):
        for _ in range(count):
            self.world.step()
            self.world.check()

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        """When pressure and faults are over everybody ends, and nothing is left behind."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.meter.outside, world.saves_fail, world.loads_fail = 0, False, False
        world.run()
        world.check()
        assert set(world.ends) == set(world.sims)
        assert not world.chains
        assert not world.pins
        assert set(world.ends.values()) <= {
            "finished",
            "cancelled",
            "context_exceeds_capacity",
            "memory_pressure",
            "memory_emergency",
            "memory_stalled",
        }


TestPressure = Pressure.TestCase
TestPressure.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
class TestPressureLong(Pressure.TestCase):
    settings = settings(max_examples=many(1000), stateful_step_count=80, deadline=None)


@pytest.mark.parametrize("reserve", ["nothing", "prompts", "answers"])
def test_three_that_fit_alone_all_finish_without_an_abort(reserve):
    """No pressure from outside and no fault: whatever is reserved, nobody ends but by finishing."""
    world = World(Policy(reserve=reserve))
    for name, prompt in (("a", 390), ("b", 345), ("c", 300)):
        world.submit(name, prompt, 200)
    world.run()
    assert set(world.ends.values()) == {"finished"}
    moves = world.ledger.counts
    put_aside = moves.get(Trigger.PARK, 0) + moves.get(Trigger.STORED, 0)
    assert (put_aside > 0) == (reserve == "nothing"), moves


def test_a_row_that_cannot_stay_tries_less_and_less_often():
    """It came back after `calm_polls` each time, and went again after `patience`: every seven steps."""
    world = World(Policy(patience=4, calm_polls=3))
    world.submit("a", 100, 100)
    while world.sims["a"].answer < 3:
        world.step()
    world.meter.outside = 745  # without the row memory is calm, with it above the hard line
    for _ in range(60):
        world.step()
        world.check()
    assert 3 <= world.ledger.counts[Trigger.STORED] <= 5
    world.meter.outside = 0
    world.run(300)
    assert world.ends == {"a": "finished"}


@pytest.mark.parametrize("reserve", ["nothing", "prompts"])
def test_whoever_was_put_aside_comes_back_with_room_for_others_to_grow(reserve):
    fits = Room(free=100, nothing=90, prompts=95, answers=200, growing=101)
    ledger = Ledger(Policy(reserve=reserve))
    ledger.add(row("runs", State.DECODING, order=1.0))
    ledger.add(row("new", State.WAITING))
    assert ledger.enter("normal", fits).ids == ("new",)
    ledger.add(row("aside", State.PAUSED, order=-1.0, pauses=1))
    assert ledger.enter("normal", fits) is None
    assert ledger.enter("normal", replace(fits, growing=100)).ids == ("aside",)
    assert ledger.enter("normal", replace(fits, growing=99, prompts=101, nothing=101)) is None


def test_newcomers_never_starve_the_first_in_line():
    world = World(Policy(reserve="nothing"))
    world.submit("runs", 500, 100)
    world.step()
    world.submit("large", 600, 100)
    for number in range(40):
        world.submit(f"small{number}", GRID, 4)
    world.run()
    assert world.entered[:2] == ["runs", "large"]
    assert set(world.ends.values()) == {"finished"}


def test_whoever_waits_for_memory_that_never_comes_is_told():
    world = World(Policy(stall_seconds=50))
    world.meter.outside = CEILING
    world.submit("a", 100, 10)
    world.submit("b", 100, 10)
    world.run()
    assert world.ends == {"a": "memory_stalled", "b": "memory_stalled"}
    assert 100 <= world.clock.now() <= 220

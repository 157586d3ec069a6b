"""The guard under a scripted meter and clock: levels, reclaim, chunks."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.engine.memory import DeviceMeter, FakeClock, FakeMeter, Lines, MemoryGuard, Reading

GIB = 1 << 30


def guard(ceiling=100, **options) -> tuple[MemoryGuard, FakeMeter, FakeClock]:
    meter, clock = FakeMeter(1000), FakeClock()
    return MemoryGuard(ceiling, meter=meter, clock=clock, **options), meter, clock


def levels(watch, meter, clock, series, *, seconds=1.0):
    found = []
    for live in series:
        meter.live = live
        clock.time += seconds
        found.append(watch.poll())
    return found


def test_levels_rise_at_their_lines_and_fall_below_them():
    watch, meter, clock = guard(1000, lines=Lines(hysteresis=0.02))
    rising = levels(watch, meter, clock, [0, 849, 850, 949, 950, 999])
    assert rising == ["normal", "normal", "soft", "soft", "hard", "hard"]
    falling = levels(watch, meter, clock, [940, 931, 929, 840, 831, 829])
    assert falling == ["hard", "hard", "soft", "soft", "soft", "normal"], "no level ends on its own line"


def test_weights_of_most_of_the_ceiling_leave_room_below_the_soft_line():
    watch, meter, clock = guard(1000)
    meter.live = 900
    watch.begin(900)
    assert levels(watch, meter, clock, [900, 944, 945, 949, 950]) == ["normal", "normal", "soft", "soft", "hard"]
    assert levels(watch, meter, clock, [949, 948, 944, 943]) == ["hard", "soft", "soft", "normal"]
    assert watch.calm_bytes() == 1


@given(weights=st.integers(0, 949), seen=st.integers(0, 949))
def test_whatever_the_weights_take_a_level_ends_before_they_would_have_to_go(weights, seen):
    watch, meter, clock = guard(1000)
    meter.live = seen
    watch.begin(weights)
    held = min(weights, seen)
    assert watch.held_bytes == held
    meter.live = held
    assert held + watch.calm_bytes() <= watch.capacity_bytes, "soft comes before hard"
    assert watch.calm_bytes() >= int(0.89 * (watch.capacity_bytes - held)) - 1, "as much of the room as without weights"
    assert levels(watch, meter, clock, [999, held])[-1] == "normal"


def test_above_the_ceiling_is_an_emergency_at_the_second_poll_and_far_above_at_the_first():
    watch, meter, clock = guard(1000)
    assert levels(watch, meter, clock, [1000, 1000]) == ["hard", "emergency"]
    assert levels(watch, meter, clock, [0]) == ["normal"], "no latch"
    assert levels(watch, meter, clock, [1000, 999, 1000]) == ["hard", "hard", "hard"]
    assert levels(watch, meter, clock, [0, 1050]) == ["normal", "emergency"]
    # Measuring again while room is made is no second poll.
    levels(watch, meter, clock, [0, 1010])
    assert [watch.poll(force=True) for _ in range(5)] == ["hard"] * 5


def test_between_two_polls_the_meter_is_left_alone():
    watch, meter, clock = guard(interval=0.25)
    watch.poll()
    before = meter.readings
    for _ in range(100):
        clock.time += 0.001
        assert watch.poll() == "normal"
    assert meter.readings == before
    clock.time += 0.25
    meter.live = 99
    assert watch.poll() == "hard"
    meter.live = 0
    assert watch.poll() == "hard"
    assert watch.poll(force=True) == "normal"


def test_trap_47_the_pool_is_given_back_before_anybody_is_refused():
    watch, meter, clock = guard(100)
    meter.live, meter.pool, meter.footprint = 20, 77, 97
    assert watch.free_bytes() == 75, "what the pool holds is free"
    assert watch.poll() == "normal"
    assert (meter.reclaims, meter.pool) == (1, 0)
    # Under load too, each time that it would be taken for pressure, and not otherwise.
    for _ in range(3):
        meter.pool = 70
        clock.time += 1
        assert watch.poll() == "normal"
    assert meter.reclaims == 4
    meter.pool = 10
    clock.time += 1
    watch.poll()
    assert meter.reclaims == 4


def test_trap_59_the_larger_of_arrays_and_process_counts():
    watch, meter, clock = guard(100)
    assert levels(watch, meter, clock, [96]) == ["hard"]
    meter.live, meter.footprint = 0, 96
    clock.time += 1
    assert watch.poll() == "hard"
    assert Reading(live=30, pool=20, footprint=60, limit=100).used == 60
    assert Reading(live=30, pool=20, footprint=60, limit=100).needed == 40
    assert Reading(live=30, pool=20, footprint=40, limit=100).needed == 30


@given(live=st.integers(0, 120), wanted=st.integers(1, 4096), price=st.integers(0, 50), minimum=st.integers(1, 64))
def test_chunks_shrink_to_what_is_free_and_always_get_on(live, wanted, price, minimum):
    watch, meter, _ = guard(100, min_chunk=minimum)
    meter.live = live
    chunk = watch.chunk_for(wanted, lambda tokens: tokens * price)
    assert 1 <= chunk <= wanted
    assert chunk * price <= watch.free_bytes() or chunk <= minimum
    if wanted * price <= watch.free_bytes():
        assert chunk == wanted


@given(st.data())
def test_levels_depend_on_memory_alone_once_it_is_calm(data):
    """Whatever came before: three polls at the same reading below the ceiling give the same level, up to hysteresis."""
    watch, meter, clock = guard(1000)
    levels(watch, meter, clock, data.draw(st.lists(st.integers(0, 1200), max_size=20)))
    live = data.draw(st.integers(0, 999))
    level = levels(watch, meter, clock, [live] * 3)[-1]
    fresh, other, time = guard(1000)
    expected = levels(fresh, other, time, [live])[-1]
    order = ["normal", "soft", "hard"]
    assert level in order
    assert order.index(expected) <= order.index(level) <= order.index(expected) + 1
    if not any(line - 20 <= live < line for line in (850, 950)):
        assert level == expected


def test_the_device_is_measured():
    import mlx.core as mx

    meter = DeviceMeter()
    before = meter.read()
    assert before.limit > 0
    array = mx.ones((1 << 20,))
    mx.eval(array)
    after = meter.read()
    assert after.live - before.live == array.nbytes
    if before.footprint:
        assert after.footprint > 0
    del array
    meter.reclaim()
    assert meter.read().pool == 0
    assert meter.read().live <= before.live


@pytest.mark.parametrize("rows", [1, 8])
def test_a_guard_that_sees_no_pressure_does_next_to_nothing_between_two_steps(loaded, rows):
    """Counted, since no timing is as sure: a Python call takes some tenths of a microsecond, a step milliseconds."""
    import labkit

    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    guard = MemoryGuard(1 << 40, meter=FakeMeter(1 << 40), clock=FakeClock())  # a clock that stands: no poll is due
    engine = labkit.Engine(loaded("llama"), guard=guard)
    for row in range(rows):
        engine.submit(engine.request([1 + row, 2], max_tokens=30, ignore_eos=True))
    while len(engine._executor.lanes.sessions()) < rows or engine._executor.lanes.joining():
        engine.step()
    polls = guard.polls
    sys.setprofile(count)
    try:
        engine._parking.boundary()
        engine._parking.chunk()
    finally:
        sys.setprofile(None)
    assert guard.polls == polls
    assert 0 < calls <= 20 + 4 * rows


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ceiling_bytes": 0}, "ceiling_bytes"),
        ({"ceiling_bytes": 1001}, "ceiling_bytes"),
        ({"ceiling_bytes": 10.5}, "ceiling_bytes"),
        ({"interval": -1}, "interval"),
        ({"interval": float("nan")}, "interval"),
        ({"interval": "x"}, "interval"),
        ({"lines": 5}, "lines"),
        ({"min_chunk": 0}, "min_chunk"),
    ],
)
def test_guards_that_cannot_be_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        MemoryGuard(**{"meter": FakeMeter(1000), **options})


@pytest.mark.parametrize("lines", [{"soft": 0}, {"soft": 0.96}, {"hard": 1.01}, {"emergency": 0.99}, {"hysteresis": 1}])
def test_lines_that_do_not_rise_are_refused(lines):
    with pytest.raises(ValueError, match=r"lines must rise|hysteresis"):
        Lines(**lines)

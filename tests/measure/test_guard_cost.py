"""What a guard costs is found by switching it from step to step; what it does between polls is counted."""

from __future__ import annotations

import sys
import time

import pytest

import labkit
from labkit.engine import MemoryGuard
from labkit.engine.memory import FakeClock, FakeMeter
from labkit.engine.parking import Parking
from labkit.measure.guard_cost import guard_cost
from labkit.measure.parking import request
from tests.tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return labkit.load(write_checkpoint(tmp_path_factory.mktemp("models") / "hybrid", "hybrid"))


def test_between_polls_a_guard_looks_at_a_clock_and_at_little_else(loaded):
    meter, clock = FakeMeter(1 << 50, loaded.weights_bytes), FakeClock()
    engine = labkit.Engine(loaded, guard=MemoryGuard(1 << 50, meter=meter, clock=clock))
    for row in range(4):
        engine.submit(request(loaded, f"row {row}", 8, 60))
    for _ in range(20):
        engine.step()
    assert len(engine.log[-1].rows) == 4
    readings, calls = meter.readings, []

    def watch(frame, event, argument):
        if event == "call":
            calls.append(frame.f_code.co_qualname)

    sys.setprofile(watch)
    try:
        for _ in range(10):
            engine._parking.boundary()
            engine._parking.chunk()
    finally:
        sys.setprofile(None)
    assert meter.readings == readings, "no time has passed"
    assert len(calls) / 10 < 60, calls
    clock.time += 1
    engine._parking.boundary()
    assert meter.readings > readings
    engine.close()


def test_a_guard_that_costs_something_shows(loaded, monkeypatch):
    cost = guard_cost(loaded, blocks=10)
    assert (cost.rows, cost.steps) == (1, 40)
    assert 0 < cost.counted < 0.5
    assert cost.low <= cost.ratio <= cost.high
    boundary = Parking.boundary

    def slow(self):
        until = time.process_time() + 5 * cost.step_seconds
        while time.process_time() < until:
            pass
        boundary(self)

    monkeypatch.setattr(Parking, "boundary", slow)
    monkeypatch.setattr("labkit.measure.guard_cost.COUNTED", 5)
    slowed = guard_cost(loaded, blocks=10)
    assert slowed.low > 2
    assert slowed.counted > 1

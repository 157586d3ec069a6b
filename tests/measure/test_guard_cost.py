"""What a guard costs is found by switching it from step to step."""

from __future__ import annotations

import time

import pytest

import labkit
from labkit.engine.parking import Parking
from labkit.measure.guard_cost import guard_cost
from tests.tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return labkit.load(write_checkpoint(tmp_path_factory.mktemp("models") / "hybrid", "hybrid"))


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

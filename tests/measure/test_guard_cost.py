"""What a guard costs is found by switching it from step to step."""

from __future__ import annotations

import numpy as np
import pytest

import labkit
from labkit.engine.parking import Parking
from labkit.measure import guard_cost
from tests.tiny_models import write_checkpoint


def test_every_other_step_runs_without_the_guard(tmp_path, monkeypatch):
    loaded = labkit.load(write_checkpoint(tmp_path / "llama", "llama"))
    boundary, step, asked, switched = Parking.boundary, guard_cost._step, [0], []

    def counting(self):
        asked[0] += 1
        boundary(self)

    def stepping(engine, guard):
        before = asked[0]
        took = step(engine, guard)
        switched.append((guard is not None, asked[0] - before))
        return took

    monkeypatch.setattr(Parking, "boundary", counting)
    monkeypatch.setattr(guard_cost, "_step", stepping)
    monkeypatch.setattr(guard_cost, "COUNTED", 10)
    cost = guard_cost.guard_cost(loaded, rows=2, blocks=5)
    assert switched == [(True, 1), (False, 0), (False, 0), (True, 1)] * 5
    assert (cost.rows, cost.steps) == (2, 20)
    assert cost.low <= cost.ratio <= cost.high
    assert cost.counted == pytest.approx(cost.boundary_seconds / cost.step_seconds)


@pytest.mark.parametrize("price", [1.0, 1.02])
def test_two_in_a_hundred_show_through_a_drift_and_disturbances(price):
    """A machine that slows down by half on the way, with every tenth step disturbed."""
    rng = np.random.default_rng(4)
    times = 1e6 * np.linspace(1, 1.5, 4000).reshape(1000, 4) * rng.normal(1, 0.03, (1000, 4))
    times[rng.random((1000, 4)) < 0.1] *= 1.8
    times[:, list(guard_cost.BLOCK)] *= price
    ratio, low, high = guard_cost._ratio(times.tolist())
    assert low < ratio < high < low + 0.02
    assert low < price < high
    assert (low > 1) == (price > 1)

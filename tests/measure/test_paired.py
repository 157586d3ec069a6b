"""Paired timing: fair order, an honest interval, lazy arrays computed inside the clock."""

from __future__ import annotations

import random
import statistics
import time

import mlx.core as mx
import pytest

from labkit.measure.paired import compare, median_interval, paired, time_call


def test_order_alternates_and_every_round_times_both() -> None:
    calls: list[str] = []
    result = paired(lambda: calls.append("a"), lambda: calls.append("b"), rounds=4, warm_up=1)
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]
    assert len(result.first) == len(result.second) == 4


def test_a_slower_first_side_gives_a_ratio_above_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def takes(seconds: float) -> None:
        clock[0] += seconds

    result = paired(lambda: takes(0.012), lambda: takes(0.004), rounds=7)
    assert result.ratio == pytest.approx(3)
    assert result.decided
    assert result.first_median == pytest.approx(0.012)
    assert result.second_median == pytest.approx(0.004)


def test_the_clock_is_one_that_runs_while_a_call_sleeps() -> None:
    assert time_call(lambda: time.sleep(0.02)) >= 0.02


def test_drift_cancels() -> None:
    """Both sides slow down alike from round to round: the ratio stays put where the medians move."""
    drift = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    result = compare([2 * d for d in drift], drift)
    assert (result.ratio, result.ratio_low, result.ratio_high) == (2, 2, 2)


def test_interval_covers_the_median_as_often_as_it_says() -> None:
    rng, hits, trials = random.Random(5), 0, 2000
    for _ in range(trials):
        low, high, covered = median_interval(sorted(rng.expovariate(1.0) for _ in range(15)), 0.95)
        hits += low <= 0.6931472 <= high
    assert covered == pytest.approx(0.9648, abs=1e-3)
    assert hits / trials == pytest.approx(covered, abs=0.015)


def test_few_rounds_say_that_their_coverage_is_low() -> None:
    result = compare([1.0, 1.1, 1.2], [1.0, 1.0, 1.0])
    assert result.confidence == 0.75
    assert (result.ratio_low, result.ratio_high) == (1.0, pytest.approx(1.2))
    assert not result.decided


def test_equal_sides_are_rarely_called_different() -> None:
    rng, wrong = random.Random(7), 0
    for _ in range(300):
        sides = [[1 + rng.gauss(0, 0.1) for _ in range(11)] for _ in range(2)]
        wrong += compare(*sides).decided
    assert wrong <= 30


def test_lazy_arrays_are_computed_before_the_clock_stops() -> None:
    a = mx.random.normal((600, 600))
    mx.eval(a)

    def chain() -> dict:
        b = a
        for _ in range(6):
            b = mx.tanh(b @ a)
        return {"nested": [b]}

    chain_seconds = min(time_call(chain) for _ in range(3))
    build_seconds = min(time_call(lambda: chain() and None) for _ in range(3))
    assert chain_seconds > 3 * build_seconds


def test_median_of_the_ratios_not_ratio_of_the_medians() -> None:
    first, second = [1.0, 10.0, 3.0], [1.0, 5.0, 6.0]
    assert compare(first, second).ratio == 1.0
    assert statistics.median(first) / statistics.median(second) != 1.0


@pytest.mark.parametrize(("kwargs", "words"), [({"rounds": 2}, "at least 3"), ({"confidence": 1.0}, "confidence")])
def test_nonsense_is_refused(kwargs: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        paired(lambda: None, lambda: None, **kwargs)

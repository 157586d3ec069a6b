"""Intervals: exact quantiles, and the coverage that they claim, under the correlation that texts have."""

from __future__ import annotations

import math

import numpy as np
import pytest

from labkit.parity.statistics import agreement, block_means, mean_interval, perplexity_change, t_quantile


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (12, 2.1788), (30, 2.0423), (63, 1.9983)],
)
def test_t_quantile_matches_the_printed_table(degrees, quantile):
    assert t_quantile(0.975, degrees) == pytest.approx(quantile, abs=6e-5)


@pytest.mark.parametrize("wrong", [(0.4, 5), (1.0, 5), (0.9, 0)])
def test_t_quantile_refuses_what_has_no_answer(wrong):
    with pytest.raises(ValueError, match="t_quantile wants"):
        t_quantile(*wrong)


def _correlated(rng, n: int, rho: float, heavy: bool = False) -> np.ndarray:
    """An AR(1) series around zero; heavy tails as per-position differences have them."""
    shocks = rng.standard_t(3, n) if heavy else rng.standard_normal(n)
    series = np.empty(n)
    series[0] = shocks[0]
    for i in range(1, n):
        series[i] = rho * series[i - 1] + shocks[i]
    return series


def _coverage(make, interval, trials: int = 500) -> float:
    return sum(0.0 in interval(make()) for _ in range(trials)) / trials


@pytest.mark.parametrize(
    ("n", "rho", "heavy"),
    [(192, 0.0, False), (192, 0.3, False), (512, 0.5, False), (512, 0.3, True)],
)
def test_the_interval_covers_as_often_as_it_says(n, rho, heavy):
    rng = np.random.default_rng(n)
    assert 0.91 <= _coverage(lambda: _correlated(rng, n, rho, heavy), mean_interval) <= 0.98


def test_the_plain_paired_t_interval_would_not():
    """Why blocks are needed at all: under the same correlation the textbook interval is far too narrow."""

    class Plain:
        def __init__(self, series):
            self.mean, self.margin = series.mean(), 1.96 * series.std(ddof=1) / math.sqrt(len(series))

        def __contains__(self, number):
            return abs(number - self.mean) <= self.margin

    rng = np.random.default_rng(0)
    assert _coverage(lambda: _correlated(rng, 512, 0.5), Plain) < 0.82


def test_width_falls_with_the_root_of_the_positions():
    rng = np.random.default_rng(1)
    widths = {n: np.mean([mean_interval(rng.standard_normal(n)).half_width for _ in range(60)]) for n in (192, 3072)}
    assert widths[192] / widths[3072] == pytest.approx(4, rel=0.2)


def test_perplexity_change_is_the_ratio_of_the_two_perplexities():
    rng = np.random.default_rng(2)
    reference = rng.exponential(3.0, 400)
    candidate = reference + rng.normal(0.001, 0.01, 400)
    change = perplexity_change(reference, candidate)
    assert change.value == pytest.approx(np.exp(candidate.mean()) / np.exp(reference.mean()) - 1)
    assert change.low < change.value < change.high
    # Paired: the text's own spread, a thousand times larger, does not enter
    assert change.half_width < 0.005


def test_agreement_at_the_published_figure_is_wide():
    """185 of 192: the interval that the published 96.35 % comes with."""
    flags = np.ones(192)
    flags[[3, 40, 77, 101, 130, 150, 171]] = 0
    share = agreement(flags)
    assert share.value == pytest.approx(0.9635, abs=5e-5)
    assert (share.low, share.high) == (pytest.approx(0.927, abs=2e-3), pytest.approx(0.982, abs=2e-3))


def test_agreement_stays_honest_at_all_of_them():
    share = agreement(np.ones(192))
    assert share.value == 1.0
    assert 0.97 < share.low < 0.99
    assert share.high == 1.0


def test_clustered_disagreement_widens_the_interval():
    scattered, clustered = np.ones(400), np.ones(400)
    scattered[::20] = 0
    clustered[100:120] = 0
    assert agreement(clustered).half_width > 1.5 * agreement(scattered).half_width


def test_too_few_positions_give_no_interval_rather_than_a_false_one():
    lonely = mean_interval(np.array([0.3]))
    assert lonely.value == 0.3
    assert math.isnan(lonely.low)
    assert math.isnan(lonely.high)
    with pytest.raises(ValueError, match="at least one position"):
        mean_interval(np.array([]))


def test_blocks_cover_every_position_once():
    for n in (1, 2, 17, 192, 1000):
        blocks = block_means(np.ones(n))
        assert len(blocks) == max(1, round(math.sqrt(n)))
        assert np.all(blocks == 1)

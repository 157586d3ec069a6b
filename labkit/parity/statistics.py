"""Intervals for quantities that are averages over the positions of a text.

Neighbouring positions share a prefix, a recurrent state and a subject, so their differences are correlated and the
plain paired t-interval is too narrow. The remedy here is the method of batch means: cut the series into about sqrt(n)
blocks of about sqrt(n) neighbours, take each block's mean, and put Student's interval on those few, nearly independent
numbers. It needs no bandwidth and no random numbers, keeps its coverage under correlation that fades within a block,
and its t quantile pays honestly for how few blocks there are (tests/parity/test_statistics.py measures the coverage).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class Interval:
    """An estimate with its two-sided confidence interval; `low` and `high` are NaN if there are too few positions."""

    value: float
    low: float
    high: float
    confidence: float = 0.95

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high


def mean_interval(series: np.ndarray, confidence: float = 0.95) -> Interval:
    """The mean of a correlated series [n] with its interval by batch means."""
    series = _as_series(series)
    mean = float(series.mean())
    blocks = block_means(series)
    if len(blocks) < 2:
        return Interval(mean, math.nan, math.nan, confidence)
    margin = t_quantile(0.5 + confidence / 2, len(blocks) - 1) * _standard_error(blocks)
    return Interval(mean, mean - margin, mean + margin, confidence)


def perplexity_change(nll_reference: np.ndarray, nll_candidate: np.ndarray, confidence: float = 0.95) -> Interval:
    """Relative change of perplexity from reference to candidate, from paired negative log-likelihoods [n] in nats.

    The two perplexities are far noisier than their ratio: they share the text. exp(mean difference) - 1 is that ratio
    less one, and its interval is the mean difference's, carried through the same (monotone) function.
    """
    change = mean_interval(_as_series(nll_candidate) - _as_series(nll_reference), confidence)
    return Interval(math.expm1(change.value), math.expm1(change.low), math.expm1(change.high), confidence)


def agreement(agrees: np.ndarray, confidence: float = 0.95) -> Interval:
    """Share of positions [n] where both sides agree, with Wilson's interval at the effective number of positions.

    Wilson's interval stays inside 0..1 and is honest at 100 %. Runs of disagreement carry less information than the
    same number scattered, so n is divided by the design effect (variance by batch means over the binomial one) where
    that exceeds one.
    """
    agrees = _as_series(agrees)
    n, share = len(agrees), float(agrees.mean())
    binomial = share * (1 - share) / n
    blocks = block_means(agrees)
    effect = _standard_error(blocks) ** 2 / binomial if len(blocks) > 1 and binomial > 0 else 1.0
    n = n / max(1.0, effect)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    margin = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Interval(share, max(0.0, centre - margin), min(1.0, centre + margin), confidence)


def block_means(series: np.ndarray) -> np.ndarray:
    """Means of about sqrt(n) blocks of about sqrt(n) neighbours."""
    return np.array([block.mean() for block in np.array_split(series, max(1, round(math.sqrt(len(series)))))])


def t_quantile(probability: float, degrees: int) -> float:
    """Student's t quantile for whole degrees of freedom, by bisection of the exact distribution function."""
    if not (0.5 <= probability < 1 and degrees >= 1):
        raise ValueError(f"t_quantile wants 0.5 <= probability < 1 and degrees >= 1, not {probability}, {degrees}")
    low, high = 0.0, 1.0
    while t_distribution(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_distribution(middle, degrees) < probability else (low, middle)
    return (low + high) / 2


def t_distribution(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0: the finite sums of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine2 = math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for step in range(1 + odd, degrees, 2):
        total += term
        term *= cosine2 * step / (step + 1)
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inside / 2


def _standard_error(blocks: np.ndarray) -> float:
    return float(blocks.std(ddof=1)) / math.sqrt(len(blocks))


def _as_series(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"an interval needs a series of at least one position, not an array of shape {values.shape}")
    return values

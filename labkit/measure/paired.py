"""Two sides timed in alternating rounds: medians, and their ratio with its spread.

A machine drifts: it warms up, another program wakes. Timing all of one side and then all of the other charges that
drift to the second side. So each round times both sides, in an order that alternates, and the ratio is taken within
the round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Paired:
    """What two sides took.

    Attributes:
        first, second: seconds a call in each round, in order.
        ratio: median over rounds of first / second: above 1 the second side is the faster one.
        ratio_low, ratio_high: an interval that holds the true median ratio with probability `confidence`, from the
            order of the rounds' ratios alone (no assumption about their distribution).
        confidence: the interval's coverage; with few rounds it is less than asked for, and this says how much less.
    """

    first: tuple[float, ...]
    second: tuple[float, ...]
    ratio: float
    ratio_low: float
    ratio_high: float
    confidence: float

    @property
    def first_median(self) -> float:
        return statistics.median(self.first)

    @property
    def second_median(self) -> float:
        return statistics.median(self.second)

    @property
    def decided(self) -> bool:
        """Whether the interval excludes 1: only then may one side be called faster."""
        return self.ratio_low > 1 or self.ratio_high < 1


def paired(
    first: Callable[[], Any], second: Callable[[], Any], *, rounds: int = 9, warm_up: int = 1, confidence: float = 0.95
) -> Paired:
    """Time two callables in `rounds` alternating rounds.

    What a callable returns is evaluated inside its time: MLX arrays, and arrays inside tuples, lists and dicts, are
    computed to the end before the clock stops.

    Args:
        first, second: called without arguments, once a round each.
        rounds: rounds that count, at least 3.
        warm_up: rounds before them that do not (compilation, caches).
        confidence: coverage asked of the ratio's interval, between 0 and 1.

    Raises:
        ValueError: fewer than 3 rounds, or a confidence outside (0, 1).
    """
    if rounds < 3:
        raise ValueError(f"a spread needs at least 3 rounds, not {rounds}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(-warm_up, rounds):
        order = (0, 1) if index % 2 == 0 else (1, 0)
        elapsed = [0.0, 0.0]
        for side in order:
            elapsed[side] = time_call((first, second)[side])
        if index >= 0:
            times[0].append(elapsed[0])
            times[1].append(elapsed[1])
    return compare(times[0], times[1], confidence=confidence)


def compare(first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95) -> Paired:
    """The comparison of two sides' seconds, measured round by round."""
    ratios = sorted(a / b for a, b in zip(first, second, strict=True))
    low, high, covered = median_interval(ratios, confidence)
    return Paired(tuple(first), tuple(second), statistics.median(ratios), low, high, covered)


def median_interval(ordered: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """An interval for the median of what `ordered` (ascending) was drawn from, and its exact coverage.

    The k-th smallest and k-th largest of n values enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < k).
    Of all k whose coverage reaches `confidence` the narrowest is taken; if none does, the whole range.
    """
    n = len(ordered)
    best, tail = 1, 2.0**-n
    covered = 1 - 2 * tail
    for k in range(2, n // 2 + 1):
        tail += math.comb(n, k - 1) * 2.0**-n
        if 1 - 2 * tail < confidence:
            break
        best, covered = k, 1 - 2 * tail
    return ordered[best - 1], ordered[n - best], covered


def time_call(call: Callable[[], Any]) -> float:
    """Seconds that `call` takes, with everything that it returns computed to the end."""
    start = time.perf_counter()
    finish(call())
    return time.perf_counter() - start


def finish(result: Any) -> None:
    """Wait until the MLX arrays inside `result` are computed."""
    import mlx.core as mx

    mx.eval(result)
    if mx.default_device().type == mx.gpu:
        mx.synchronize()

"""Does the cost grow as the model says? Seconds against length, fitted with the terms that the model has alone.

A prompt of L tokens costs a constant, a part that grows with L (matrices, recurrence) and a part that grows with
L squared: every position looks at all before it, in the full-attention layers only. A decode step costs a constant
(weights, state, launches) and a part that grows with the context: its keys and values. The fit gives each term's rate.
A cost that grows faster than the model says (a buffer copied at each step, attention in a layer that should have none)
shows as a rate that is too low beside the other terms', or as points off the curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from labkit.measure.model_costs import ModelCosts

TOLERANCE = 0.25
"""A point may lie so far off the curve: kernels change their form with the length, and do not all fit one rate."""

SLOWEST = 3
"""A growing term may run at this many times fewer units of work a second than the rest: attention that sits in four
times the layers, or a buffer that is copied whole beside being read, takes more."""

SMALLEST = 0.2
"""Of a term that makes less than this share of the longest point, the fit cannot tell the rate."""


@dataclass(frozen=True)
class Term:
    """One term of a cost: `work` at each length (operations or bytes), and the rate at which the fit does it.

    Attributes:
        name: what grows. work: at each length; all ones for the constant.
        seconds: the term's share of each point's time, by the fit.
        rate: work a second; None where the fit needs none of the term.
    """

    name: str
    work: tuple[float, ...]
    seconds: tuple[float, ...]
    rate: float | None


@dataclass(frozen=True)
class Curve:
    """A fitted cost.

    Attributes:
        lengths, seconds: what was measured. terms: of the fit. residuals: (fitted - measured) / measured.
        reasons: why the cost does not grow as the model says; empty if it does.
    """

    lengths: tuple[int, ...]
    seconds: tuple[float, ...]
    terms: tuple[Term, ...]
    residuals: tuple[float, ...]
    reasons: tuple[str, ...]

    @property
    def as_predicted(self) -> bool:
        """Whether the cost grows as the model says."""
        return not self.reasons

    def as_record(self) -> dict[str, Any]:
        """The fit as JSON data."""
        return {
            "as_predicted": self.as_predicted,
            "reasons": self.reasons,
            "terms": {term.name: {"seconds": term.seconds, "rate": term.rate} for term in self.terms},
            "residuals": self.residuals,
        }

    def fitted(self) -> list[float]:
        """Seconds by the fit, at each length."""
        return [sum(term.seconds[index] for term in self.terms) for index in range(len(self.lengths))]


def prefill_curve(costs: ModelCosts, lengths: Sequence[int], seconds: Sequence[float]) -> Curve:
    """The cost of prompts.

    Args:
        costs: of the model.
        lengths, seconds: at least three points.

    Raises:
        ValueError: fewer than three points.
    """
    scores = [costs.prefill_by_part(length).get("attention scores", 0.0) for length in lengths]
    linear = [costs.prefill_operations(n) - s for n, s in zip(lengths, scores, strict=True)]
    work = {"constant": [1.0] * len(lengths), "matrices and recurrence": linear, "attention scores": scores}
    return _fit(work, lengths, seconds, lambda terms: terms[1].rate)


def decode_curve(costs: ModelCosts, contexts: Sequence[int], seconds: Sequence[float]) -> Curve:
    """The cost of decode steps; arguments as for `prefill_curve`."""
    kv = [float(costs.kv_bytes(context)) for context in contexts]
    work = {"weights, state and launches": [1.0] * len(contexts), "keys and values": kv}
    fixed = costs.decode(1).weights + costs.decode(1).state
    return _fit(work, contexts, seconds, lambda terms: fixed / terms[0].seconds[0] if terms[0].seconds[0] else None)


def _fit(
    work: dict[str, Sequence[float]],
    lengths: Sequence[int],
    seconds: Sequence[float],
    usual: Callable[[Sequence[Term]], float | None],
) -> Curve:
    """The fit; `usual` gives the rate that the last term's is held against."""
    if len(lengths) < 3:
        raise ValueError(f"a curve needs at least three lengths, not {len(lengths)}")
    columns = np.array(list(work.values()), dtype=float).T
    times = np.array(seconds, dtype=float)
    # Relative errors: a point of a millisecond counts as much as one of a minute.
    share = _nonnegative(columns / times[:, None])
    terms = []
    for index, (name, values) in enumerate(work.items()):
        parts = tuple(float(value) for value in share[index] * columns[:, index])
        rate = float(1 / share[index]) if share[index] > 0 else None
        terms.append(Term(name, tuple(map(float, values)), parts, rate))
    residuals = tuple(float(error) for error in columns @ share / times - 1)
    reasons = _reasons(terms, usual(terms), lengths, residuals)
    return Curve(tuple(lengths), tuple(map(float, seconds)), tuple(terms), residuals, tuple(reasons))


def _nonnegative(scaled: np.ndarray) -> np.ndarray:
    """The non-negative factors whose products with the columns come nearest to one everywhere: of every subset of the
    columns the least squares, the best that has no negative factor (there are three columns at most)."""
    count = scaled.shape[1]
    best, least = np.zeros(count), np.inf
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(scaled)), rcond=None)
            error = float(np.sum((scaled[:, chosen] @ part - 1) ** 2))
            if np.all(part >= 0) and error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = part
    return best


def _reasons(
    terms: Sequence[Term], usual: float | None, lengths: Sequence[int], residuals: Sequence[float]
) -> list[str]:
    growing, whole = terms[-1], sum(term.seconds[-1] for term in terms)
    reasons = [
        f"at {length:,} tokens the terms of the model miss the measured time by {error:+.0%}"
        for length, error in zip(lengths, residuals, strict=True)
        if abs(error) > TOLERANCE
    ]
    tells = growing.seconds[-1] > SMALLEST * whole
    if growing.rate and usual and usual > SLOWEST * growing.rate and tells:
        reasons.append(
            f"{growing.name} take {growing.seconds[-1]:.3g} s at {lengths[-1]:,} tokens: "
            f"{usual / growing.rate:.0f} times less of their work a second than the rest, so more grows than is counted"
        )
    return reasons

"""Which of bfloat16's roundings moves the logits, and which flips tokens: one at a time, and those of whole engines.

The smooth part is small and known: a rounding moves every logit a little. The other part is not. Where two experts'
scores nearly tie, any rounding before them may choose another expert, which moves the logits of that token, and through
the recurrent state of later ones, by more than all roundings together. `RoundedSide(told=...)` takes the two apart: it
rounds, and takes the exact side's experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from labkit.parity.forms import Form
from labkit.parity.near_ties import bf16_step
from labkit.parity.predictions import FullLogits
from labkit.parity.rounded_graph import POINTS, Choices, RoundedGraph
from labkit.parity.teacher_forcing import teacher_forced

EXACT = frozenset({"logits", "router"})
"""Points at which the specialised graph keeps float32, for 2 bytes more a logit and a score."""

IN_REGISTERS = frozenset({"weights", "head weights", "products"})
"""Points that a step of a few tokens has not: its kernels use weights exactly, and add experts up in registers."""

STREAM = frozenset({"embedding", "stream"})
"""Points that a residual stream in float32 would take away, for 2 bytes more a value of it."""

PROMPTS = frozenset(POINTS) - EXACT
"""Where the specialised graph rounds a prompt."""

STEPS = PROMPTS - IN_REGISTERS
"""And a step of a few tokens."""

CASES: dict[str, tuple[frozenset[str], bool]] = {
    "everything": (frozenset(POINTS), False),
    "everything, experts told": (frozenset(POINTS), True),
    "prompts": (PROMPTS, False),
    "prompts, stream exact": (PROMPTS - STREAM, False),
    "prompts, experts told": (PROMPTS, True),
    "steps, logits rounded": (STEPS | {"logits"}, False),
    "steps": (STEPS, False),
    "steps, stream exact": (STEPS - STREAM, False),
    "steps, experts told": (STEPS, True),
    "steps, stream exact, experts told": (STEPS - STREAM, True),
} | {point: (frozenset({point}), False) for point in POINTS}
"""Where to round, and whether the exact side's experts are taken: whole engines, then each point alone. Router scores
of steps were never rounded, those of prompts and all logits were in "everything"."""


class RoundedSide:
    """The graph as a side of a comparison; whole windows only.

    Args:
        graph: it. points: where to round. name: how reports call it.
        told: another side, whose choice of experts is taken in place of this one's own.

    Attributes:
        chosen: of each window that was predicted, by its tokens' bytes.
    """

    form = Form()

    def __init__(
        self, graph: RoundedGraph, points: Collection[str], name: str = "rounded", told: RoundedSide | None = None
    ):
        self.graph, self.points, self.name, self.told = graph, frozenset(points), name, told
        self.arithmetic = "bfloat16" if points else "float32"
        self.vocab_size = graph.sizes.vocabulary
        self.chosen: dict[bytes, Choices] = {}

    def predict(self, window: np.ndarray) -> Iterator[FullLogits]:
        tokens = np.asarray(window[:-1])
        told = None if self.told is None else self.told.chosen[tokens.tobytes()]
        logits, self.chosen[tokens.tobytes()] = self.graph.logits(tokens, self.points, told)
        yield FullLogits(logits)

    def moved(self, other: RoundedSide, windows: Sequence[np.ndarray]) -> np.ndarray:
        """bool [layers, positions]: where the two sides, which have predicted these windows, took other experts."""
        pairs = [(self.chosen[key], other.chosen[key]) for key in (np.asarray(w[:-1]).tobytes() for w in windows)]
        differ = lambda a, b: (np.sort(a, axis=1) != np.sort(b, axis=1)).any(axis=1)
        return np.concatenate([np.stack([differ(a, b) for a, b in zip(*pair, strict=True)]) for pair in pairs], axis=1)


class Remembered:
    """A side whose answers are kept, for many comparisons with it: four bytes a logit."""

    def __init__(self, side: RoundedSide):
        self.side, self._known = side, {}
        self.name, self.arithmetic, self.form, self.vocab_size = side.name, side.arithmetic, side.form, side.vocab_size

    def predict(self, window: np.ndarray) -> Iterator[FullLogits]:
        key = np.asarray(window).tobytes()
        if key not in self._known:
            self._known[key] = list(self.side.predict(window))
        yield from self._known[key]


def cost(exact: Remembered, case: str, windows: Sequence[np.ndarray]) -> dict[str, Any]:
    """How far a case of `CASES` is from the exact side over these windows, in plain data.

    Returns:
        The figures of `ParityReport`; `moved`: layers of positions that took other experts; `moved_positions`, and the
        mean KL of those and of the others, in nats.
    """
    points, told = CASES[case]
    side = RoundedSide(exact.side.graph, points, case, told=exact.side if told else None)
    report = teacher_forced(exact, side, windows)
    moved, kl = side.moved(exact.side, windows), report.comparison.kl
    anywhere = moved.any(axis=0)
    return {
        "case": case,
        "rounded": [point for point in POINTS if point in points],
        "experts_told": told,
        "positions": report.positions,
        "mean_kl": report.mean_kl,
        "max_kl": report.max_kl,
        "median_of_largest_logit_difference": float(np.median(report.comparison.max_difference)),
        "flips": report.near_ties + report.defects,
        "flips_beyond_a_near_tie": report.defects,
        "moved": int(moved.sum()),
        "moved_positions": int(anywhere.sum()),
        "mean_kl_moved": float(kl[anywhere].mean()) if anywhere.any() else None,
        "mean_kl_others": float(kl[~anywhere].mean()),
        "beyond": [
            {
                "margins": [item.margin_reference, item.margin_candidate],
                "tie_width": item.tie_width,
                "layers_with_other_experts": np.flatnonzero(moved[:, at]).tolist(),
            }
            for item in report.disagreements
            if item.verdict == "defect"
            for at in [sum(len(window) - 1 for window in windows[: item.window]) + item.position]
        ],
    }


def predicted_kl_of_rounded_logits(logits: np.ndarray) -> float:
    """Mean KL in nats that rounding logits [n, V] alone should cost, before anything is rounded.

    An error e of the logits costs half its variance under the distribution p, and a rounded logit is off by anything up
    to half a step s with variance s^2 / 12, independently of the others: the sum over tokens of p (1 - p) s^2 / 24.
    """
    logits = logits.astype(np.float64)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return float((shares * (1 - shares) * bf16_step(logits) ** 2 / 24).sum(axis=1).mean())

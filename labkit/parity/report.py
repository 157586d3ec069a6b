"""The outcome of a comparison: figures with their intervals, every disagreement, and a verdict with its reasons."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from labkit.parity.near_ties import Disagreement
from labkit.parity.predictions import Comparison
from labkit.parity.sides import Side
from labkit.parity.statistics import Interval
from labkit.parity.tolerances import Tolerance

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 20  # disagreements in a printed report; the JSON has them all


@dataclass(frozen=True)
class SideSummary:
    """Who was asked, how, and how well it predicts the text."""

    name: str
    arithmetic: str
    form: str
    perplexity: float

    @classmethod
    def of(cls, side: Side, nll: np.ndarray) -> SideSummary:
        return cls(side.name, side.arithmetic, str(side.form), float(np.exp(nll.mean())))


@dataclass(frozen=True)
class ParityReport:
    """What `teacher_forced` found.

    Attributes:
        model: name of the model.
        reference, candidate: the two sides.
        windows, positions: how much was asked.
        whole_vocabulary_positions: positions where both sides gave all logits; elsewhere KL and the largest difference
            cover the stored best tokens, the text's own token and the rest as one bucket (lower bounds).
        perplexity_change: of candidate against reference, relative (0.0004 is 0.04 %), with its interval.
        top1_agreement: share of positions with the same best token, with its interval.
        mean_kl, max_kl: KL(reference || candidate) in nats.
        max_logit_difference: nats.
        near_ties, defects: how many disagreements are which.
        disagreements: all of them, in order.
        tolerance: what was allowed.
        reasons: why the candidate fails; none if it agrees.
        comparison: the per-position arrays, for plots; not part of the JSON.
    """

    model: str
    reference: SideSummary
    candidate: SideSummary
    windows: int
    positions: int
    whole_vocabulary_positions: int
    perplexity_change: Interval
    top1_agreement: Interval
    mean_kl: float
    max_kl: float
    max_logit_difference: float
    near_ties: int
    defects: int
    disagreements: tuple[Disagreement, ...]
    tolerance: Tolerance
    reasons: tuple[str, ...]
    comparison: Comparison = field(repr=False, compare=False)

    @classmethod
    def of(
        cls, *, comparison: Comparison, disagreements: tuple[Disagreement, ...], tolerance: Tolerance, **known: Any
    ) -> ParityReport:
        """Complete a report from the per-position comparison, and judge it."""
        near = sum(item.verdict == "near tie" for item in disagreements)
        figures = {
            "max_logit_difference": float(comparison.max_difference.max()),
            "max_kl": float(comparison.kl.max()),
            "mean_kl": float(comparison.kl.mean()),
        }
        return cls(
            **known,
            **figures,
            positions=len(comparison),
            whole_vocabulary_positions=int(comparison.whole.sum()),
            near_ties=near,
            defects=len(disagreements) - near,
            disagreements=disagreements,
            tolerance=tolerance,
            reasons=tuple(_reasons(figures, known["perplexity_change"], tolerance, len(disagreements) - near)),
            comparison=comparison,
        )

    @property
    def agrees(self) -> bool:
        return not self.reasons

    @property
    def verdict(self) -> str:
        return "agrees" if self.agrees else "defect"

    def record(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        plain = {name: value for name, value in vars(self).items() if name != "comparison"}
        nested = ("reference", "candidate", "perplexity_change", "top1_agreement", "tolerance")
        plain |= {name: asdict(plain[name]) for name in nested}
        plain["disagreements"] = [asdict(item) for item in self.disagreements]
        return {"verdict": self.verdict, **plain}

    def tables(self) -> list[Table]:
        """The report as tables for people: the figures, then the disagreements if there are any."""
        from labkit import console

        change, top = self.perplexity_change, self.top1_agreement
        partial = "" if self.whole_vocabulary_positions == self.positions else " (lower bound)"
        allowed = self.tolerance
        rows = [
            ("perplexity, reference", f"{self.reference.perplexity:.5g}", "", ""),
            ("perplexity, candidate", f"{self.candidate.perplexity:.5g}", "", ""),
            (
                "perplexity change",
                f"{change.value:+.4%}",
                f"{change.low:+.4%} .. {change.high:+.4%}",
                ""
                if self.tolerance.perplexity_change is None
                else f"{self.tolerance.perplexity_change:.2%}, or zero within",
            ),
            ("same top-1 token", f"{top.value:.2%}", f"{top.low:.2%} .. {top.high:.2%}", ""),
            (f"mean KL{partial}", f"{self.mean_kl:.2e} nat", "", _limit(allowed.mean_kl)),
            (f"max KL{partial}", f"{self.max_kl:.2e} nat", "", _limit(allowed.max_kl)),
            (
                f"max logit difference{partial}",
                f"{self.max_logit_difference:.2e}",
                "",
                _limit(allowed.max_logit_difference),
            ),
            ("disagreements: near ties", str(self.near_ties), "", ""),
            ("disagreements: defects", str(self.defects), "", "0"),
        ]
        sides = " against ".join(
            f"{side.name} ({side.arithmetic}, {side.form})" for side in (self.candidate, self.reference)
        )
        windows = "a window" if self.windows == 1 else f"{self.windows} windows"
        title = f"{self.model or 'model'}: {sides}, {self.positions} positions in {windows}: {self.verdict}"
        tables = [console.table(title, ["figure", "value", "95 % interval", "allowed"], rows)]
        if self.disagreements:
            # Defects first: they are what the reader came for
            shown = sorted(self.disagreements, key=lambda item: item.verdict)[:SHOWN]
            tables.append(
                console.table(
                    f"Disagreements ({len(shown)} of {len(self.disagreements)})",
                    ["verdict", "where", "after", "reference", "candidate", "text", "margins", "tie width"],
                    [_row(item) for item in shown],
                )
            )
        return tables


def _row(item: Disagreement) -> tuple[str, ...]:
    return (
        item.verdict,
        f"{item.window}:{item.position}",
        repr(item.context) if item.context else "",
        repr(item.reference_text) if item.reference_text else str(item.reference_token),
        repr(item.candidate_text) if item.candidate_text else str(item.candidate_token),
        repr(item.label_text) if item.label_text else str(item.label),
        f"{item.margin_reference:.4f}, {item.margin_candidate:.4f}",
        f"{item.tie_width:.4f}",
    )


def _limit(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _reasons(figures: dict[str, float], change: Interval, tolerance: Tolerance, defects: int) -> list[str]:
    # Each written so that a NaN, which compares false with everything, is a defect
    reasons = [
        f"{name.replace('_', ' ')} is {figure:.2e}, beyond {limit:.0e}"
        for name, figure in figures.items()
        if (limit := getattr(tolerance, name)) is not None and not figure <= limit
    ]
    limit = tolerance.perplexity_change
    if limit is not None and not (abs(change.value) <= limit or change.low <= 0 <= change.high):
        reasons.append(f"perplexity changes by {change.value:+.3%}, beyond {limit:.2%} and not by chance")
    if defects:
        reasons.append(f"{defects} disagreement{'s' * (defects > 1)} beyond a near tie")
    return reasons

"""Which disagreements rounding can explain, and which it cannot.

Two correct engines round differently, so they may name different tokens where the two best logits are closer than the
rounding. bfloat16 keeps 8 significant bits: the logits themselves are only known to one step of that grid, 2^(e - 7)
for a logit in [2^e, 2^(e+1)). A flip is a near tie if both sides hold the two tokens within one such step, and never
more than 0.125 nat, which is the step of logits in [16, 32). Anything else is a defect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

LARGEST_TIE = 0.125  # nat

Verdict = Literal["near tie", "defect"]


def bf16_step(logit: np.ndarray | float) -> np.ndarray:
    """Distance between neighbouring bfloat16 numbers at the magnitude of `logit` (0 at zero, NaN at NaN)."""
    magnitude = np.abs(np.asarray(logit, dtype=np.float64))
    mantissa, exponent = np.frexp(magnitude)  # magnitude = mantissa * 2^exponent with 0.5 <= mantissa < 1
    return np.where(mantissa > 0, np.ldexp(1.0, exponent - 8), mantissa)


def tie_width(logit: np.ndarray | float) -> np.ndarray:
    """The widest margin, in nats, that still counts as a tie between logits of this magnitude."""
    return np.minimum(bf16_step(logit), LARGEST_TIE)


def is_near_tie(margin_reference: np.ndarray, margin_candidate: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Whether each disagreement is a near tie.

    Args:
        margin_reference: by how much the reference prefers its own token to the candidate's, in nats, >= 0.
        margin_candidate: by how much the candidate prefers its own token to the reference's, in nats, >= 0.
        magnitude: the largest absolute value among the four logits involved.

    Both margins count: a candidate that is sure of a token which the reference nearly ties is wrong all the same. A
    margin that is not known (NaN: a stored golden keeps only its best tokens) proves nothing and makes a defect.
    """
    margin = np.maximum(margin_reference, margin_candidate)
    return margin <= tie_width(magnitude)  # NaN compares false


@dataclass(frozen=True)
class Disagreement:
    """One position where the two sides' best tokens differ.

    Attributes:
        window, position: where; the token at `position` of the window was to be predicted.
        reference_token, candidate_token: the best token ids of the two sides.
        label: the token that the text has there.
        margin_reference, margin_candidate: as in `is_near_tie`.
        tie_width: the widest margin that would have been a tie here.
        verdict: "near tie" or "defect".
        context, reference_text, candidate_text, label_text: the same in words where a tokenizer was given, else "".
    """

    window: int
    position: int
    reference_token: int
    candidate_token: int
    label: int
    margin_reference: float
    margin_candidate: float
    tie_width: float
    verdict: Verdict
    context: str = ""
    reference_text: str = ""
    candidate_text: str = ""
    label_text: str = ""

"""Teacher forcing: two sides predict every token of a text from the same reference prefix, so that an early difference
cannot change what is asked later, and every position is a fair comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from labkit.parity.near_ties import Disagreement, is_near_tie, tie_width
from labkit.parity.predictions import Comparison, aligned, compare
from labkit.parity.report import ParityReport, SideSummary
from labkit.parity.sides import Side
from labkit.parity.statistics import agreement, perplexity_change
from labkit.parity.tolerances import Tolerance, tolerance_for

CONTEXT_TOKENS = 12


def teacher_forced(
    reference: Side,
    candidate: Side,
    windows: Sequence[np.ndarray],
    *,
    model: str = "",
    decode: Callable[[list[int]], str] | None = None,
    tolerance: Tolerance | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ParityReport:
    """Compare two sides on the same tokens.

    Memory stays bounded whatever the vocabulary and the length: both sides are asked in pieces (`Form.chunk`), and only
    a few numbers a position are kept.

    Args:
        reference, candidate: the oracle, and what is judged by it.
        windows: token windows [n + 1] int32 (`windows_of`, or a golden's own); each starts from fresh caches.
        model: name for the report.
        decode: tokens to text, to show disagreements in words.
        tolerance: what counts as agreement; None takes the one that the coarser of the two arithmetics allows.
        progress: called with (positions done, positions in all).

    Raises:
        ValueError: if the vocabularies differ, or a token lies outside them.
    """
    if reference.vocab_size != candidate.vocab_size:
        raise ValueError(
            f"{reference.name} predicts {reference.vocab_size} tokens and {candidate.name} {candidate.vocab_size}: "
            "these are different models"
        )
    _check_windows(windows, reference.vocab_size)
    total = sum(len(window) - 1 for window in windows)
    parts, places, done = [], [], 0
    for index, window in enumerate(windows):
        labels, position = np.asarray(window[1:], dtype=np.int64), 0
        for left, right in aligned(reference.predict(window), candidate.predict(window)):
            stop = position + len(left)
            parts.append(compare(left, right, labels[position:stop]))
            places += [(index, at) for at in range(position, stop)]
            position = stop
            if progress:
                progress(done + position, total)
        if position != len(labels):
            raise ValueError(f"the sides predicted {position} of the {len(labels)} positions of window {index}")
        done += position
    everything = Comparison.join(parts)
    return ParityReport.of(
        model=model,
        reference=SideSummary.of(reference, everything.nll_reference),
        candidate=SideSummary.of(candidate, everything.nll_candidate),
        windows=len(windows),
        perplexity_change=perplexity_change(everything.nll_reference, everything.nll_candidate),
        top1_agreement=agreement(everything.agrees),
        disagreements=disagreements(everything, windows, places, decode),
        tolerance=tolerance or tolerance_for(reference.arithmetic, candidate.arithmetic),
        comparison=everything,
    )


def disagreements(
    comparison: Comparison,
    windows: Sequence[np.ndarray],
    places: Sequence[tuple[int, int]],
    decode: Callable[[list[int]], str] | None = None,
) -> tuple[Disagreement, ...]:
    """Every position where the best tokens differ, judged; `places` [n] are (window, position in it)."""
    ties = is_near_tie(comparison.margin_reference, comparison.margin_candidate, comparison.magnitude)
    words = (lambda tokens: decode([int(token) for token in tokens])) if decode else (lambda tokens: "")
    found = []
    for at in np.flatnonzero(~comparison.agrees):
        window, position = places[at]
        tokens, best, other = windows[window], comparison.top_reference[at], comparison.top_candidate[at]
        found.append(
            Disagreement(
                window=window,
                position=position,
                reference_token=int(best),
                candidate_token=int(other),
                label=int(tokens[position + 1]),
                margin_reference=float(comparison.margin_reference[at]),
                margin_candidate=float(comparison.margin_candidate[at]),
                tie_width=float(tie_width(comparison.magnitude[at])),
                verdict="near tie" if ties[at] else "defect",
                context=words(tokens[max(0, position + 1 - CONTEXT_TOKENS) : position + 1]),
                reference_text=words([best]),
                candidate_text=words([other]),
                label_text=words([tokens[position + 1]]),
            )
        )
    return tuple(found)


def _check_windows(windows: Sequence[np.ndarray], vocabulary: int) -> None:
    if not windows:
        raise ValueError("there are no windows to compare on")
    for index, window in enumerate(windows):
        if np.ndim(window) != 1 or len(window) < 2:
            raise ValueError(f"window {index} must be a row of at least two tokens, not of shape {np.shape(window)}")
        if np.min(window) < 0 or np.max(window) >= vocabulary:
            raise ValueError(f"window {index} has tokens outside 0..{vocabulary - 1}")

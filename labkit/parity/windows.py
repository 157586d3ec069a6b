"""Reference texts, cut into windows of tokens that both sides read from fresh caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from labkit.resources import data_folder


def windows_of(tokens: Sequence[int] | np.ndarray, positions: int, length: int = 512) -> list[np.ndarray]:
    """Cut a text's tokens into windows that together ask for exactly `positions` predictions.

    A window of n + 1 tokens asks for n predictions, at most `length`; the next window begins with its last token.

    Raises:
        ValueError: if the text is too short, or a number is not positive.
    """
    tokens = np.asarray(tokens, dtype=np.int32)
    _check_sizes(positions, length)
    if len(tokens) < positions + 1:
        raise ValueError(f"{positions} predictions need {positions + 1} tokens; the text has {len(tokens)}")
    starts = range(0, positions, length)
    return [tokens[start : min(start + length, positions) + 1] for start in starts]


def windows_across(
    texts: Sequence[str], encode: Callable[[str], Sequence[int]], positions: int, length: int = 512
) -> list[np.ndarray]:
    """Windows taken from several texts in turn (first window of each, then the second of each, ...), so that any number
    of positions sees as many kinds of text as it can.

    Raises:
        ValueError: if all texts together are too short.
    """
    _check_sizes(positions, length)
    encoded = [np.asarray(encode(text), dtype=np.int32) for text in texts]
    available = [max(0, len(tokens) - 1) for tokens in encoded]
    if sum(available) < positions:
        raise ValueError(f"{positions} positions were asked for; the texts have {sum(available)}: give a longer text")
    chosen: list[np.ndarray] = []
    missing, row = positions, 0
    while missing:
        for tokens in encoded:
            window = tokens[row * length : (row + 1) * length + 1][: missing + 1]
            if len(window) > 1:
                chosen.append(window)
                missing -= len(window) - 1
            if not missing:
                break
        row += 1
    return chosen


def heldout_texts() -> list[str]:
    """labkit's held-out texts, in the order of their names."""
    return [file.read_text(encoding="utf-8") for file in sorted((data_folder() / "heldout").glob("*.txt"))]


def _check_sizes(positions: int, length: int) -> None:
    if positions < 1 or length < 1:
        raise ValueError(f"positions and window length must be at least 1, not {positions} and {length}")

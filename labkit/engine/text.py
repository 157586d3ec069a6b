"""From tokens to the text that may be shown: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.models.detokenizer import Detokenizer


class StopStrings:
    """Finds stop strings in text that comes in pieces.

    The end is where the first stop string is complete, however the text was cut; of two that end there, the longer
    counts. Whatever could still become a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """More text -> (what may be shown, the stop string that ended it or None)."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, _, stop = min(found)
            self._held = ""
            return text[: end - len(stop)], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, once nothing more comes."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class TextStream:
    """One answer's text: a detokenizer, then stop strings."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()):
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    def add(self, token: int) -> tuple[str, str | None]:
        """One token -> (text to show, the stop string that ended the text or None)."""
        return self._stops.feed(self._detokenizer.add(token))

    def finish(self) -> tuple[str, str | None]:
        """The rest, at the end of the tokens."""
        text, stop = self._stops.feed(self._detokenizer.finish())
        return (text, stop) if stop else (text + self._stops.flush(), None)

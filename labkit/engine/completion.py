"""A finished answer, put together from its events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.engine.events import Event, FinishReason, Usage


class RequestFailed(RuntimeError):
    """A request ended with an error. `record` is the error event's: code, message and what else helps."""

    def __init__(self, record: dict[str, Any]):
        super().__init__(f"{record['code']}: {record['message']}")
        self.record = record


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    Attributes:
        text: the whole text.
        tokens: the tokens; an end token of the model is not among them.
        finish_reason: "stop", "length" or "cancelled".
        usage: counts and times.
        seed: of the request's draws: the same seed gives the same answer.
        logprobs: for each token its log-probability and the most likely alternatives, if asked for.
        stop: the stop string, or the id of the end token, that ended it.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    seed: int
    logprobs: tuple[tuple[float, tuple[tuple[int, float], ...] | None], ...] | None = None
    stop: str | int | None = None

    @classmethod
    def of(cls, events: Sequence[Event]) -> Completion:
        """The answer that all events of one request tell.

        Raises:
            RequestFailed: they tell of an error.
        """
        for event in events:
            if event.kind == "error":
                raise RequestFailed(event.error)
        tokens, last = [event for event in events if event.kind == "token"], events[-1]
        scored = any(event.logprob is not None for event in tokens)
        return cls(
            text="".join(event.text for event in events),
            tokens=tuple(event.token for event in tokens),
            finish_reason=last.reason,
            usage=last.usage,
            seed=last.seed,
            logprobs=tuple((event.logprob, event.top_logprobs) for event in tokens) if scored else None,
            stop=last.stop,
        )

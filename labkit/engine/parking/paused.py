"""A paused row as plain data: what must be stored beside its caches so that it goes on as if nothing had been.

Everything else that a row has on the host follows from these: the sampler's keys from seed and step, the tokens that
penalties look at, a stop string's beginning and half a character from the answer so far, replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from labkit.engine.params import SamplingParams
from labkit.engine.request import Request
from labkit.models.chat import Segment

FORMAT = 1


@dataclass(frozen=True)
class PausedRow:
    """A row that was taken out between two steps.

    Attributes:
        request: what was asked.
        seed: of its draws, drawn or given.
        answer: the tokens that its reader has been given.
        cached: tokens of its prompt that were not computed for it.
    """

    request: Request
    seed: int
    answer: tuple[int, ...]
    cached: int = 0

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.request.tokens, *self.answer)

    def as_record(self, stored: int) -> dict[str, Any]:
        """JSON data, beside a chain that holds the first `stored` tokens already."""
        request = self.request
        return {
            "format": FORMAT,
            "id": request.id,
            "prompt": len(request.tokens),
            "rest": list(self.known[stored:]),
            "params": dict(vars(request.params)),
            "priority": request.priority,
            "extra": [list(pair) for pair in request.extra],
            "segments": [list(segment) for segment in request.segments],
            "seed": self.seed,
            "cached": self.cached,
        }

    @classmethod
    def from_record(cls, record: dict[str, Any], stored: Sequence[int]) -> PausedRow:
        """The inverse of `as_record`, with the chain's tokens. The request counts as having arrived now.

        Raises:
            ValueError: a record of another form.
        """
        try:
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']!r}, not {FORMAT}")
            known, prompt, params = (*stored, *record["rest"]), record["prompt"], dict(record["params"])
            if params["logit_bias"]:
                params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
            segments = [Segment(*segment) for segment in record["segments"]]
            request = Request(
                known[:prompt],
                SamplingParams(**params),
                id=record["id"],
                priority=record["priority"],
                extra=[tuple(pair) for pair in record.get("extra", ())],
                segments=segments,
            )
            return cls(request, record["seed"], tuple(known[prompt:]), record["cached"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no record of a paused row: {error!r}") from error

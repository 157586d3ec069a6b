"""What is asked of an engine: plain data."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.engine.params import SamplingParams
from labkit.models.chat import Segment


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        tokens: the prompt.
        params: how to sample and when to stop.
        id: names the request in every event and record.
        priority: higher goes first; equal ones in order of arrival.
        arrival: seconds, `time.monotonic`.
        segments: which part of the prompt came from which message.
    """

    tokens: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    segments: Sequence[Segment] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(int(token) for token in self.tokens))
        object.__setattr__(self, "segments", tuple(self.segments))
        if not self.tokens:
            raise ValueError("the prompt is empty: give at least one token")

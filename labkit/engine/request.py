"""What is asked of an engine: plain data."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from labkit.caches.extra_keys import ExtraKeys, normalised
from labkit.engine.params import SamplingParams
from labkit.models import Tokenizer
from labkit.models.chat import Segment

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        tokens: the prompt.
        params: how to sample and when to stop.
        id: names the request in every event and record.
        priority: higher goes first, as if it had come earlier (`labkit.engine.scheduler`); else in order of arrival.
        arrival: seconds, `time.monotonic`.
        segments: which part of the prompt came from which message.
        extra: what the prompt's states depend on besides its tokens (an image's digest, an adapter's name): a string
            from the first token on, or a pair (first token, string). Requests share computed beginnings, live or
            stored, up to where their tokens or their keys differ.
    """

    tokens: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    priority: int = 0
    arrival: float = field(default_factory=time.monotonic)
    segments: Sequence[Segment] = ()
    extra: ExtraKeys = ()

    def __post_init__(self) -> None:
        tokens = self.tokens.tolist() if hasattr(self.tokens, "tolist") else self.tokens
        if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
            raise ValueError(f"a prompt's tokens must be a sequence of token ids, not {tokens!r}")
        try:
            object.__setattr__(self, "tokens", tuple(index(token) for token in tokens))
        except TypeError as error:
            raise ValueError(f"a prompt's tokens must be token ids: {error}") from error
        object.__setattr__(self, "segments", tuple(self.segments))
        object.__setattr__(self, "extra", normalised(self.extra))
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {self.params!r}")
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"id must be a non-empty string, not {self.id!r}")
        for name in ("priority", "arrival"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, not {value!r}")
        if not self.tokens:
            raise ValueError("the prompt is empty: give at least one token")


def make_request(
    tokenizer: Tokenizer,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    tools: list[dict[str, Any]] | None = None,
    thinking: bool = True,
    priority: int = 0,
    extra: ExtraKeys = (),
    **sampling: Any,
) -> Request:
    """Text, tokens or messages -> a request with its tokens; `sampling` overrides single options."""
    params = replace(params or SamplingParams(), **sampling)
    if isinstance(prompt, dict):
        raise ValueError("a prompt is text, tokens or a list of messages: put the one message into a list")
    if isinstance(prompt, str):
        return Request(tokenizer.encode(prompt), params, priority=priority, extra=extra)
    if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], dict):
        chat = tokenizer.render_chat(list(prompt), tools, thinking)
        return Request(chat.tokens, params, priority=priority, segments=chat.segments, extra=extra)
    return Request(prompt, params, priority=priority, extra=extra)

"""What is asked of an engine: plain data."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

from labkit.caches.extra_keys import ExtraKeys, normalised
from labkit.engine.params import SamplingParams, finite, is_unicode
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
        if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes, bytearray)):
            raise ValueError(f"a prompt's tokens must be a sequence of token ids, not {tokens!r}")
        try:
            object.__setattr__(self, "tokens", tuple(index(token) for token in tokens))
        except TypeError as error:
            raise ValueError(f"a prompt's tokens must be token ids: {error}") from error
        try:
            object.__setattr__(self, "segments", tuple(self.segments))
        except TypeError as error:
            raise ValueError(f"segments must be a sequence, not {self.segments!r}") from error
        object.__setattr__(self, "extra", normalised(self.extra))
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, not {self.params!r}")
        if not isinstance(self.id, str) or not self.id or not is_unicode(self.id):
            raise ValueError(f"id must be a non-empty string of valid Unicode, not {self.id!r}")
        for name in ("priority", "arrival"):
            number = finite(getattr(self, name))
            if number is None:
                raise ValueError(f"{name} must be a finite number, not {getattr(self, name)!r}")
            object.__setattr__(self, name, number)
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
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {params!r}; single options go by name (temperature=0.7)")
    params = replace(params, **sampling)
    if isinstance(prompt, dict):
        raise ValueError("a prompt is text, tokens or a list of messages: put the one message into a list")
    if isinstance(prompt, str):
        return Request(tokenizer.encode(prompt), params, priority=priority, extra=extra)
    if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], dict):
        chat = tokenizer.render_chat(list(prompt), tools, thinking)
        return Request(chat.tokens, params, priority=priority, segments=chat.segments, extra=extra)
    return Request(prompt, params, priority=priority, extra=extra)

"""One request's life in the engine: all that is kept about it, apart from arrays of the model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from labkit.engine.events import Event, FinishReason, Usage
from labkit.engine.request import Request
from labkit.engine.sampling import RowSampler
from labkit.engine.step import Constraint, ReadToken
from labkit.engine.text import TextStream
from labkit.models import LoadedModel


class Session:
    """What has been computed, chosen, read and shown of one request.

    Its caches live elsewhere (`executor`, `batch`): a session is never the owner of a row's memory, and outlives it.

    Attributes:
        prefilled: prompt tokens in the caches; its last token is fed when decoding begins.
        cached: of those, tokens that were not computed for this request.
        fed: tokens in the caches.
        chosen: tokens chosen so far; while it decodes, `fed == prompt + chosen - 1` at every boundary between steps.
        answer: the tokens that the host has read; `chosen - len(answer)` is 1 at every boundary, 0 before the first.
        host_first: whether each token must be read before the next forward is launched.
        joined: whether a step's record has named it.
        cancelled: asked to end; it does so at the next boundary.
        finished: it has ended, and what it holds may be let go.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        request: Request,
        *,
        clock: Callable[[], float],
        on_event: Callable[[Event], None] | None = None,
        constraint: Constraint | None = None,
    ):
        self.request, self.on_event, self.constraint = request, on_event, constraint
        self.seed = secrets.randbits(48) if request.params.seed is None else request.params.seed
        self.joined = self.cancelled = self.finished = False
        self.prefilled = self.cached = self.fed = self.chosen = 0
        self.answer: list[int] = []
        self._sampler: RowSampler | None = None
        self._tokenizer, self._clock = loaded.tokenizer, clock
        self._text = TextStream(loaded.tokenizer.detokenizer(), request.params.stop)
        eos = frozenset() if request.params.ignore_eos else loaded.tokenizer.eos_token_ids
        self._ends = eos | frozenset(request.params.stop_token_ids)
        self._submitted = clock()
        self._started: float | None = None
        self._first_read: float | None = None
        self._last_read: float | None = None

    # -- where it stands -----------------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """The request's."""
        return self.request.id

    @property
    def to_prefill(self) -> int:
        """Prompt tokens that are computed before decoding begins: all but the last."""
        return len(self.request.tokens) - 1

    @property
    def total(self) -> int:
        """Tokens that the caches hold at most."""
        return len(self.request.tokens) + self.request.params.max_tokens

    @property
    def host_first(self) -> bool:
        return self.constraint is not None

    @property
    def on_last(self) -> bool:
        """Whether the next token to be read is the last by length."""
        return len(self.answer) + 1 >= self.request.params.max_tokens

    @property
    def unread(self) -> bool:
        """Whether a token is chosen that the host has not seen."""
        return self.chosen > len(self.answer)

    @property
    def sampler(self) -> RowSampler:
        """Its way from logits to a token. Made when first used, in the thread that owns the arrays; after a pause,
        made anew (`forget_sampler`) it stands where it stood."""
        if self._sampler is None:
            known = (*self.request.tokens, *self.answer)[: self.fed]
            self._sampler = RowSampler(self.request.params, self.seed, known, self._xtc_special_tokens())
        return self._sampler

    def forget_sampler(self) -> None:
        """Let go of the sampler's arrays; it is made anew from what the host knows."""
        self._sampler = None

    def _xtc_special_tokens(self) -> list[int]:
        if self.request.params.xtc_probability == 0:
            return []
        newline = self._tokenizer.encode("\n", add_special_tokens=False)
        return [*newline, *sorted(self._tokenizer.eos_token_ids)]

    # -- what happens to it --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Work on it begins."""
        if self._started is None:
            self._started = self._clock()

    def restored(self, tokens: int) -> None:
        """The caches hold this many prompt tokens that were computed for somebody else."""
        self.prefilled = self.fed = self.cached = tokens

    def computed(self, end: int) -> Event:
        """The prompt is in the caches up to `end`."""
        self.prefilled = self.fed = end
        return self._event("prefill", done=end, total=len(self.request.tokens))

    def launched(self) -> None:
        """A token was fed, and the next one chosen."""
        self.fed += 1
        self.chosen += 1

    def take(self, read: ReadToken) -> list[Event]:
        """What a token on the host means: text, or an end."""
        if self.constraint is not None:
            self.constraint.accept(read.token)
        is_last, index = self.on_last, len(self.answer)
        self._last_read = self._clock()
        self._first_read = self._first_read or self._last_read
        if read.token in self._ends:
            return self._finish("stop", stop=read.token)
        text, stop = self._text.add(read.token)
        event = self._event(
            "token", text=text, token=read.token, index=index, logprob=read.logprob, top_logprobs=read.top
        )
        self.answer.append(read.token)
        if stop is not None:
            return [event, *self._finish("stop", stop=stop, flush=False)]
        return [event, *self._finish("length")] if is_last else [event]

    def submitted(self) -> Event:
        """The first event."""
        return self._event("submitted", seed=self.seed, total=len(self.request.tokens))

    def cancel(self) -> list[Event]:
        """End now; the text so far is kept."""
        return self._finish("cancelled")

    def fail(self, code: str, error: BaseException, **details: Any) -> list[Event]:
        """End with an error."""
        if self.finished:
            return []
        message = str(error) or type(error).__name__
        record = {"code": code, "message": message, "type": type(error).__name__, **details}
        return [self._event("error", error=record), *self._finish("error")]

    def _finish(self, reason: FinishReason, *, stop: str | int | None = None, flush: bool = True) -> list[Event]:
        if self.finished:
            return []
        self.finished = True
        text, late_stop = self._text.finish() if flush else ("", None)
        if late_stop is not None and reason == "length":
            reason, stop = "stop", late_stop
        self.constraint = self._sampler = None
        return [self._event("finished", text=text, reason=reason, stop=stop, seed=self.seed, usage=self._usage())]

    def _usage(self) -> Usage:
        first, last, started = self._first_read, self._last_read, self._started
        return Usage(
            prompt_tokens=len(self.request.tokens),
            cached_tokens=self.cached,
            completion_tokens=len(self.answer),
            first_token_seconds=None if first is None else first - self._submitted,
            prefill_seconds=0.0 if started is None else (first or self._clock()) - started,
            decode_seconds=0.0 if first is None else last - first,
        )

    def _event(self, kind: str, **values: Any) -> Event:
        return Event(kind=kind, request=self.request.id, time=self._clock(), **values)


def engine_clock() -> Callable[[], float]:
    """Seconds since now."""
    begin = time.perf_counter()
    return lambda: time.perf_counter() - begin

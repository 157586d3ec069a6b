"""One request's life in the engine: all that is kept about it, apart from arrays of the model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from labkit.engine.events import Event, EventKind, FinishReason, Usage
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
        chunks: the widths in which they were computed.
        cached: of those, tokens that were not computed for this request.
        fed: tokens in the caches.
        chosen: tokens chosen so far; while it decodes, `fed == prompt + chosen - 1` at every boundary between steps.
        answer: the tokens that the host has read; `chosen - len(answer)` is 1 at every boundary, 0 before the first.
        host_first: whether each token must be read before the next forward is launched.
        joined: whether a step's record has named it.
        put_aside: its caches are gone for a while, and its stream is open.
        cancelled: asked to end; it does so at the next boundary.
        finished: it has ended, and what it holds may be let go.
        reason: why.
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
        self.joined = self.put_aside = self.cancelled = self.finished = False
        self.prefilled = self.cached = self.fed = self.chosen = 0
        self.reason: FinishReason | None = None
        self.chunks: list[int] = []
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
    def known(self) -> tuple[int, ...]:
        """Prompt and answer, as far as the host has read it."""
        return (*self.request.tokens, *self.answer)

    def token_at(self, position: int) -> int:
        """One of the known tokens."""
        prompt = self.request.tokens
        return prompt[position] if position < len(prompt) else self.answer[position - len(prompt)]

    @property
    def to_prefill(self) -> int:
        """Tokens that are computed in chunks before decoding begins (again): all that are known but the last."""
        return len(self.request.tokens) + len(self.answer) - 1

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
            before = self.known[: self.fed]
            self._sampler = RowSampler(self.request.params, self.seed, before, self._xtc_special_tokens())
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

    def restored(self, tokens: int, chunks: Sequence[int]) -> None:
        """The caches hold this many tokens that were computed before, for another request or before a park."""
        self.prefilled = self.fed = tokens
        self.chunks = list(chunks)
        if not self.put_aside:
            self.cached = tokens

    def computed(self, end: int) -> Event:
        """The prompt is in the caches up to `end`."""
        self.chunks.append(end - self.prefilled)
        self.prefilled = self.fed = end
        return self._event("prefill", done=end, total=len(self.known))

    def launched(self) -> None:
        """A token was fed, and the next one chosen."""
        self.fed += 1
        self.chosen += 1

    def take(self, read: ReadToken) -> list[Event]:
        """What a token on the host means: text, or an end. What fails in it (the row's logits, its processors, its
        constraint) ends this row alone."""
        # The error is told, never raised here: a traceback's frames would keep the step's arrays alive.
        if read.error is not None:
            return self.fail("step_failed", read.error)
        try:
            return self._taken(read)
        except Exception as error:
            return self.fail("step_failed", error)

    def _taken(self, read: ReadToken) -> list[Event]:
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

    def aside(self, kind: EventKind, kept: int) -> Event:
        """Its caches are gone, its stream stays open; `kept` tokens of what they held need not be computed again."""
        self.put_aside = True
        if kind == "parked":
            self.start_over()
        return self._event(kind, done=kept, total=self.to_prefill + 1)

    def start_over(self) -> None:
        """Nothing is in the caches any more."""
        self.prefilled = self.fed = 0
        self.forget_sampler()

    def take_up(self, seed: int, answer: Sequence[int], cached: int) -> None:
        """Stand where a row stood that was paused in another process: all but the last of what is known is in its
        stored caches."""
        self.seed, self.cached, self.put_aside = seed, cached, True
        for token in answer:
            self._text.add(token)
            if self.constraint is not None:
                self.constraint.accept(token)
            self.answer.append(token)
        self.chosen = len(self.answer)
        self.fed = self.to_prefill

    def back(self, kept: int) -> Event:
        """It goes on, with `kept` tokens in its caches."""
        self.put_aside = False
        return self._event("resumed", done=kept, total=self.to_prefill + 1)

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
        self.reason = reason
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


def check_hooks(on_event: Any, constraint: Any = None) -> None:
    """Raise a ValueError unless they are a callback and a constraint, or None."""
    if on_event is not None and not callable(on_event):
        raise ValueError(f"on_event is called with each event, and {on_event!r} cannot be called")
    if constraint is not None and not all(callable(getattr(constraint, name, None)) for name in ("mask", "accept")):
        raise ValueError(f"a constraint has mask() and accept(token), and {constraint!r} has not")

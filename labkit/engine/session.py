"""One request's life in the engine: its prompt chunk by chunk, then its answer token by token, then its end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from labkit.caches import Cache
from labkit.engine.events import Event, FinishReason, StepRecord, Usage
from labkit.engine.request import Request
from labkit.engine.sampling import RowSampler
from labkit.engine.step import Constraint, DecodingRow, ReadToken
from labkit.engine.text import TextStream
from labkit.models import LoadedModel, Rows

CLEAR_EVERY = 256  # tokens between returns of unused memory to the system, as in mlx-lm


class Session:
    """`step` does one forward at most and says what happened; after `finished` the session holds no array."""

    def __init__(
        self,
        loaded: LoadedModel,
        request: Request,
        *,
        chunk: int,
        clock: Callable[[], float],
        on_event: Callable[[Event], None] | None = None,
        constraint: Constraint | None = None,
    ):
        self.request, self.on_event, self.finished = request, on_event, False
        self.cancelled = False
        self.seed = secrets.randbits(48) if request.params.seed is None else request.params.seed
        self._loaded, self._chunk, self._clock, self._constraint = loaded, chunk, clock, constraint
        self._text = TextStream(loaded.tokenizer.detokenizer(), request.params.stop)
        eos = frozenset() if request.params.ignore_eos else loaded.tokenizer.eos_token_ids
        self._ends = eos | frozenset(request.params.stop_token_ids)
        self._caches: list[Cache] | None = None
        self._row: DecodingRow | None = None
        self._prefilled = self._emitted = 0
        self._unreported: list[Event] = []  # of a token that was read in a step that has not ended
        self._submitted = clock()
        self._started = self._first_read = self._last_read = None

    # -- one step ------------------------------------------------------------------------------------------------------

    def step(self, index: int) -> tuple[list[Event], StepRecord]:
        """The next chunk of the prompt, or the next token."""
        begin = self._clock()
        joins = () if self._caches is not None else (self.request.id,)
        operations = (("new", self.request.id),) if joins else ()
        if joins:
            self._caches, self._started = self._loaded.model.make_caches(), begin
        if self._prefilled < len(self.request.tokens) - 1:
            events, plan = self._prefill()
        elif self._row is None:
            events, plan = self._first_token()
        else:
            events, plan = self._next_token()
        record = StepRecord(
            index=index,
            rows=(self.request.id,),
            operations=operations,
            joins=joins,
            leaves=(self.request.id,) if self.finished else (),
            cache_bytes=0 if self._caches is None else sum(cache.nbytes for cache in self._caches),
            started=begin,
            seconds=self._clock() - begin,
            **plan,
        )
        return events, record

    def _prefill(self) -> tuple[list[Event], dict[str, Any]]:
        start, last = self._prefilled, len(self.request.tokens) - 1
        end = min(start + self._chunk, last)
        tokens = self.request.tokens[start:end]
        self._loaded.model(mx.array([tokens], dtype=mx.int32), self._caches, Rows.single(start), logits=None)
        mx.eval([cache.state for cache in self._caches])
        mx.clear_cache()
        self._prefilled = end
        plan = _plan("prefill", tokens, start, chunk=(start, end))
        return [self._event("prefill", done=end, total=len(self.request.tokens))], plan

    def _first_token(self) -> tuple[list[Event], dict[str, Any]]:
        tokens = self.request.tokens
        sampler = RowSampler(self.request.params, self.seed, tokens[:-1], self._xtc_special_tokens())
        self._row = DecodingRow(self._loaded.model, self._caches, sampler, self._prefilled, self._constraint)
        self._row.start(tokens[-1])
        self._prefilled = len(tokens)
        return [], _plan("decode", tokens[-1:], len(tokens) - 1)

    def _next_token(self) -> tuple[list[Event], dict[str, Any]]:
        row = self._row
        position = row.fed
        is_last = self._emitted + 1 >= self.request.params.max_tokens
        ahead = not row.host_first and not is_last
        choice = row.launch() if ahead else row.pending
        read = row.read(choice)
        self._unreported = self._take(read, is_last)
        if row.host_first and not self.finished:
            row.launch()
        events, self._unreported = self._unreported, []
        if row.fed == position:
            return events, _plan("read", (), position)
        return events, _plan("decode", (read.token,), position)

    def _take(self, read: ReadToken, is_last: bool) -> list[Event]:
        """What a token on the host means: text, or an end."""
        self._last_read = self._clock()
        self._first_read = self._first_read or self._last_read
        if read.token in self._ends:
            return self._finish("stop", stop=read.token)
        text, stop = self._text.add(read.token)
        event = self._event(
            "token", text=text, token=read.token, index=self._emitted, logprob=read.logprob, top_logprobs=read.top
        )
        self._emitted += 1
        if self._emitted % CLEAR_EVERY == 0:
            mx.clear_cache()
        if stop is not None:
            return [event, *self._finish("stop", stop=stop, flush=False)]
        return [event, *self._finish("length")] if is_last else [event]

    # -- ends ----------------------------------------------------------------------------------------------------------

    def cancel(self) -> list[Event]:
        """End now; the text so far is kept."""
        return self._finish("cancelled")

    def fail(self, code: str, error: BaseException, **details: Any) -> list[Event]:
        """End with an error, after what was read before it."""
        message = str(error) or type(error).__name__
        record = {"code": code, "message": message, "type": type(error).__name__, **details}
        events, self._unreported = self._unreported, []
        return [*events, self._event("error", error=record), *self._finish("error")]

    def submitted(self) -> Event:
        """The first event."""
        return self._event("submitted", seed=self.seed, total=len(self.request.tokens))

    def _finish(self, reason: FinishReason, *, stop: str | int | None = None, flush: bool = True) -> list[Event]:
        if self.finished:
            return []
        self.finished = True
        text, late_stop = self._text.finish() if flush else ("", None)
        if late_stop is not None and reason == "length":
            reason, stop = "stop", late_stop
        self._caches = self._row = self._constraint = None
        return [self._event("finished", text=text, reason=reason, stop=stop, seed=self.seed, usage=self._usage())]

    def _usage(self) -> Usage:
        first, last, started = self._first_read, self._last_read, self._started
        return Usage(
            prompt_tokens=len(self.request.tokens),
            completion_tokens=self._emitted,
            first_token_seconds=None if first is None else first - self._submitted,
            prefill_seconds=0.0 if started is None else (first or self._clock()) - started,
            decode_seconds=0.0 if first is None else last - first,
        )

    def _event(self, kind: str, **values: Any) -> Event:
        return Event(kind=kind, request=self.request.id, time=self._clock(), **values)

    def _xtc_special_tokens(self) -> list[int]:
        if self.request.params.xtc_probability == 0:
            return []
        tokenizer = self._loaded.tokenizer
        return [*tokenizer.encode("\n", add_special_tokens=False), *sorted(tokenizer.eos_token_ids)]


def _plan(kind: str, tokens: tuple[int, ...], position: int, chunk: tuple[int, int] | None = None) -> dict[str, Any]:
    return {
        "kind": kind,
        "shape": (1, len(tokens)) if tokens else (0, 0),
        "positions": (position,),
        "lengths": (len(tokens),),
        "inputs": (tuple(tokens),),
        "chunk": chunk,
    }


def engine_clock() -> Callable[[], float]:
    """Seconds since now."""
    begin = time.perf_counter()
    return lambda: time.perf_counter() - begin

"""The engine: requests in, events out. Serial inside: one request at a time, in order of priority and arrival."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from labkit.engine.capacity import Budget, Capacity
from labkit.engine.completion import Completion
from labkit.engine.events import Event, StepRecord
from labkit.engine.params import SamplingParams
from labkit.engine.request import Request
from labkit.engine.session import Session, engine_clock
from labkit.engine.step import Constraint
from labkit.models import LoadedModel

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


class Engine:
    """Runs requests on one model. All calls but `cancel` belong to one thread, which owns every array.

    Args:
        loaded: the model.
        prefill_chunk: prompt tokens computed in one step at most.
        capacity_bytes: what weights and caches may take; the device's working set by default.
        log_limit: step records kept; the oldest half is dropped when there are more.

    Attributes:
        log: what every step did, as plain data.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        prefill_chunk: int | None = None,
        capacity_bytes: int | None = None,
        log_limit: int = 1 << 16,
    ):
        counts = {"prefill_chunk": prefill_chunk, "capacity_bytes": capacity_bytes, "log_limit": log_limit}
        for name, count in counts.items():
            if count is not None and (type(count) is not int or count < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {count!r}")
        self.loaded = loaded
        self.log: list[StepRecord] = []
        self._chunk = prefill_chunk or 2048
        self._budget = Budget(loaded, capacity_bytes)
        self._clock = engine_clock()
        self._log_limit, self._steps = log_limit, 0
        self._waiting: list[Session] = []
        self._active: Session | None = None
        self._undelivered: list[Event] = []
        self._stepping = False
        # Reentrant: a signal's handler may cancel while the thread that it interrupts holds the lock.
        self._lock = threading.RLock()
        self._wired = _wire_memory()

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: Request,
        *,
        on_event: Callable[[Event], None] | None = None,
        constraint: Constraint | None = None,
    ) -> str:
        """Queue a request; `step` or `run` work on it.

        Args:
            request: what to do.
            on_event: called with each of its events, in the engine's thread. If it raises, its request ends.
            constraint: which tokens may follow; its request reads each token before the next forward.

        Returns:
            The request's id.

        Raises:
            ValueError: tokens that the model does not have, or an id that is in use.
            CapacityError: a request that can never fit.
        """
        known = self.loaded.model.vocab_size
        for token in (*request.tokens, *request.params.stop_token_ids, *(request.params.logit_bias or ())):
            if not 0 <= token < known:
                raise ValueError(f"token {token} is not in the model's vocabulary of {known}")
        if any(session.request.id == request.id for session in self._sessions()):
            raise ValueError(f"request {request.id!r} is here already")
        self._budget.admit(len(request.tokens), request.params.max_tokens, chunk=self._chunk)
        session = Session(
            self.loaded, request, chunk=self._chunk, clock=self._clock, on_event=on_event, constraint=constraint
        )
        with self._lock:
            self._waiting.append(session)
            self._waiting.sort(key=lambda s: (-s.request.priority, s.request.arrival))
        self._undelivered += self._deliver(session, [session.submitted()])
        return request.id

    def cancel(self, request_id: str) -> bool:
        """End a request at the next boundary between steps; callable from any thread. False if there is none."""
        with self._lock:
            session = next((s for s in self._sessions() if s.request.id == request_id), None)
            if session is None:
                return False
            session.cancelled = True
            return True

    def capacity(self) -> Capacity:
        """The numbers by which requests are admitted."""
        return self._budget.capacity

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs or is to be delivered."""
        return self._active is None and not self._waiting and not self._undelivered

    def close(self) -> None:
        """End every request as cancelled and give the wired memory back. Events that came before can still be read."""
        for session in self._sessions():
            session.cancelled = True
        self._undelivered += self._retire_cancelled()
        if self._wired is not None:
            mx.synchronize()
            mx.set_wired_limit(self._wired)
            self._wired = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- work ----------------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One forward at most; returns what happened since the last call.

        Raises:
            RuntimeError: called from inside a callback.
        """
        if self._stepping:
            raise RuntimeError("step was called from inside a callback: let the callback return first")
        self._stepping = True
        try:
            events, self._undelivered = self._undelivered, []
            events += self._retire_cancelled()
            if self._active is None and self._waiting:
                with self._lock:
                    self._active = self._waiting.pop(0)
            if self._active is not None:
                events += self._advance(self._active)
                events += self._retire_cancelled()
            return events
        finally:
            self._stepping = False

    def run(self) -> Iterator[Event]:
        """Work until every request has finished."""
        while not self.idle:
            yield from self.step()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = True,
        constraint: Constraint | None = None,
        **sampling: Any,
    ) -> Iterator[Event]:
        """Submit a prompt and yield its events. Closing the iterator cancels it.

        Args:
            prompt: text as it is; tokens; or messages, rendered by the model's chat template.
            params: how to sample; `sampling` overrides single options.
            tools: descriptions of tools, for messages.
            thinking: whether the template asks for thinking, for messages.
            constraint: which tokens may follow.

        Raises:
            ValueError, CapacityError: as `submit`, at once.
            RuntimeError: from the iterator, if `run` or `step` has handed the request's end to somebody else.
        """
        request = self.request(prompt, params, tools=tools, thinking=thinking, **sampling)
        self.submit(request, constraint=constraint)
        events = self._events_of(request.id)
        # Into its try block: a generator that was never started would let go of its request without cancelling it.
        next(events)
        return events

    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer; arguments as for `stream`.

        Raises:
            RequestFailed: it ended with an error.
        """
        return Completion.of(list(self.stream(prompt, params, **options)))

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        thinking: bool = True,
        **sampling: Any,
    ) -> Request:
        """A prompt in any form -> a request with its tokens."""
        params = replace(params or SamplingParams(), **sampling)
        if isinstance(prompt, dict):
            raise ValueError("a prompt is text, tokens or a list of messages: put the one message into a list")
        if isinstance(prompt, str):
            return Request(self.loaded.tokenizer.encode(prompt), params)
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], dict):
            chat = self.loaded.tokenizer.render_chat(list(prompt), tools, thinking)
            return Request(chat.tokens, params, segments=chat.segments)
        return Request(prompt, params)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _sessions(self) -> list[Session]:
        return ([self._active] if self._active else []) + self._waiting

    def _holds(self, request_id: str) -> bool:
        """Whether the request has still something to say."""
        ids = [*(session.request.id for session in self._sessions()), *(event.request for event in self._undelivered)]
        return request_id in ids

    def _advance(self, session: Session) -> list[Event]:
        try:
            events, record = session.step(self._steps)
        except Exception as error:  # one request's failure is its own, whatever it is
            events = session.fail("step_failed", error)
        except BaseException:
            session.cancel()
            self._remove(session)
            raise
        else:
            self._steps += 1
            self.log.append(record)
            if len(self.log) > self._log_limit:
                del self.log[: len(self.log) - self._log_limit // 2]
        if session.finished:
            self._remove(session)
        return self._deliver(session, events)

    def _deliver(self, session: Session, events: list[Event]) -> list[Event]:
        """Hand events to the request's callback; a callback that raises ends its request."""
        delivered = []
        for event in events:
            delivered.append(event)
            if session.on_event is None:
                continue
            try:
                session.on_event(event)
            except BaseException as error:  # a callback may raise anything
                session.on_event = None
                if not isinstance(error, Exception):  # an exit or an interrupt is the caller's to see
                    session.cancel()
                    self._remove(session)
                    raise
                if not session.finished:
                    delivered += session.fail("callback_failed", error)
                    self._remove(session)
                    break
        return delivered

    def _retire_cancelled(self) -> list[Event]:
        events = []
        for session in [s for s in self._sessions() if s.cancelled]:
            self._remove(session)
            events += self._deliver(session, session.cancel())
        return events

    def _remove(self, session: Session) -> None:
        with self._lock:
            if self._active is session:
                self._active = None
            elif session in self._waiting:
                self._waiting.remove(session)
        # Who leaves between two steps (cancelled, failed) left after the last one that it took part in.
        id = session.request.id
        if self.log and id in self.log[-1].rows and id not in self.log[-1].leaves:
            self.log[-1] = replace(self.log[-1], leaves=(*self.log[-1].leaves, id))

    def _events_of(self, request_id: str) -> Iterator[Event]:
        finished = False
        try:
            yield
            while not finished:
                events = self.step()
                mine = [event for event in events if event.request == request_id]
                # What belongs to others waits for whoever calls step or run for them.
                self._undelivered += [event for event in events if event.request != request_id]
                finished = any(event.kind == "finished" for event in mine)
                yield from mine
                if not finished and not self._holds(request_id):
                    raise RuntimeError(f"the end of request {request_id} was read elsewhere, by run or step")
        finally:
            if not finished and self.cancel(request_id):
                others = [event for event in self._retire_cancelled() if event.request != request_id]
                self._undelivered += others


def _wire_memory() -> int | None:
    """On Metal, keep the model resident as mlx-lm does; returns the limit to set back, None elsewhere."""
    with contextlib.suppress(AttributeError):
        limit = mx.device_info().get("max_recommended_working_set_size") if mx.metal.is_available() else None
        return mx.set_wired_limit(limit) if limit else None
    return None

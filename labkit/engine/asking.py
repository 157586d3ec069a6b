"""The ways to ask an engine for an answer and wait for it: a stream, an async stream, the whole text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from labkit.caches.extra_keys import ExtraKeys
from labkit.engine.completion import Completion
from labkit.engine.events import Event
from labkit.engine.params import SamplingParams
from labkit.engine.request import Prompt, Request, make_request
from labkit.engine.step import Constraint
from labkit.engine.worker import Worker
from labkit.models import LoadedModel


class Asking(ABC):
    """What rests on `submit`, `cancel` and `step` alone."""

    loaded: LoadedModel
    _worker: Worker

    @abstractmethod
    def submit(
        self,
        request: Request,
        *,
        on_event: Callable[[Event], None] | None = None,
        constraint: Constraint | None = None,
    ) -> str:
        """Queue a request."""

    @abstractmethod
    def step(self) -> list[Event]:
        """One forward at most."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether nothing waits, runs or is to be delivered."""

    @abstractmethod
    def _events_of(self, request_id: str) -> Iterator[Event]: ...

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
        priority: int = 0,
        extra: ExtraKeys = (),
        constraint: Constraint | None = None,
        **sampling: Any,
    ) -> Iterator[Event]:
        """Submit a prompt and yield its events. Closing the iterator cancels it.

        Args:
            prompt: text as it is; tokens; or messages, rendered by the model's chat template.
            params: how to sample; `sampling` overrides single options.
            tools: descriptions of tools, for messages.
            thinking: whether the template asks for thinking, for messages.
            priority: higher goes first; see `labkit.engine.scheduler`.
            extra: what the prompt's states depend on besides its tokens; see `Request`.
            constraint: which tokens may follow.

        Raises:
            ValueError, CapacityError: as `submit`, at once.
            RuntimeError: from the iterator, if `run` or `step` has handed the request's end to another caller.
        """
        request = self.request(
            prompt, params, tools=tools, thinking=thinking, priority=priority, extra=extra, **sampling
        )
        self.submit(request, constraint=constraint)
        events = self._events_of(request.id)
        # Into its try block: a generator that was never started would let go of its request without cancelling it.
        next(events)
        return events

    def astream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> AsyncIterator[Event]:
        """The same for `async for`, any number at a time; the engine works in a thread of its own from then on.

        Raises:
            ValueError, CapacityError: as `submit`, with the first event.
        """
        return self._worker.stream(self, prompt, params, **options)

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
        priority: int = 0,
        extra: ExtraKeys = (),
        **sampling: Any,
    ) -> Request:
        """A prompt in any form -> a request with its tokens. Arguments as for `stream`."""
        options = {"tools": tools, "thinking": thinking, "priority": priority, "extra": extra}
        return make_request(self.loaded.tokenizer, prompt, params, **options, **sampling)

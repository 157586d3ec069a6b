"""A thread of the engine's own, for callers that await: it alone steps, and it alone touches arrays.

MLX binds unevaluated arrays to the thread that made them, so work never moves: the thread starts with the first
`astream` and lives as long as its engine.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from labkit.engine.events import Event

if TYPE_CHECKING:
    from labkit.engine.engine import Engine

Job = tuple[Callable[[], Any], Future]


class Worker:
    """Runs an engine's steps while there is work, and sleeps while there is none."""

    def __init__(self, engine: Engine):
        self._engine = weakref.ref(engine)
        self._thread: threading.Thread | None = None
        self._wake = threading.Condition()
        weakref.finalize(engine, _notify, self._wake).atexit = False
        self._jobs: deque[Job] = deque()
        self._closed = False

    def check_owner(self) -> None:
        """Raises RuntimeError in any thread but the one that works, once there is one."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            raise RuntimeError("the engine works in a thread of its own since astream was used: use astream")

    async def stream(self, engine: Engine, prompt: Any, params: Any = None, **options: Any) -> AsyncIterator[Event]:
        """The events of one request; leaving the loop cancels it. Its reader keeps the engine alive."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue()
        constraint = options.pop("constraint", None)
        request = engine.request(prompt, params, **options)

        def on_event(event: Event) -> None:
            # Whose loop has gone does not read any more: raising ends the request, unless this is its end.
            if event.kind == "finished" and loop.is_closed():
                return
            loop.call_soon_threadsafe(events.put_nowait, event)

        submit = lambda engine: engine.submit(request, on_event=on_event, constraint=constraint)
        finished = False
        try:
            await asyncio.wrap_future(self._ask(submit))
            while not finished:
                event = await events.get()
                finished = event.kind == "finished"
                yield event
        finally:
            if not finished:
                engine.cancel(request.id)

    def _ask(self, job: Callable[[Engine], Any]) -> Future:
        """Have a job done between two steps."""
        future: Future = Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._jobs.append((job, future))
            if self._thread is None:
                self._thread = threading.Thread(target=_work, args=(self,), name="labkit-engine")
                self._thread.start()
            self._wake.notify()
        return future

    def close(self) -> None:
        """End the thread after the step that it is in."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()
        self._thread = None

    def _next_jobs(self) -> list[Job] | None:
        """Wait until there is something to do; None when that is nothing any more."""
        with self._wake:
            while True:
                engine = self._engine()
                # A program that ends is not kept waiting, nor is the thread killed in the middle of a computation.
                if self._closed or engine is None or not threading.main_thread().is_alive():
                    return None
                if self._jobs or not engine.idle:
                    jobs, self._jobs = list(self._jobs), deque()
                    return jobs
                del engine
                self._wake.wait(timeout=0.5)  # the program's end wakes no thread


def _notify(wake: threading.Condition) -> None:
    with wake:
        wake.notify()


def _work(worker: Worker) -> None:
    try:
        while (jobs := worker._next_jobs()) is not None:
            if (engine := worker._engine()) is None:
                return
            while jobs:
                _do(engine, *jobs.pop(0))
            try:
                engine.step()
            except BaseException as error:  # a waiting reader must get an event, whatever happened
                engine.fail_all(error)
            del engine
    finally:
        # MLX makes streams for each thread. Those that a thread leaves behind may abort the program at its end
        # ("terminate called without an active exception").
        mx.clear_streams()


def _do(engine: Engine, job: Callable[[Engine], Any], future: Future) -> None:
    try:
        future.set_result(job(engine))
    except BaseException as error:
        future.set_exception(error.with_traceback(None))  # its frames would keep the engine alive

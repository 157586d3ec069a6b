"""The engine: requests in, events out. Any number at a time, each joining and leaving between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from labkit.engine.asking import Asking
from labkit.engine.assembly import assemble
from labkit.engine.capacity import Capacity
from labkit.engine.events import Event, StepRecord
from labkit.engine.executor import cannot_batch
from labkit.engine.hooks import PrefixStore
from labkit.engine.memory import MemoryGuard
from labkit.engine.parking import PausedRow, Policy
from labkit.engine.request import Request
from labkit.engine.scheduler import Plan
from labkit.engine.session import Session, check_hooks
from labkit.engine.step import Constraint
from labkit.engine.wired import WiredMemory
from labkit.engine.worker import Worker
from labkit.kernels.recording import Machine
from labkit.models import LoadedModel


class Engine(Asking):
    """Runs requests on one model, as many together as fit.

    Between two steps requests join, once their prompts have been computed in chunks, and leave, when they have
    finished. `scheduler` says in which order, `admission` how many at a time. All calls but `cancel` and `astream`
    belong to one thread, which owns every array; with `astream` that is a thread of the engine's own.

    Args:
        loaded: the model.
        prefill_chunk: prompt tokens computed in one step at most, so long a running row may have to wait; a store of
            prefixes brings its own.
        capacity_bytes: what weights and caches may take; the device's working set by default.
        max_rows: requests that are worked on at a time, at most.
        pack_prompts: whether several short prompts may be computed in one forward. Where kernels round differently for
            other shapes, False makes a prompt's state independent of its neighbours.
        prefixes: states of prompts' beginnings to start from, and where to leave new ones.
        guard: watches memory; with one, what is used decides who starts, and under pressure requests are parked and
            paused instead of ended. Its hard line bounds `capacity_bytes`.
        policy: what is done under pressure.
        kv: "paged" keeps keys and values in blocks of shared pools (`labkit.engine.paging`): no padding, one copy of
            what prompts have in common, admission in blocks.
        block_tokens, pool_bytes: tokens of a block, and what all blocks may take; for "paged".
        log_limit: step records kept; the oldest half is dropped when there are more.
        replay: whether rows that stay together for a few steps decode from a recording (`labkit.engine.replay`), on
            CUDA; or where to replay them.

    Attributes:
        runs_alone: why requests do not decode together with this model, None if they do.
        paged: the pools of "paged", with their numbers; else None.
        replays: what was recorded, in how many seconds, and why rows of a form are not replayed.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        prefill_chunk: int | None = None,
        capacity_bytes: int | None = None,
        max_rows: int = 32,
        pack_prompts: bool = True,
        prefixes: PrefixStore | None = None,
        guard: MemoryGuard | None = None,
        policy: Policy | None = None,
        kv: Literal["contiguous", "paged"] = "contiguous",
        block_tokens: int | None = None,
        pool_bytes: int | None = None,
        log_limit: int = 1 << 16,
        replay: bool | Machine = True,
    ):
        parts = assemble(
            loaded,
            prefill_chunk=prefill_chunk,
            capacity_bytes=capacity_bytes,
            max_rows=max_rows,
            pack_prompts=pack_prompts,
            prefixes=prefixes,
            guard=guard,
            policy=policy,
            kv=kv,
            block_tokens=block_tokens,
            pool_bytes=pool_bytes,
            log_limit=log_limit,
            replay=replay,
        )
        self.loaded, self.guard, self.prefixes, self.paged = loaded, guard, prefixes, parts.paged
        self.runs_alone = cannot_batch(loaded)
        self._clock, self._admission, self._scheduler = parts.clock, parts.admission, parts.scheduler
        self._executor, self._journal, self._parking = parts.executor, parts.journal, parts.parking
        self._register, self._delivery = parts.register, parts.delivery
        self.replays = parts.executor.lanes.replays
        self._stepping = False
        self._worker = Worker(self)
        self._wired = WiredMemory()

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
            ValueError: tokens that the model does not have, an id that is in use, or what is no callback or constraint.
            CapacityError: a request that can never fit.
            RuntimeError: a thread of the engine's own is at work, and this is another.
        """
        self._worker.check_owner()
        check_hooks(on_event, constraint)
        known = self.loaded.model.vocab_size
        for token in (*request.tokens, *request.params.stop_token_ids, *(request.params.logit_bias or ())):
            if not 0 <= token < known:
                raise ValueError(f"token {token} is not in the model's vocabulary of {known}")
        if request.id in self._register.live:
            raise ValueError(f"request {request.id!r} is here already")
        self._admission.check(request)
        session = Session(self.loaded, request, clock=self._clock, on_event=on_event, constraint=constraint)
        self._register.add(session)
        self._delivery.tell([(session, session.submitted())])
        return request.id

    def resume_paused(
        self,
        *,
        on_event: Callable[[Event], None] | None = None,
        constraint: Callable[[Request], Constraint | None] = lambda request: None,
    ) -> list[PausedRow]:
        """Take up the rows that an engine before this one had paused when its process ended, whatever ended it.

        Each stands in line again under its old id, and goes on exactly where it stood: its events begin with
        "submitted", and its tokens with the first that its reader has not been given. Rows that a living engine holds
        in the same store are left alone.

        Args:
            on_event: called with each of their events.
            constraint: which tokens may follow, for requests that had one; it is told the answer so far.

        Returns:
            The rows: requests, seeds and answers so far.

        Raises:
            ValueError: an engine without a guard or a store, or what is no callback.
            RuntimeError: as `submit`.
        """
        self._worker.check_owner()
        check_hooks(on_event)
        if self._parking is None or self.prefixes is None:
            raise ValueError("nothing can have been paused: give the engine a guard and a store of prefixes")

        def make(row: PausedRow) -> Session:
            session = Session(
                self.loaded, row.request, clock=self._clock, on_event=on_event, constraint=constraint(row.request)
            )
            session.take_up(row.seed, row.answer, row.cached)
            return session

        found = self._parking.stored(make)
        for session in found:
            self._register.add(session, paused=True)
            self._delivery.tell([(session, session.submitted())])
        return [PausedRow(s.request, s.seed, tuple(s.answer), s.cached) for s in found]

    def cancel(self, request_id: str) -> bool:
        """End a request at the next boundary between steps; callable from any thread. False if there is none."""
        return self._register.cancel(request_id)

    @property
    def log(self) -> list[StepRecord]:
        """What the last steps did, as plain data."""
        return self._journal.records

    def capacity(self) -> Capacity:
        """The numbers by which requests are admitted."""
        return self._admission.capacity

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of all requests that hold some."""
        return self._executor.cache_bytes

    def memory(self) -> dict[str, Any] | None:
        """Memory, requests by state and what pressure has cost so far, JSON data; None without a guard."""
        return None if self._parking is None else self._parking.status()

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs or is to be delivered."""
        return not self._register.live and self._delivery.empty

    def close(self) -> None:
        """End every request as cancelled and give the wired memory back. Events that came before can still be read."""
        self._worker.close()
        for session in self._register.live.values():
            session.cancelled = True
        self._retire_cancelled()
        self._wired.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- work ----------------------------------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One forward at most; returns what happened since the last call.

        Raises:
            RuntimeError: called from inside a callback, or while a thread of the engine's own is at work.
        """
        self._worker.check_owner()
        if self._stepping or self._delivery.telling:
            raise RuntimeError("step was called from inside a callback: let the callback return first")
        self._stepping = True
        try:
            self._delivery.tell()
            self._retire_cancelled()
            chunk = None
            if self._parking is None:
                self._admit()
            else:
                self._parking.boundary()
                self._retire_cancelled()
                chunk = self._parking.chunk()
            plan = self._scheduler.plan(*self._executor.views(), chunk)
            if plan.kind != "idle":
                self._execute(plan)
                self._retire_cancelled()
            return self._delivery.take()
        finally:
            self._stepping = False

    # -- inside --------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let requests start while they fit, in order: none overtakes one that has to wait for room."""
        live = [session.total for session in self._executor.sessions()]
        events: list[tuple[Session, Event]] = []
        while (first := self._register.first()) and self._fits_now(first, live):
            self._executor.start(self._register.take_first(), events)
            live.append(first.total)
            self._executor.keep_room()
        self._delivery.tell(events)

    def _fits_now(self, session: Session, live: list[int]) -> bool:
        request = session.request
        return self._admission.fits_now(session.total, live, request.tokens, request.extra)

    def _execute(self, plan: Plan) -> None:
        events: list[tuple[Session, Event]] = []
        try:
            record = self._executor.execute(plan, self._journal.steps, events)
            if record is not None:
                self._journal.add(record)
        finally:
            self._delivery.keep(events)
        self._delivery.tell()

    def _retire_cancelled(self) -> None:
        for session in self._register.cancelled():
            self._end(session, session.cancel())

    def fail_all(self, error: BaseException) -> None:
        """End every request with this error."""
        for session in list(self._register.live.values()):
            self._end(session, session.fail("engine_failed", error))

    def _end(self, session: Session, events: list[Event]) -> None:
        self._register.drop(session)
        self._delivery.tell([(session, event) for event in events])

    def _events_of(self, request_id: str) -> Iterator[Event]:
        finished, session = False, self._register.live[request_id]
        try:
            yield
            while not finished:
                events = self.step()
                mine = [event for event in events if event.request == request_id]
                # Events of other requests wait for the next caller of step or run.
                self._delivery.put_back(event for event in events if event.request != request_id)
                finished = any(event.kind == "finished" for event in mine)
                yield from mine
                if not finished and request_id not in self._register.live and not self._delivery.holds(request_id):
                    raise RuntimeError(f"the end of request {request_id} was read elsewhere, by run or step")
        finally:
            if not finished:
                if self.cancel(request_id):
                    self._retire_cancelled()
                self._delivery.forget(request_id)
                self._register.ended(session)

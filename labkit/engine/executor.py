"""Carries plans out: the one owner of every array. What fails in a step ends the rows that the step was done for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from labkit.caches import Cache
from labkit.engine.batch import DecodingBatch, Operation
from labkit.engine.events import StepRecord
from labkit.engine.hooks import PrefixStore
from labkit.engine.lanes import Events, Lanes
from labkit.engine.paging import Paging
from labkit.engine.prefill import Prefill
from labkit.engine.sampling import Choice
from labkit.engine.scheduler import Plan, Prompt
from labkit.engine.session import Session
from labkit.kernels.recording import Machine
from labkit.models import LoadedModel

CLEAR_EVERY = 256  # steps between returns of unused memory to the system
ROWS = frozenset({"merge", "extend", "filter", "extract"})


def cannot_batch(loaded: LoadedModel) -> str | None:
    """Why rows of this model cannot run together, or None if they can."""
    limits = loaded.model.limits
    lacking = {operation: kinds for operation, kinds in limits.items() if operation in ROWS}
    if loaded.model.batches and not lacking:
        return None
    if lacking:
        detail = ", ".join(f"{' and '.join(kinds)} caches cannot {name}" for name, kinds in lacking.items())
    else:
        detail = f"{' and '.join(limits.get('batch', ('its architecture',)))} takes no rows of several lengths"
    return f"requests of {loaded.name} run one by one, taking turns: {detail}"


class Executor:
    """Prompts, lanes, and one forward a step for some of them.

    Args:
        loaded: the model.
        grid: tokens of a chunk.
        pack: whether several prompts may share a forward.
        clock: seconds since the engine began.
        prefixes: where states of prompts come from and go to, if there is such a store.
        paging: where caches come from, if they lie in pools.
        machine: where decoding rows may be replayed.
        room: (requests at work, bytes of the recording that there is) -> bytes that a recording may take.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        grid: int,
        pack: bool,
        clock: Callable[[], float],
        prefixes: PrefixStore | None = None,
        paging: Paging | None = None,
        machine: Machine | None = None,
        room: Callable[[list[Session], int], int],
    ):
        shared = cannot_batch(loaded) is None
        self._model, self._clock, self._steps = loaded.model, clock, 0
        self._paging, self._room = paging, room
        # Between two records too; a step that fails leaves what it did for the next one to tell.
        self._operations: list[Operation] = []
        self.prefill = Prefill(
            loaded.model,
            grid=grid,
            pack=pack and shared,
            operations=self._operations,
            prefixes=prefixes,
            paging=paging,
        )
        self.lanes = Lanes(loaded.model, shared=shared, operations=self._operations, machine=machine)

    def sessions(self) -> list[Session]:
        """Every request that has started and not finished."""
        return [*self.prefill.sessions, *self.lanes.sessions()]

    def views(self) -> tuple[list[Prompt], list[str]]:
        """Prompts and lanes, as the scheduler sees them."""
        return self.prefill.views(), self.lanes.names()

    @property
    def cache_bytes(self) -> int:
        """Bytes of all live caches."""
        return self.prefill.nbytes + self.lanes.nbytes

    def _room_now(self) -> int:
        return self._room(self.sessions(), self.lanes.replays.nbytes)

    def keep_room(self) -> None:
        """Somebody has started: a recording that does not fit beside all goes."""
        held = self.lanes.replays.nbytes
        if held and held > self._room_now():
            self.lanes.spare()

    # -- rows come and go ----------------------------------------------------------------------------------------------

    def start(self, session: Session, events: Events) -> None:
        """Begin with a request."""
        try:
            self._arrive(self.prefill.start(session))
        except Exception as error:  # the request's own
            self._fail([session], error, events)

    def park(self, session: Session) -> None:
        """Let a prompt's caches go."""
        self.prefill.drop(session)
        self._operations.append(("park", session.id))

    def pause(self, session: Session, events: Events) -> DecodingBatch | None:
        """Take a decoding row out, with serial caches and its one pending token; None if it does not decode. Where that
        fails, the rows that it decoded with end with it, which is appended to `events`."""
        together = [batch.sessions for batch in self.lanes.batches() if session in batch.sessions]
        try:
            row = self.lanes.leave(session)
        except Exception as error:
            self._fail([row for rows in together for row in rows if not row.finished], error, events)
            return None
        if row is not None:
            self._operations.append(("pause", session.id))
        return row

    def resume(self, rows: DecodingBatch) -> None:
        """Let a row that was taken out decode on."""
        self._operations += [("resume", id) for id in rows.ids]
        self.lanes.arrive(rows)

    def resume_from(self, session: Session, caches: list[Cache], pending: Choice) -> DecodingBatch:
        """Let a row decode on whose caches were put away; returns it."""
        if self._paging is not None:
            self.lanes.come_back()
            caches = self._paging.take(session, caches)
        rows = DecodingBatch(self._model, [session], caches, pending)
        self.resume(rows)
        return rows

    def drop(self, session: Session) -> None:
        """Let go of what a finished request held."""
        self.prefill.drop(session)
        self.lanes.drop(session)

    def _arrive(self, ready: list[DecodingBatch]) -> None:
        for rows in ready:
            self.lanes.arrive(rows)

    # -- one step ------------------------------------------------------------------------------------------------------

    def execute(self, plan: Plan, index: int, events: Events) -> StepRecord | None:
        """Carry a plan out; returns the step's record, None if it failed as a whole.

        Args:
            plan: what to do.
            index: number of the step.
            events: what happens is appended here, whatever becomes of the step.

        Raises:
            BaseException: what is no `Exception` (an interrupt) passes; the rows of the step are cancelled.
        """
        begin = self._clock()
        rows = self._rows_of(plan)
        try:
            told = self._carry_out(plan, rows, events)
        except Exception as error:
            self._fail(rows, error, events)
            return None
        except BaseException:
            for session in rows:
                events += [(session, event) for event in session.cancel()]
                self.drop(session)
            raise
        for session in rows:
            if session.finished:
                self.drop(session)
        self._steps += 1
        if self._steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        return StepRecord(
            index=index,
            operations=self._take_operations(),
            joins=self._take_joins(rows),
            leaves=tuple(session.id for session in rows if session.finished),
            cache_bytes=self.cache_bytes,
            started=begin,
            seconds=self._clock() - begin,
            **told,
        )

    def _rows_of(self, plan: Plan) -> list[Session]:
        """Whom the step is done for."""
        if plan.kind == "decode":
            return self.lanes.rows_of(plan.lane)
        by_id = {session.id: session for session in self.prefill.sessions}
        return [by_id[id] for id in plan.rows]

    def _carry_out(self, plan: Plan, rows: list[Session], events: Events) -> dict[str, Any]:
        # A recording reads the pools that it was opened with, and would keep them while a prompt writes new ones.
        shared = self._paging is not None and bool(self.prefill.sessions)
        if plan.kind == "decode":
            return self.lanes.decode(plan.lane, events, None if shared else self._room_now)
        if shared:
            for lost, error in self.lanes.come_back():
                self._fail(lost, error, events)
        happened, told, ready = self.prefill.run(rows, plan.spans)
        events += happened
        self._arrive(ready)
        return told

    def _fail(self, sessions: list[Session], error: Exception, events: Events) -> None:
        for session in sessions:
            events += [(session, event) for event in session.fail("step_failed", error)]
            self.drop(session)

    def _take_operations(self) -> tuple[Operation, ...]:
        done = tuple(self._operations)
        self._operations[:] = self.prefill.after
        self.prefill.after.clear()
        return done

    def _take_joins(self, rows: list[Session]) -> tuple[str, ...]:
        joins = [session for session in rows if not session.joined]
        for session in joins:
            session.joined = True
        return tuple(session.id for session in joins)

"""What a keeper decides, done to an engine's requests: caches go and come, streams stay open."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from labkit.engine.admission import Admission
from labkit.engine.batch import DecodingBatch
from labkit.engine.events import Event
from labkit.engine.executor import Executor
from labkit.engine.hooks import PrefixStore
from labkit.engine.memory import Estimates, MemoryGuard
from labkit.engine.parking.paused import PausedRow
from labkit.engine.parking.policy import MARGIN_STEPS, Room
from labkit.engine.sampling import Choice
from labkit.engine.session import Session
from labkit.engine.step import read

Tell = Callable[[Iterable[tuple[Session, Event]]], None]

MESSAGES = {
    "memory_pressure": "memory ran short and nobody could be put aside: this request ended so that others can go on",
    "memory_emergency": "memory is above its ceiling: every request that held some has ended; send it again",
    "memory_stalled": "this request waited for memory that never became free, and nothing else ran",
}


@dataclass
class Costs:
    """What putting aside and coming back have cost so far.

    Attributes:
        parks, pauses, resumes: how often.
        moved_bytes: of caches that were stored and restored.
        pause_seconds, resume_seconds: how long the engine stood still for it.
        recomputed_tokens: prompt tokens that parks threw away.
    """

    parks: int = 0
    pauses: int = 0
    resumes: int = 0
    moved_bytes: int = 0
    pause_seconds: float = 0.0
    resume_seconds: float = 0.0
    recomputed_tokens: int = 0


class EngineHands:
    """The `Hands` of a keeper.

    Args:
        executor: owns prompts, lanes and every array.
        admission: knows sizes.
        estimates: knows what steps need.
        guard: measures memory.
        store: where committed blocks and paused rows lie, if there is one.
        chunk: tokens of a chunk.
        sessions: every request that has not ended, by id.
        tell: hands events to their readers; may end a request.

    Attributes:
        costs: what it has cost so far.
    """

    def __init__(
        self,
        executor: Executor,
        admission: Admission,
        estimates: Estimates,
        guard: MemoryGuard,
        *,
        store: PrefixStore | None,
        chunk: int,
        sessions: dict[str, Session],
        tell: Tell,
    ):
        self._executor, self._admission, self._estimates = executor, admission, estimates
        self._guard, self._store, self._chunk = guard, store, chunk
        self._sessions, self._tell = sessions, tell
        self.costs = Costs()

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def live_bytes(self, id: str) -> int:
        return self._admission.projected([self._sessions[id].fed])

    def room(self, id: str) -> Room:
        head, live = self._sessions[id], self._executor.sessions()
        together = self._admission.projected
        now = [session.fed for session in live]
        held = together(now)
        # The costlier of what it begins with and of what it then takes part in.
        decoding = self._estimates.transient(1, max([len(head.known), *now]), rows=len(live) + 1)
        step = max(self._estimates.prompt_step(len(head.known), self._chunk), decoding)
        beside = lambda lengths: together([*lengths, head.total]) - held + step
        # A recording goes where they need what it takes.
        free = self._guard.free_bytes() + self._admission.idle_bytes() + self._executor.lanes.replays.nbytes
        return Room(
            free=free if self._admission.promises(head.total, head.known, head.request.extra) else 0,
            nothing=beside(now),
            prompts=beside([max(session.fed, session.to_prefill) for session in live]),
            answers=beside([session.total for session in live]),
            growing=beside([min(session.total, session.fed + MARGIN_STEPS) for session in live]),
        )

    def ahead(self) -> int:
        if not self._admission.rectangle:
            return -self._admission.idle_bytes()
        joining = self._executor.lanes.joining()
        if not joining:
            return 0
        together = self._admission.projected
        apart = sum(together([row.fed for row in rows]) for rows in joining)
        return max(0, together([row.fed for rows in joining for row in rows]) - apart)

    # -- aside ---------------------------------------------------------------------------------------------------------

    def park(self, id: str) -> None:
        session = self._sessions[id]
        kept = self._hold(session)
        self.costs.parks += 1
        self.costs.recomputed_tokens += session.prefilled - kept
        self._executor.park(session)
        self._tell([(session, session.aside("parked", kept))])

    def _hold(self, session: Session) -> int:
        """Keep what is committed of a prompt from being evicted; returns its tokens."""
        if self._store is None:
            return 0
        tokens = session.known[: session.prefilled]
        return self._store.pin(session.id, tokens, extra=session.request.extra, chunks=session.chunks)

    def pause(self, id: str) -> Literal["stored", "failed", "finished"]:
        begin, session = time.perf_counter(), self._sessions[id]
        events: list[tuple[Session, Event]] = []
        row = self._executor.pause(session, events)
        self._tell(events)
        if session.finished:
            return "finished"
        if session.unread:
            (token,) = read(row.pending)
            self._tell([(session, event) for event in session.take(token)])
            if session.finished:
                return "finished"
        # What the row feeds next is known now, and chosen already.
        row.pending = Choice.given([session.token_at(session.fed)])
        if not self._save(session, row):
            self._executor.resume(row)
            return "failed"
        session.forget_sampler()
        self.costs.pauses += 1
        self.costs.moved_bytes += row.nbytes
        for cache in row.caches:
            cache.release()
        self.costs.pause_seconds += time.perf_counter() - begin
        self._tell([(session, session.aside("paused", session.fed))])
        return "stored"

    def _save(self, session: Session, row: DecodingBatch) -> bool:
        stored = session.known[: session.fed]
        record = PausedRow(session.request, session.seed, tuple(session.answer), session.cached)
        committed = session.prefilled // self._chunk * self._chunk
        return self._store.save_private(
            session.id,
            stored,
            row.caches,
            data=record.as_record(len(stored)),
            committed=committed,
            extra=session.request.extra,
            chunks=session.chunks,
        ).stored

    # -- back ----------------------------------------------------------------------------------------------------------

    def start(self, id: str) -> None:
        session = self._sessions[id]
        self._make_room(id)
        again = session.put_aside
        events: list[tuple[Session, Event]] = []
        self._executor.start(session, events)
        if self._store is not None:
            self._store.unpin(id)
        if again and not session.finished:
            self.costs.resumes += 1
            events.insert(0, (session, session.back(session.prefilled)))
        self._tell(events)

    def _make_room(self, id: str) -> None:
        """Let a recording go that takes what the newcomer and those who run may come to need."""
        held = self._executor.lanes.replays.nbytes
        if held and (room := self.room(id)).free - held < room.answers:
            self._executor.lanes.spare()

    def resume(self, id: str) -> bool:
        begin, session = time.perf_counter(), self._sessions[id]
        self._make_room(id)
        lease = self._store.load_private(id)
        caches = None
        if lease is not None:
            with lease:
                caches = lease.restore()
        self._store.drop_private(id)
        if caches is None:
            session.start_over()
            return False
        pending = Choice.given([session.token_at(session.fed)])
        row = self._executor.resume_from(session, caches, pending)
        self.costs.resumes += 1
        self.costs.moved_bytes += row.nbytes
        self.costs.resume_seconds += time.perf_counter() - begin
        self._tell([(session, session.back(session.fed))])
        return True

    # -- ends ----------------------------------------------------------------------------------------------------------

    def end(self, ids: Sequence[str], code: str) -> None:
        reading = self._guard.reading
        for id in ids:
            session = self._sessions[id]
            events = session.fail(
                code,
                MemoryError(MESSAGES[code]),
                retryable=True,
                used_bytes=reading.needed,
                ceiling_bytes=self._guard.ceiling_bytes,
            )
            self._executor.drop(session)
            self._tell([(session, event) for event in events])

"""Who is here: requests from their submission to the delivery of their end."""

from __future__ import annotations

import threading

from labkit.engine.executor import Executor
from labkit.engine.hooks import PrefixStore
from labkit.engine.journal import Journal
from labkit.engine.parking import Ledger, Row, State
from labkit.engine.scheduler import due
from labkit.engine.session import Session


class Register:
    """The requests of an engine, those in line among them, and what is to be done when one leaves.

    It knows the parts that hold something of a request, and none of them knows it: nothing here refers to the engine,
    which goes, with all its arrays, when the last reference to it does.

    Args:
        executor: holds the caches of those who have started.
        journal: tells who left when.
        ledger: the states of requests, if there is a guard; it keeps the line then.
        store: holds blocks and rows of those who were put aside, if there is one.

    Attributes:
        live: whoever has not been told its end, by id.
    """

    def __init__(
        self, executor: Executor, journal: Journal, *, ledger: Ledger | None = None, store: PrefixStore | None = None
    ):
        self._executor, self._journal, self._ledger, self._store = executor, journal, ledger, store
        self.live: dict[str, Session] = {}
        self._waiting: list[Session] = []
        self._arrivals = 0
        # Reentrant: a signal's handler may cancel while the thread that it interrupts holds the lock.
        self._lock = threading.RLock()

    def add(self, session: Session, *, paused: bool = False) -> None:
        """A request stands in line; `paused`: one whose row an engine before this one has stored."""
        with self._lock:
            self.live[session.id] = session
            if self._ledger is None:
                self._waiting.append(session)
                self._waiting.sort(key=_due)
                return
            self._arrivals += 1
            order, state = (_due(session), float(self._arrivals)), State.PAUSED if paused else State.WAITING
            self._ledger.add(Row(session.id, order, pausable=self._store is not None, state=state))

    def first(self) -> Session | None:
        """The first in line, without a ledger."""
        return self._waiting[0] if self._waiting else None

    def take_first(self) -> Session:
        """The same, who leaves the line."""
        with self._lock:
            return self._waiting.pop(0)

    def cancel(self, id: str) -> bool:
        """Ask a request to end; callable from any thread. False if it is not here, or has ended."""
        with self._lock:
            session = self.live.get(id)
            if session is None or session.finished:
                return False
            session.cancelled = True
            return True

    def cancelled(self) -> list[Session]:
        """Those who were asked to end."""
        return [session for session in self.live.values() if session.cancelled]

    def drop(self, session: Session) -> None:
        """Let go of what a request that has ended held."""
        with self._lock:
            if session in self._waiting:
                self._waiting.remove(session)
        self._executor.drop(session)

    def ended(self, session: Session) -> None:
        """A request's end was handed out."""
        if self.live.pop(session.id, None) is not None and self._ledger is not None:
            self._ledger.ended(session.id, finished=session.reason in ("stop", "length"))
            if self._store is not None:
                self._store.unpin(session.id)
                self._store.drop_private(session.id)
        self._journal.left(session)


def _due(session: Session) -> float:
    return due(session.request.priority, session.request.arrival)

"""Delivery of events: to their requests' callbacks first, then to the caller of `step`. None is lost on the way."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from traceback import format_exception

from labkit.engine.events import Event
from labkit.engine.register import Register
from labkit.engine.session import Session

_log = logging.getLogger(__name__)


class Delivery:
    """Hands events out in order, whatever callbacks do.

    Args:
        register: told of each request whose end was handed out, and of those that ended here, because their
            callbacks raised.

    Attributes:
        telling: whether a callback is at work.
    """

    def __init__(self, register: Register):
        self._register = register
        self._outbox: deque[tuple[Session, Event]] = deque()  # not yet shown to callbacks
        self._undelivered: list[Event] = []  # not yet taken
        self.telling = False

    @property
    def empty(self) -> bool:
        """Whether everything has been taken."""
        return not self._undelivered and not self._outbox

    def keep(self, events: Iterable[tuple[Session, Event]]) -> None:
        """Events for the next `tell`."""
        self._outbox += events

    def tell(self, events: Iterable[tuple[Session, Event]] = ()) -> None:
        """Show events to their requests' callbacks; a callback that raises ends its request alone.

        Raises:
            BaseException: what a callback raised that is no `Exception`; the rest is told next time.
        """
        self._outbox += events
        outer, self.telling = self.telling, True
        try:
            while self._outbox:
                self._tell(*self._outbox.popleft())
        finally:
            self.telling = outer

    def _tell(self, session: Session, event: Event) -> None:
        self._undelivered.append(event)
        if event.kind == "finished":
            self._register.ended(session)
        if session.on_event is None:
            return
        try:
            session.on_event(event)
        except BaseException as error:  # a callback may raise anything
            session.on_event = None
            if session.finished:  # no event is left to say it; as text, since frames would keep the engine alive
                said = "".join(format_exception(error))
                _log.warning("the callback of request %s raised at its %r event: %s", session.id, event.kind, said)
            exits = not isinstance(error, Exception)  # an exit or an interrupt is the caller's to see
            self._undelivered += session.cancel() if exits else session.fail("callback_failed", error)
            self._register.drop(session)
            self._register.ended(session)
            if exits:
                raise

    def take(self) -> list[Event]:
        """Everything that was told since the last call."""
        events, self._undelivered = self._undelivered, []
        return events

    def put_back(self, events: Iterable[Event]) -> None:
        """Take back events that belong to other requests."""
        self._undelivered += events

    def holds(self, request_id: str) -> bool:
        """Whether an event of this request was not taken yet."""
        return any(event.request == request_id for event in self._undelivered)

    def forget(self, request_id: str) -> None:
        """Drop the events of this request: its reader is gone."""
        self._outbox = deque(told for told in self._outbox if told[1].request != request_id)
        self._undelivered = [event for event in self._undelivered if event.request != request_id]

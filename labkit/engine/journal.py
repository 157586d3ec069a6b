"""The log of an engine's steps: plain data, bounded, true about who left when."""

from __future__ import annotations

from dataclasses import replace

from labkit.engine.events import StepRecord
from labkit.engine.session import Session


class Journal:
    """Keeps the records of the last steps.

    Args:
        limit: records kept; the oldest half is dropped when there are more.

    Attributes:
        records: the log.
        steps: records ever written, the number of the next.
    """

    def __init__(self, limit: int):
        self.records: list[StepRecord] = []
        self.steps, self._limit = 0, limit

    def add(self, record: StepRecord) -> None:
        """One more step."""
        self.steps += 1
        self.records.append(record)
        if len(self.records) > self._limit:
            del self.records[: len(self.records) - self._limit // 2]

    def left(self, session: Session) -> None:
        """A request has ended. Who leaves between two steps (cancelled, failed) left after the last one that it took
        part in."""
        if not session.joined or (self.records and session.id in self.records[-1].leaves):
            return
        for place in range(len(self.records) - 1, -1, -1):
            record = self.records[place]
            if session.id in record.leaves:
                return
            if session.id in record.rows:
                self.records[place] = replace(record, leaves=(*record.leaves, session.id))
                return

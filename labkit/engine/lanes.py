"""Rows that decode: all in one lane where the model can run them together, else each in a lane of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.engine.batch import DecodingBatch, Operation
from labkit.engine.events import Event
from labkit.engine.replay import Replays
from labkit.engine.sampling import Choice
from labkit.engine.session import Session
from labkit.engine.step import permitted, read
from labkit.kernels.recording import Machine
from labkit.models import Model

SHARED = "shared"
Events = list[tuple[Session, Event]]


class Lanes:
    """Who decodes with whom, and one token for all of a lane.

    Args:
        model: the model.
        shared: whether all rows decode together.
        operations: where it is written down what was done to caches.
        machine: where rows may be replayed (`labkit.engine.replay`).

    Attributes:
        replays: by which they are.
    """

    def __init__(self, model: Model, *, shared: bool, operations: list[Operation], machine: Machine | None = None):
        self._model, self._shared, self._operations = model, shared, operations
        self.replays = Replays(model, machine)
        self._lanes: dict[str, DecodingBatch] = {}
        self._arriving: list[DecodingBatch] = []  # join at the next step of the shared lane

    def names(self) -> list[str]:
        """The lanes that have something to decode."""
        waiting = [SHARED] if self._arriving and SHARED not in self._lanes else []
        return [*self._lanes, *waiting]

    def batches(self) -> list[DecodingBatch]:
        """All rows, those that are about to join included."""
        return [*self._lanes.values(), *self._arriving]

    def sessions(self) -> list[Session]:
        """The requests that have not finished."""
        return [session for batch in self.batches() for session in batch.sessions if not session.finished]

    def joining(self) -> list[list[Session]]:
        """The groups of rows that the next step of the shared lane puts together; nothing where none are about to."""
        if not self._arriving:
            return []
        lane = self._lanes.get(SHARED)
        parts = [*([lane] if lane is not None else []), *self._arriving]
        return [[row for row in part.sessions if not row.finished] for part in parts]

    def rows_of(self, name: str) -> list[Session]:
        """Whom a step of this lane is done for."""
        lane = self._lanes[name].sessions if name in self._lanes else []
        rows = [*lane, *(session for batch in self._joining(name) for session in batch.sessions)]
        return [row for row in rows if not row.finished]

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(batch.nbytes for batch in self.batches()) + self.replays.nbytes

    # -- rows come and go ----------------------------------------------------------------------------------------------

    def arrive(self, rows: DecodingBatch) -> None:
        """Let rows decode from the next step on."""
        if self._shared:
            self._arriving.append(rows)
        else:
            self._lanes[rows.ids[0]] = rows

    def leave(self, session: Session) -> DecodingBatch | None:
        """Take a row out, with serial caches and its pending token, for `arrive` later; None if it does not decode."""
        batch = next((batch for batch in self.batches() if session in batch.sessions), None)
        if batch is None:
            return None
        if len(batch) == 1:
            batch.come_back()  # others may be replayed meanwhile
            self._operations += batch.settle()
            self._forget(batch)
            return batch
        alone, operations = batch.leave(session)
        self._operations += operations
        return alone

    def drop(self, session: Session) -> None:
        """Let go of what nobody needs once this request has finished: its row leaves with the lane's next step."""
        for batch in self.batches():
            if session in batch.sessions and all(other.finished for other in batch.sessions):
                self._forget(batch)
                self._operations += batch.keep([])

    def _forget(self, batch: DecodingBatch | None) -> None:
        self._arriving = [other for other in self._arriving if other is not batch]
        self._lanes = {name: other for name, other in self._lanes.items() if other is not batch}
        if not self._lanes:
            self.replays.idle()

    def _joining(self, name: str) -> list[DecodingBatch]:
        return self._arriving if name == SHARED else []

    # -- one step ------------------------------------------------------------------------------------------------------

    def come_back(self) -> list[tuple[list[Session], Exception]]:
        """Let no row be replayed. Returns those that cannot come back; who lets them be fails at their next step."""
        lost = []
        for batch in self.batches():
            try:
                batch.come_back()
            except Exception as error:
                lost.append(([row for row in batch.sessions if not row.finished], error))
        return lost

    def spare(self) -> None:
        """Let the recording go, and its rows back."""
        self.replays.spare()
        self.come_back()

    def decode(self, name: str, events: Events, room: Callable[[], int] | None) -> dict[str, Any]:
        """One token for every row of a lane. Who chose its last token has it read, and takes no part in the forward.

        Args:
            name: the lane.
            events: what happened is appended here, also when the step fails later on.
            room: bytes that a recording may take; None if the rows are not to be replayed.

        Returns:
            What the step's record says.
        """
        lane = self._lanes.setdefault(name, DecodingBatch.empty(self._model))
        parts = [lane, *self._joining(name)]
        unread = [(part.pending, list(part.sessions)) for part in parts if any(row.unread for row in part.sessions)]
        live = [row for part in parts for row in part.sessions if not row.finished]
        host_first = any(row.host_first for row in live)
        tokens = self._read(unread, events) if host_first else {}
        for part in parts:
            staying = [row for row in part.sessions if not row.finished and not (row.unread and row.on_last)]
            self._operations += part.keep(staying)
        if name == SHARED:
            self._arriving = []
        self._operations += lane.join(*parts[1:])
        self._operations += lane.settle()
        masks = self._masks(lane, events) if host_first else [None] * len(lane)
        launched = [(row, row.fed) for row in lane.sessions]
        if launched:
            lane.launch(masks) if room is None else lane.launch(masks, self.replays, room)
        if not host_first:
            tokens = self._read(unread, events)
        if not launched:
            self._forget(lane)
        return _record(launched, tokens, [row for _, rows in unread for row in rows])

    def _read(self, unread: list[tuple[Choice, list[Session]]], events: Events) -> dict[str, int]:
        """Tokens that were chosen before -> events; returns them by request."""
        tokens = {}
        for choice, rows in unread:
            for row, got in zip(rows, read(choice), strict=True):
                # A choice may hold rows that have nothing chosen yet, and rows that have ended since.
                if row.finished or not row.unread:
                    continue
                tokens[row.id] = got.token
                events += [(row, event) for event in row.take(got)]
        return tokens

    def _masks(self, lane: DecodingBatch, events: Events) -> list[Any]:
        """What each row's constraint permits; rows whose constraint fails leave."""
        masks = {}
        for row in lane.sessions:
            try:
                masks[row.id] = permitted(row.constraint, self._model.vocab_size)
            except Exception as error:
                events += [(row, event) for event in row.fail("step_failed", error)]
        self._operations += lane.keep([row for row in lane.sessions if not row.finished])
        self._operations += lane.settle()
        return [masks[row.id] for row in lane.sessions]


def _record(launched: list[tuple[Session, int]], tokens: dict[str, int], asked: list[Session]) -> dict[str, Any]:
    if not launched:
        rows = [row for row in asked if row.id in tokens]
        return {
            "kind": "read",
            "rows": tuple(row.id for row in rows),
            "shape": (0, 0),
            "positions": tuple(row.fed for row in rows),
            "lengths": (0,) * len(rows),
            "inputs": ((),) * len(rows),
            "chunk": None,
        }
    return {
        "kind": "decode",
        "rows": tuple(row.id for row, _ in launched),
        "shape": (len(launched), 1),
        "positions": tuple(fed for _, fed in launched),
        "lengths": (1,) * len(launched),
        "inputs": tuple((tokens[row.id] if row.id in tokens else row.token_at(fed),) for row, fed in launched),
        "chunk": None,
    }

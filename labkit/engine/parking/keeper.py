"""Between two steps: measure, make room if memory is tight, let the first in line in if it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from labkit.engine.memory import MemoryGuard
from labkit.engine.parking.policy import Action, Ledger, Room, Row
from labkit.engine.parking.states import State, Trigger


class Hands(Protocol):
    """Whoever owns the requests and their arrays. Each method has done its work when it returns."""

    def live_bytes(self, id: str) -> int:
        """Bytes of a row's caches now."""
        ...

    def ahead(self) -> int:
        """Bytes that the next step takes at a stroke, because rows join others in one rectangle; below 0, what lies
        idle in arrays of blocks."""
        ...

    def room(self, id: str) -> Room:
        """What a request in line would find if it came in now."""
        ...

    def park(self, id: str) -> None:
        """Let a prompt's caches go; keep its committed blocks from being evicted."""
        ...

    def pause(self, id: str) -> Literal["stored", "failed", "finished"]:
        """Report a row's pending token, store its exact state and let its caches go. "failed": it runs on.
        "finished": the token was its last."""
        ...

    def start(self, id: str) -> None:
        """Begin with a prompt, or begin again from the blocks that are stored of it."""
        ...

    def resume(self, id: str) -> bool:
        """Let a paused row decode on. False: its state cannot be read."""
        ...

    def end(self, ids: Sequence[str], code: str) -> None:
        """End requests with an error of this code; the ledger is told of each."""
        ...


class Keeper:
    """Keeps requests through pressure.

    Args:
        guard: measures memory.
        hands: acts.
        ledger: who is in which state; requests are added to it, and told to it when they end.
        max_rows: requests that run at a time, at most.
    """

    def __init__(self, guard: MemoryGuard, hands: Hands, ledger: Ledger, *, max_rows: int = 32):
        self._ledger, self._guard, self._hands, self._max_rows = ledger, guard, hands, max_rows
        self._idle_since: float | None = None

    def decoding(self, id: str) -> None:
        """A prompt is there, and its row decodes."""
        if self._ledger.rows[id].state is State.PREFILLING:
            self._ledger.move(id, Trigger.DECODE)

    def boundary(self) -> None:
        """Called before each step."""
        if not self._ledger.rows:
            return
        polls = self._guard.polls
        level = self._guard.poll(ahead=self._hands.ahead())
        if self._guard.polls > polls:
            self._ledger.polled(level)
        if level in ("hard", "emergency"):
            self._relieve()
        if self._ledger.waits:
            self._let_in()

    def _relieve(self) -> None:
        guard = self._guard
        while True:
            for row in self._ledger.live():
                row.live = self._hands.live_bytes(row.id)
            action = self._ledger.relieve(guard.level, above_ceiling=guard.above_ceiling)
            if action is None:
                return
            self._give_back(action)
            guard.reclaim()
            guard.poll(force=True, ahead=self._hands.ahead())

    def _give_back(self, action: Action) -> None:
        if action.kind == "end":
            self._hands.end(action.ids, action.reason)
            return
        (id,) = action.ids
        if action.kind == "park":
            self._ledger.move(id, Trigger.PARK)
            self._hands.park(id)
            return
        self._ledger.move(id, Trigger.PAUSE)
        outcome = self._hands.pause(id)
        if id in self._ledger.rows:  # a reader who is told may end it
            self._ledger.move(id, Trigger.STORED if outcome == "stored" else Trigger.STORE_FAILED)

    def _let_in(self) -> None:
        while (line := self._ledger.line()) and len(self._ledger.live()) < self._max_rows:
            action = self._ledger.enter(self._guard.level, self._hands.room(line[0].id))
            if action is None:
                break
            self._enter(line[0])
        if not self._ledger.live():
            self._wait()
        else:
            self._idle_since = None
        if line := self._ledger.line():
            self._hold(line[0])

    def _enter(self, row: Row) -> None:
        if row.state is State.PAUSED:
            self._ledger.move(row.id, Trigger.RESUME)
            restored = self._hands.resume(row.id)
            if row.id in self._ledger.rows:
                self._ledger.move(row.id, Trigger.RESTORED if restored else Trigger.RESTORE_FAILED)
            return
        if row.state is State.PARKED:
            self._ledger.move(row.id, Trigger.READMIT)
        self._ledger.move(row.id, Trigger.ADMIT)
        self._hands.start(row.id)

    def _hold(self, row: Row) -> None:
        if row.state is State.WAITING:
            self._ledger.move(row.id, Trigger.HOLD)

    def _wait(self) -> None:
        """Nothing runs and nobody may come in: until the next poll there is nothing to do."""
        clock = self._guard.clock
        if self._idle_since is None:
            self._idle_since = clock.now()
        action = self._ledger.stalled(clock.now() - self._idle_since)
        if action is not None:
            self._hands.end(action.ids, action.reason)
            self._idle_since = clock.now()
        elif self._ledger.line():
            clock.sleep(self._guard.interval)

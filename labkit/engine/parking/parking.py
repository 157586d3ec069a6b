"""An engine's dealings with memory: who may start, how large a chunk may be, who is put aside and comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from labkit.engine.admission import Admission
from labkit.engine.executor import Executor
from labkit.engine.hooks import PrefixStore
from labkit.engine.memory import Estimates, MemoryGuard
from labkit.engine.parking.hands import EngineHands, Tell
from labkit.engine.parking.keeper import Keeper
from labkit.engine.parking.paused import PausedRow
from labkit.engine.parking.policy import Ledger
from labkit.engine.parking.states import State
from labkit.engine.session import Session


class Parking:
    """What an engine with a guard asks between its steps.

    Args:
        executor, admission, estimates, guard: the engine's.
        ledger: the requests and their states.
        store: where committed blocks and paused rows lie; without one prompts start over and rows cannot pause.
        chunk: tokens of a chunk.
        sessions: every request that has not ended, by id.
        tell: hands events to their readers.
    """

    def __init__(
        self,
        executor: Executor,
        admission: Admission,
        estimates: Estimates,
        guard: MemoryGuard,
        *,
        ledger: Ledger,
        store: PrefixStore | None,
        chunk: int,
        sessions: dict[str, Session],
        tell: Tell,
    ):
        self._executor, self._admission, self._estimates = executor, admission, estimates
        self._guard, self._store, self._chunk = guard, store, chunk
        self._hands = EngineHands(
            executor, admission, estimates, guard, store=store, chunk=chunk, sessions=sessions, tell=tell
        )
        self._keeper = Keeper(guard, self._hands, ledger, max_rows=admission.max_rows)
        self._ledger, self._sessions = ledger, sessions

    def boundary(self) -> None:
        """Called before each step."""
        if self._executor.lanes.replays.nbytes and self._recording_goes():
            self._executor.lanes.spare()
            self._guard.reclaim()
        computed = {session.id for session in self._executor.prefill.sessions}
        for row in self._ledger.live():
            if row.state is State.PREFILLING and row.id not in computed:
                self._keeper.decoding(row.id)
        self._keeper.boundary()

    def _recording_goes(self) -> bool:
        """Before anybody suffers: at the hard line; at the soft one if nobody decodes from it, or somebody waits."""
        replays = self._executor.lanes.replays
        if self._guard.free_bytes() <= max(0, self._hands.ahead()) + replays.owed:
            return True
        return self._guard.level != "normal" and (replays.unused or self._ledger.waits)

    def chunk(self) -> int | None:
        """Tokens of the next chunk at most; None where memory allows a whole one."""
        prompts = self._executor.prefill.sessions
        if not prompts:
            return None
        context = max(session.prefilled for session in prompts)
        before = self._admission.projected([context])

        def cost(tokens: int) -> int:
            grown = self._admission.projected([context + tokens]) - before
            return grown + self._estimates.transient(tokens, context)

        chunk = self._guard.chunk_for(self._chunk, cost)
        return None if chunk == self._chunk else chunk

    def stored(self, make: Callable[[PausedRow], Session]) -> list[Session]:
        """Rows that an engine before this one has paused and nobody has taken up: each in line again, as paused.

        Args:
            make: a session for such a row.
        """
        found = []
        for id in self._store.private_ids() if self._store is not None else ():
            if id in self._sessions or (lease := self._store.load_private(id)) is None:
                continue
            with lease:
                try:
                    row = PausedRow.from_record(lease.data, lease.token_ids)
                except ValueError:
                    continue
                found.append(make(row))
        return found

    def status(self) -> dict[str, Any]:
        """Memory, requests by state, and what putting aside has cost, JSON data."""
        ledger, reading = self._ledger, self._guard.reading
        states = [row.state for row in ledger.rows.values()]
        return {
            "level": self._guard.level,
            "used_bytes": reading.needed,
            "pool_bytes": reading.pool,
            "recording_bytes": self._executor.lanes.replays.nbytes,
            "ceiling_bytes": self._guard.ceiling_bytes,
            "requests": {str(state): states.count(state) for state in State if state in states},
            "moves": {str(trigger): count for trigger, count in ledger.counts.items()},
            "costs": asdict(self._hands.costs),
            "reclaims": self._guard.reclaims,
        }

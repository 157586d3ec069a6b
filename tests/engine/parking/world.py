"""A pure stand-in for an engine under memory pressure: one byte a token, faults on request, nothing computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from labkit.engine.memory import FakeClock, FakeMeter, MemoryGuard
from labkit.engine.parking import Keeper, Ledger, Policy, Room, Row, State
from labkit.engine.parking.policy import MARGIN_STEPS

CEILING, WEIGHTS, GRID, FIXED = 1000, 100, 8, 5


@dataclass
class Sim:
    """One request: what it has computed, and the numbers it has reported, which must be 0, 1, 2 ..."""

    prompt: int
    answers: int
    done: int = 0
    answer: int = 0
    committed: int = 0
    reported: list[int] = field(default_factory=list)
    goal: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.answers + FIXED


class World:
    """The hands of a keeper, and the clockwork that computes, decodes and finishes."""

    def __init__(self, policy: Policy | None = None, *, interval: float = 1.0):
        self.sims: dict[str, Sim] = {}
        self.running: set[str] = set()
        self.pins: set[str] = set()
        self.chains: dict[str, int] = {}
        self.ends: dict[str, str] = {}
        self.entered: list[str] = []
        self.saves_fail = self.loads_fail = False
        self.meter = FakeMeter(2 * CEILING, live=self._live)
        self.clock = FakeClock()
        self.guard = MemoryGuard(CEILING, interval=interval, min_chunk=2, meter=self.meter, clock=self.clock)
        self.ledger = Ledger(policy)
        self.keeper = Keeper(self.guard, self, self.ledger, max_rows=4)

    def _live(self) -> int:
        return WEIGHTS + sum(self.live_bytes(id) for id in self.running)

    # -- hands ---------------------------------------------------------------------------------------------------------

    def live_bytes(self, id: str) -> int:
        sim = self.sims[id]
        return sim.done + sim.answer + FIXED

    def room(self, id: str) -> Room:
        sims, need = [self.sims[other] for other in self.running], self.sims[id].total
        prompts = sum(sim.prompt - sim.done for sim in sims)
        answers = sum(sim.answers - sim.answer for sim in sims)
        growing = sum(min(sim.prompt - sim.done + sim.answers - sim.answer, MARGIN_STEPS) for sim in sims)
        return Room(self.guard.free_bytes(), need, need + prompts, need + prompts + answers, need + growing)

    def ahead(self) -> int:
        return 0

    def park(self, id: str) -> None:
        assert self.ledger.rows[id].parks <= self.ledger.policy.max_parks
        self._let_go(id)
        self.sims[id].done = 0
        self.pins.add(id)

    def pause(self, id: str) -> str:
        sim = self.sims[id]
        sim.reported.append(sim.answer)  # the pending token goes out first
        sim.answer += 1
        if sim.answer == sim.answers:
            self._finish(id)
            return "finished"
        if self.saves_fail:
            return "failed"
        self._let_go(id)
        self.chains[id] = sim.answer
        return "stored"

    def start(self, id: str) -> None:
        self._check_entry(id)
        sim = self.sims[id]
        sim.done, sim.goal = sim.committed, sim.prompt + sim.answer
        self.pins.discard(id)
        self.running.add(id)

    def resume(self, id: str) -> bool:
        self._check_entry(id)
        answer = self.chains.pop(id)
        if self.loads_fail:
            self.sims[id].done = 0
            return False
        assert answer == self.sims[id].answer
        self.running.add(id)
        return True

    def end(self, ids: Sequence[str], code: str) -> None:
        if code == "memory_emergency":
            assert self.guard.level == "emergency"
        elif code == "memory_pressure" and self.ledger.policy.pressure == "park":
            assert len(ids) == 1, "one victim at a time"
            rows = [self.ledger.rows[id] for id in self.running]
            assert len(rows) > 1
            assert not any(row.state is State.DECODING and not row.unstored for row in rows), (
                "somebody could have paused"
            )
            assert all(row.parks >= self.ledger.policy.max_parks for row in rows if row.state is State.PREFILLING)
            assert self.live_bytes(ids[0]) == max(self.live_bytes(id) for id in self.running), "not the largest"
        for id in ids:
            self._let_go(id)
            self._forget(id)
            self.ends[id] = code
            self.ledger.ended(id, finished=False)

    # -- what an engine does besides -----------------------------------------------------------------------------------

    def submit(self, id: str, prompt: int, answers: int) -> bool:
        """False: it can never fit."""
        self.sims[id] = Sim(prompt, answers)
        if WEIGHTS + self.sims[id].total > self.guard.capacity_bytes:
            self.ends[id] = "context_exceeds_capacity"
            return False
        self.ledger.add(Row(id, (float(len(self.sims)),)))
        return True

    def cancel(self, id: str) -> None:
        if id not in self.ends:
            self._let_go(id)
            self._forget(id)
            self.ends[id] = "cancelled"
            self.ledger.ended(id, finished=False)

    def step(self) -> None:
        """One boundary, then a chunk or a token for everybody who runs."""
        self.clock.time += 1.0
        self.keeper.boundary()
        for id in sorted(self.running):
            sim = self.sims[id]
            if self.ledger.rows[id].state is State.PREFILLING:
                wanted = min(GRID - sim.done % GRID, sim.prompt - sim.done)
                taken = self.guard.chunk_for(wanted, lambda tokens: tokens) if wanted else 0
                assert taken > 0 or not wanted, "a prompt always gets on"
                sim.done += taken
                sim.committed = max(sim.committed, sim.done // GRID * GRID)
                if sim.done == sim.prompt:
                    self.keeper.decoding(id)
            else:
                sim.reported.append(sim.answer)
                sim.answer += 1
                if sim.answer == sim.answers:
                    self._finish(id)

    def run(self, limit: int = 20_000) -> None:
        """Until everybody has ended."""
        for _ in range(limit):
            if not self.ledger.rows:
                return
            self.step()
        raise AssertionError(f"still here after {limit} steps: {self.ledger.rows}")

    def check(self) -> None:
        """What holds between any two steps."""
        states = {id: row.state for id, row in self.ledger.rows.items()}
        assert set(states) == set(self.sims) - set(self.ends), "a request got lost"
        assert self.running == {row.id for row in self.ledger.live()}
        assert set(self.chains) == {id for id, state in states.items() if state is State.PAUSED}, "a chain leaked"
        assert self.pins == {id for id, state in states.items() if state is State.PARKED}, "a pin leaked"
        for id, sim in self.sims.items():
            assert sim.reported == list(range(len(sim.reported))), "a token was lost or told twice"
            if self.ends.get(id) == "finished":
                assert len(sim.reported) == sim.answers
        for row in self.ledger.rows.values():
            assert row.parks <= self.ledger.policy.max_parks

    def _check_entry(self, id: str) -> None:
        assert self.guard.level not in ("hard", "emergency"), "nobody comes in at the hard line"
        order = self.ledger.rows[id].order
        assert all(row.order > order for row in self.ledger.line()), "somebody overtook the first in line"
        self.entered.append(id)

    def _finish(self, id: str) -> None:
        self._let_go(id)
        self.ends[id] = "finished"
        self.ledger.ended(id, finished=True)

    def _let_go(self, id: str) -> None:
        self.running.discard(id)

    def _forget(self, id: str) -> None:
        self.pins.discard(id)
        self.chains.pop(id, None)

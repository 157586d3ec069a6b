"""Engines under a scripted meter: a tiny random hybrid whose keys and values outweigh what a step needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import labkit
from labkit.caches import contiguous
from labkit.engine import Engine, Event, MemoryGuard, Policy, Request, SamplingParams
from labkit.engine.memory import FakeClock, FakeMeter
from labkit.engine.prefix import PrefixStore
from tests import tiny_models

GRID = 8


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Buffers that grow by 8 tokens, so that tens of tokens weigh."""
    monkeypatch.setattr(contiguous, "STEP", GRID)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory) -> labkit.LoadedModel:
    """Two attention and two recurrent layers, random."""
    wide = {**tiny_models.CONFIGS["hybrid"], "head_dim": 32, "num_key_value_heads": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.CONFIGS, "wide-hybrid", wide)
        folder = tiny_models.write_checkpoint(tmp_path_factory.mktemp("wide"), "wide-hybrid")
        return labkit.load(folder, graph="adapter")


@dataclass
class Run:
    """One engine's run."""

    engine: Engine
    meter: FakeMeter | None = None
    clock: FakeClock | None = None
    events: list[Event] = field(default_factory=list)

    def step(self) -> list[Event]:
        if self.clock is not None:
            self.clock.time += 1.0
        new = self.engine.step()
        self.events += new
        return new

    def until(self, done: Callable[[Run], bool], limit: int = 3000) -> Run:
        for _ in range(limit):
            if done(self):
                return self
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.engine.memory()}")

    def all(self, limit: int = 3000) -> Run:
        return self.until(lambda run: run.engine.idle, limit)

    def of(self, id: str, kind: str) -> list[Event]:
        return [event for event in self.events if event.request == id and event.kind == kind]

    def tokens(self, id: str) -> list[int]:
        return [event.token for event in self.of(id, "token")]

    def text(self, id: str) -> str:
        return "".join(event.text for event in self.events if event.request == id)

    def reasons(self) -> dict[str, str]:
        return {event.request: event.reason for event in self.events if event.kind == "finished"}

    def errors(self) -> dict[str, dict]:
        return {event.request: event.error for event in self.events if event.kind == "error"}

    def kinds(self, *kinds: str) -> list[str]:
        return [event.kind for event in self.events if event.kind in kinds]


@pytest.fixture
def rig(tmp_path):
    """`rig(loaded, room=..., policy=..., store=..., outside=...)`: a run whose ceiling leaves `room` bytes below the
    hard line beside the weights; without `room`, an engine without a guard."""
    stores: list[PrefixStore] = []

    def make(
        loaded: labkit.LoadedModel,
        room: int | None = None,
        *,
        policy: Policy | None = None,
        store: bool | Path = True,
        outside=0,
        **options,
    ) -> Run:
        if store:
            folder = store if isinstance(store, Path) else tmp_path / f"store{len(stores)}"
            stores.append(PrefixStore(loaded, folder, width=GRID, keep_free_bytes=0))
            options["prefixes"] = stores[-1]
        else:
            options["prefill_chunk"] = GRID
        if room is None:
            return Run(Engine(loaded, **options))
        run = Run.__new__(Run)
        engine_bytes = lambda: run.engine._executor.cache_bytes if hasattr(run, "engine") else 0
        meter = FakeMeter(1 << 40, lambda: loaded.weights_bytes + engine_bytes(), outside=outside)
        clock, ceiling = FakeClock(), int((loaded.weights_bytes + room) / 0.95) + 1
        guard = MemoryGuard(ceiling, meter=meter, clock=clock, interval=0.5, min_chunk=2)
        run.__init__(Engine(loaded, guard=guard, policy=policy, **options), meter, clock)
        return run

    yield make
    for store in stores:
        store.close()


def ask(id: str, length: int, answer: int, *, start: int = 0, **options) -> Request:
    """A prompt of `length` tokens unlike those that start elsewhere, and an answer of exactly `answer` tokens."""
    tokens = [(start + 7 * place + place * place) % 256 for place in range(length)]
    return Request(tokens, SamplingParams(max_tokens=answer, ignore_eos=True, **options), id=id)

"""The real engine, store and disk under random arrivals, cancels, pressure and disk faults, against a simple model: a
request answers what it answers alone, or its stream says why not; nothing is left behind."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import labkit
from labkit.caches import contiguous
from labkit.engine import Engine, MemoryGuard, Policy
from labkit.engine.memory import FakeClock, FakeMeter
from labkit.engine.prefix import PrefixStore
from labkit.engine.prefix.filesystem import FileSystem
from tests.engine.parking.conftest import GRID, ask
from tests.nightly import many
from tests.tiny_models import write_checkpoint

ROOM = 200_000  # beside the weights, below the hard line; one long request takes some 60,000
PROMPTS = [(5, 6), (19, 8), (33, 5), (48, 9)]  # tokens of prompts and answers

_made: dict[str, object] = {}


def model() -> labkit.LoadedModel:
    """The tiny random hybrid, and what each prompt answers alone; made once."""
    if not _made:
        folder = Path(tempfile.mkdtemp())
        _made["loaded"] = loaded = labkit.load(write_checkpoint(folder / "hybrid", "hybrid"), graph="adapter")
        engine = Engine(loaded, prefill_chunk=GRID)
        _made["answers"] = {
            kind: engine.generate(
                list(ask("x", *PROMPTS[kind], start=kind).tokens), ask("x", *PROMPTS[kind]).params
            ).tokens
            for kind in range(len(PROMPTS))
        }
    return _made["loaded"]


class Faulty(FileSystem):
    """A disk that fails while it is told to."""

    failing = False

    def write(self, descriptor, parts, offset):
        if self.failing:
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().write(descriptor, parts, offset)


class Requests(RuleBasedStateMachine):
    @initialize(
        reserve=st.sampled_from(["nothing", "prompts"]), patience=st.integers(0, 2), max_parks=st.integers(1, 3)
    )
    def begin(self, reserve, patience, max_parks):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(contiguous, "STEP", GRID)
        loaded, self.disk = model(), Faulty()
        self.folder = tempfile.TemporaryDirectory()
        self.store = PrefixStore(loaded, self.folder.name, width=GRID, keep_free_bytes=0, system=self.disk)
        self.meter = FakeMeter(1 << 40, lambda: loaded.weights_bytes + self.engine._executor.cache_bytes)
        self.clock = FakeClock()
        self.engine = None
        self.meter.live, live = loaded.weights_bytes, self.meter.live
        ceiling = int((loaded.weights_bytes + ROOM) / 0.95)
        guard = MemoryGuard(ceiling, meter=self.meter, clock=self.clock, interval=0.5, min_chunk=2)
        policy = Policy(reserve=reserve, patience=patience, max_parks=max_parks, stall_seconds=40)
        self.engine = Engine(loaded, guard=guard, policy=policy, prefixes=self.store)
        self.meter.live = live
        self.kinds, self.events, self.cancelled = {}, {}, set()

    @rule(kind=st.integers(0, len(PROMPTS) - 1))
    def arrive(self, kind):
        request = ask(f"r{len(self.kinds)}", *PROMPTS[kind], start=kind)
        self.engine.submit(request)
        self.kinds[request.id], self.events[request.id] = kind, []

    @precondition(lambda self: self.kinds)
    @rule(data=st.data())
    def cancel(self, data):
        id = data.draw(st.sampled_from(sorted(self.kinds)))
        if self.engine.cancel(id):
            self.cancelled.add(id)

    @rule(outside=st.sampled_from([0, 0, ROOM // 2, ROOM, ROOM + 15_000, 2 * ROOM]))
    def press(self, outside):
        self.meter.outside = outside

    @rule(failing=st.booleans())
    def fault(self, failing):
        self.disk.failing = failing

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.step()

    def step(self):
        self.clock.time += 1.0
        for event in self.engine.step():
            self.events[event.request].append(event)

    @invariant()
    def every_stream_is_a_beginning_of_its_answer(self):
        for id, events in getattr(self, "events", {}).items():
            kinds = [event.kind for event in events]
            tokens = tuple(event.token for event in events if event.kind == "token")
            assert tokens == _made["answers"][self.kinds[id]][: len(tokens)]
            assert kinds.count("finished") <= 1
            assert "finished" not in kinds[:-1]
            away = [kind for kind in kinds if kind in ("parked", "paused", "resumed")]
            assert all(kind == "resumed" for kind in away[1::2])
            assert "resumed" not in away[0::2]

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.meter.outside, self.disk.failing = 0, False
        for _ in range(3000):
            if self.engine.idle:
                break
            self.step()
        assert self.engine.idle, self.engine.memory()
        for id, events in self.events.items():
            reason = events[-1].reason
            if reason == "length":
                assert sum(event.kind == "token" for event in events) == PROMPTS[self.kinds[id]][1]
            elif reason == "cancelled":
                assert id in self.cancelled
            else:
                error = events[-2].error
                assert error["code"] in ("memory_pressure", "memory_emergency", "memory_stalled")
                assert error["retryable"]
        assert self.engine.memory()["requests"] == {}
        assert self.engine._executor.cache_bytes == 0
        assert self.store.stats()["pins"] == {"owners": 0, "records": 0}
        assert self.store.stats()["leases"] == 0
        self.store.flush()
        assert not list((Path(self.folder.name) / "private").glob("*"))
        self.store.close()
        self.folder.cleanup()
        self.patch.undo()


Requests.TestCase.settings = settings(
    max_examples=8, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRequests = Requests.TestCase


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestRequestsLong(Requests.TestCase):
    settings = settings(
        max_examples=many(300), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )

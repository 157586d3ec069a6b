"""Memory of recordings: what holds it, who counts it, and before whom it goes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest

import labkit
from labkit.engine import MemoryGuard, Policy, SamplingParams
from labkit.engine import replay as replaying
from labkit.engine.memory import FakeMeter
from labkit.engine.prefix import PrefixStore
from labkit.engine.sampling import RowSampler
from labkit.kernels.targets import use_target
from labkit.measure.direct import DirectRow
from labkit.models import Rows
from tests.engine.replay.playing import (
    GREEDY,
    HOST,
    Failing,
    Told,
    both,
    compare,
    hear,
    patience,
    play,
    request,
    submit,
    with_room,
)
from tests.engine.test_batching import prompt
from tests.settled import falls_to, settled_memory


def test_nothing_of_rows_that_ended_is_held(small, monkeypatch):
    """Keys, values and states go with their rows, whether they ended by themselves or were cancelled."""
    little = 64 << 10
    engine = labkit.Engine(small, replay=HOST, max_rows=4)
    before = settled_memory()
    for round, ends in enumerate(("length", "cancelled")):
        engine.submit(request(engine, f"a{round}", round, length=400))
        while (
            engine._executor.lanes.replays._opened_last() is None
            or engine._executor.lanes.replays._opened_last().closed
        ):
            engine.step()
        assert mx.get_active_memory() - before > 400 * 2 * 2 * 64 * 4, "keys and values of 400 tokens"
        if ends == "cancelled":
            engine.cancel(f"a{round}")
        list(engine.run())
        recording = engine._executor.lanes.replays.nbytes
        assert recording > 0
        assert falls_to(before + recording + little, seconds=20), mx.get_active_memory() - before - recording
    monkeypatch.setattr(replaying, "KEPT", 0)
    engine.submit(request(engine, "last", 5))
    list(engine.run())
    assert engine._executor.lanes.replays.nbytes == 0 == engine.cache_bytes
    assert falls_to(before + little, seconds=20), mx.get_active_memory() - before


def test_states_that_rows_began_with_are_not_held_while_they_are_replayed(small, monkeypatch):
    """Nobody needs them: what they decode with is the recording's. Both when it is made and when it is there."""
    began, decode_step = [], small.model.decode_step

    def watching(*arguments):
        step = decode_step(*arguments)
        began[:] = [weakref.ref(array) for array in step.memory]
        return step

    monkeypatch.setattr(small.model, "decode_step", watching, raising=False)
    replays, sampler = replaying.Replays(small.model, HOST, patience=0), RowSampler(SamplingParams(**GREEDY), 0)
    for name in (1, 2):
        caches = small.model.make_caches()
        small.model(mx.array([prompt(name, 8)]), caches, Rows.single(0), logits=None)
        replay = None
        while replay is None:
            replay = replays.open((name,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100)
        gc.collect()
        assert [one() for one in began] == [None] * 4, "a layer's convolution and state, another's tail"
        replay.discard()
    assert replays.recorded == 1


def test_recordings_go_with_their_engine(small):
    told = play(small, {0: submit(("a", 1))}, replay=HOST)
    gone = weakref.ref(told.replays._recording)
    del told
    gc.collect()
    assert gone() is None


@pytest.fixture(scope="module")
def recorded_bytes(small):
    """Of one row's recording."""
    with pytest.MonkeyPatch.context() as patched, use_target("reference"):
        with_room(patched)
        patience(patched, 2)
        told = play(small, {0: submit(("a", 1, {"max_tokens": 40}))}, replay=HOST)
    return told.replays.nbytes


def test_bytes_of_a_recording_are_counted_once(small, roomy):
    def look(engine: Any) -> None:
        (batch,) = engine._executor.lanes.batches()
        assert batch._replay is not None
        buffers = sum(c._keys.nbytes + c._values.nbytes for c in batch._caches if c.kind == "contiguous")
        assert engine.cache_bytes == buffers + engine.replays.nbytes, "states and tails lie in the recording"

    play(small, {0: submit(("a", 1, {"max_tokens": 12})), 8: look}, replay=HOST)


def test_rows_that_are_replayed_take_no_more_than_was_projected(small):
    """Room in the buffers for what the longest row may come to have, not for what another one wants behind it."""
    found = []

    def look(engine: Any) -> None:
        sessions = engine._executor.sessions()
        buffers = engine.cache_bytes - engine.replays.nbytes
        found.append((buffers, engine._admission.projected([session.total for session in sessions])))

    first = submit(("long", 1, {"length": 240, "max_tokens": 12}), ("other", 2, {"max_tokens": 100}))
    script = {0: first} | dict.fromkeys(range(6, 12), look) | {12: lambda engine: engine.cancel("other")}
    replayed = play(small, script, replay=HOST)
    assert replayed.replayed >= 4
    assert all(0 < buffers <= projected for buffers, projected in found), found


def test_no_recording_takes_what_those_who_started_may_come_to_need(small, roomy, recorded_bytes):
    """Its rows decode by MLX, and ask again."""
    script = {0: submit(("a", 1, {"max_tokens": 14}))}
    plain = play(small, script, replay=False)
    mine = small.weights_bytes + plain.engine._admission.projected([20])
    for spare, recorded in ((recorded_bytes // 2, 0), (4 * recorded_bytes, 1)):
        replayed = play(small, script, replay=HOST, capacity_bytes=mine + spare)
        compare(plain, replayed)
        assert (replayed.replays.recorded, replayed.replayed > 4) == (recorded, bool(recorded))
        assert not replayed.replays.refused


def test_a_recording_goes_for_who_starts(small, roomy, recorded_bytes):
    tokens = 1500
    row = labkit.Engine(small)._admission.projected([6 + tokens])
    assert row > 4 * recorded_bytes, "beside one row there is room"
    held, long = {}, {"max_tokens": tokens}

    def look(engine: Any) -> None:
        held.setdefault(engine, []).append((len(engine._executor.sessions()), engine.replays.nbytes))

    script = {0: submit(("a", 1, long)), 9: submit(("b", 2, long))} | dict.fromkeys((8, *range(10, 24)), look)
    script[24] = lambda engine: (engine.cancel("a"), engine.cancel("b"))
    options = {"capacity_bytes": small.weights_bytes + 2 * row + recorded_bytes // 2}
    _, replayed = both(small, script, at_least=4, **options)
    (alone, *beside) = held[replayed.engine]
    assert alone == (1, recorded_bytes)
    assert set(beside) == {(2, 0)}
    assert replayed.replays.recorded == 1


def test_rows_take_a_recordings_arrays_when_it_goes(small, roomy):
    """Nothing is copied where memory is short; and they decode on."""
    caches = small.model.make_caches()
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    stream = DirectRow(small.model, caches, 8).tokens(3)
    wanted = [next(stream) for _ in range(8)]
    caches, machine = small.model.make_caches(), Failing("copies", 1000)
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    replays, sampler = replaying.Replays(small.model, machine, patience=0), RowSampler(SamplingParams(**GREEDY), 0)
    replay = None
    while replay is None:
        replay = replays.open((0,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100)
    for _ in range(4):
        replay.launch()
    copied, gone = machine.calls["copies"], weakref.ref(replays._recording)
    replays.spare()
    assert replays.nbytes == 0
    assert replay.close().token.tolist() == wanted[3:4]
    assert machine.calls["copies"] == copied
    del replay
    gc.collect()
    assert gone() is None
    stream = DirectRow(small.model, caches, 12).tokens(wanted[3])
    assert [next(stream) for _ in range(4)] == wanted[4:]


class Following(FakeMeter):
    """Finds what it is told, and the recording."""

    engine: Any = None
    base = 0

    def read(self):
        self.live = self.base + (0 if self.engine is None else self.engine.replays.nbytes)
        return super().read()


def guarded(small: Any, ceiling: int) -> tuple[Any, Following]:
    meter = Following(ceiling)
    guard = MemoryGuard(ceiling, meter=meter, interval=0, min_chunk=2)
    policy = Policy(patience=0, calm_polls=0)
    meter.engine = labkit.Engine(small, replay=HOST, guard=guard, policy=policy, prefixes=PrefixStore(small, width=8))
    return meter.engine, meter


@pytest.mark.parametrize("where", ["beyond", "before"])
def test_at_the_hard_line_a_recording_goes_before_anybody_is_put_aside(small, roomy, recorded_bytes, where):
    """Before the line, where what its rows would take when they come back does not fit below it."""
    engine, meter = guarded(small, 200 * recorded_bytes)
    told = Told(engine)
    for name, seed in (("a", 1), ("b", 2)):
        engine.submit(request(engine, name, seed, max_tokens=30))
    while not engine.replays.nbytes:
        hear(told, engine.step())
    assert engine.memory()["recording_bytes"] == engine.replays.nbytes
    short = engine.replays.nbytes // 2 if where == "beyond" else engine.replays.nbytes + engine.replays.owed // 2
    meter.base = 190 * recorded_bytes - short
    hear(told, engine.step())
    assert engine.replays.nbytes == 0
    assert engine.memory()["level"] == "soft", "without it memory is below the hard line"
    for _ in range(8):
        hear(told, engine.step())
        assert engine.replays.nbytes == 0, "none is made beyond the soft line"
    meter.base = 0
    while not engine.idle:
        hear(told, engine.step())
    assert engine.replays.recorded == 2
    assert told.kinds == {"submitted", "prefill", "token", "finished"}, "nobody was"
    plain = play(small, {0: submit(("a", 1, {"max_tokens": 30}), ("b", 2, {"max_tokens": 30}))}, replay=False)
    assert told.tokens == plain.tokens


def test_at_the_soft_line_a_recording_goes_where_somebody_waits(small, roomy, recorded_bytes):
    engine, meter = guarded(small, 200 * recorded_bytes)
    engine.submit(request(engine, "a", 1, max_tokens=60))
    while not engine.replays.nbytes:
        engine.step()
    meter.base = 170 * recorded_bytes
    for _ in range(3):
        engine.step()
    assert engine.memory()["level"] == "soft"
    assert engine.replays.nbytes > 0, "nobody does"
    engine.submit(request(engine, "b", 2, max_tokens=4))
    for _ in range(2):
        engine.step()
    assert engine.replays.nbytes == 0
    meter.base = 0
    list(engine.run())


def test_who_comes_in_finds_a_recordings_memory_free(small, roomy, recorded_bytes):
    """It needs what the recording takes, and gets it."""
    long = {"length": 6, "max_tokens": 2000}
    engine, meter = guarded(small, 1 << 30)
    need = engine._parking._hands._estimates.need(6, 2000, chunk=8)
    engine, meter = guarded(small, 12 * need)
    engine.submit(request(engine, "a", 1, max_tokens=200))
    while not engine.replays.nbytes:
        engine.step()
    engine.submit(request(engine, "b", 2, **long))
    free = engine._parking._hands.room("b")
    meter.base = engine.guard.capacity_bytes - free.prompts - engine.replays.nbytes // 2
    engine.step()
    assert engine.memory()["requests"] == {"decoding": 1, "prefilling": 1}
    assert engine.replays.nbytes == 0
    assert engine.guard.level == "normal", "it was not the lines"
    engine.close()

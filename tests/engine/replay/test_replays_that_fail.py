"""A machine that fails, while it records or later: who ends, and who goes on."""

from __future__ import annotations

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
from labkit.models import Rows
from tests.engine.replay.playing import (
    DRAWN,
    GREEDY,
    PAGED,
    Failing,
    compare,
    play,
    request,
    submit,
    with_room,
)
from tests.engine.test_batching import prompt

TWO = {
    0: submit(("a", 1, {"max_tokens": 9}), ("b", 2, {**DRAWN, "max_tokens": 11})),
    16: submit(("c", 3, {"max_tokens": 7})),
}


@pytest.fixture(scope="module")
def without_replays(small):
    with pytest.MonkeyPatch.context() as patched, use_target("reference"):
        with_room(patched)
        return play(small, TWO, replay=False)


@pytest.mark.parametrize(("name", "at"), [("prepare", 1), ("launch", 1), ("copy", 2)])
def test_a_machine_that_fails_while_recording_costs_no_row(small, roomy, without_replays, name, at):
    plain = without_replays
    replayed = play(small, TWO, replay=Failing(name, at))
    compare(plain, replayed)
    assert list(replayed.replays.refused.values()) == [f"RuntimeError: {name} failed: no such device"]


@pytest.mark.parametrize(
    ("name", "at", "lasting"),
    [
        ("launch", 5, False),
        ("read", 4, True),
        ("copies", 2, False),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("launch", 5, True), ("read", 4, False))),
    ],
)
def test_a_machine_that_fails_while_replaying_ends_the_rows_of_the_step(small, without_replays, name, at, lasting):
    plain = without_replays
    machine = Failing(name, at, lasting)
    replayed = play(small, TWO, replay=machine)
    failed = {id for id, (code, _) in replayed.errors.items() if code == "step_failed"}
    assert {"b"} <= failed <= {"a", "b"}
    for id, tokens in plain.tokens.items():
        mine = replayed.tokens.get(id, [])
        assert mine == tokens[: len(mine)]
    assert replayed.ends["c"] == plain.ends["c"]
    assert replayed.tokens["c"] == plain.tokens["c"], "the engine goes on"
    assert replayed.engine.cache_bytes == replayed.replays.nbytes
    assert not replayed.engine._executor.sessions()


def test_rows_that_cannot_come_back_end_and_are_never_decoded_from_what_is_stale(small, without_replays):
    """One is taken out in the middle: it fails with its neighbour, whose caches are as old; and nobody else does."""
    events = []

    def out(engine: Any) -> None:
        assert engine._executor.pause(engine._register.live["a"], events) is None
        engine._delivery.tell(events)

    replayed = play(small, {0: TWO[0], 7: out, 16: TWO[16]}, replay=Failing("copies", 2))
    assert {session.id for session, _ in events} == {"a", "b"}
    assert {code for code, _ in replayed.errors.values()} == {"step_failed"}
    assert replayed.tokens["c"] == without_replays.tokens["c"]
    for name in ("a", "b"):
        assert replayed.tokens[name] == without_replays.tokens[name][: len(replayed.tokens[name])]
    assert not replayed.engine._executor.sessions()


def test_rows_that_could_not_come_back_for_a_prompt_end_alone(small, roomy):
    """What they would decode from is stale; the prompt goes on."""
    script = {
        0: submit(("a", 1, {"max_tokens": 30}), ("b", 2, {**DRAWN, "max_tokens": 30})),
        7: submit(("c", 3, {"length": 20, "max_tokens": 7})),
    }
    plain = play(small, script, replay=False, **PAGED)
    replayed = play(small, script, replay=Failing("copies", 2), **PAGED)
    assert {name: code for name, (code, _) in replayed.errors.items()} == {"a": "step_failed", "b": "step_failed"}
    for name in ("a", "b"):
        assert replayed.tokens[name] == plain.tokens[name][: len(replayed.tokens[name])]
    assert replayed.tokens["c"] == plain.tokens["c"]
    assert not replayed.engine.paged.faults()
    assert replayed.engine.paged.used == 0


def test_who_asks_for_stale_caches_again_is_refused_again(small):
    replays, sampler = (
        replaying.Replays(small.model, Failing("copies", 2), patience=0),
        RowSampler(SamplingParams(**GREEDY), 0),
    )
    caches, replay = small.model.make_caches(), None
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    while replay is None:
        replay = replays.open((0,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100)
    replay.launch()
    with pytest.raises(RuntimeError, match="copies failed"):
        replay.close()
    for again in (replay.close, replay.launch):
        with pytest.raises(RuntimeError, match="the machine failed while these rows were replayed"):
            again()
    replay.discard()
    assert replays.open((1,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100) is None


def test_a_batch_that_could_not_come_back_gives_nobody_its_caches(small):
    engine = labkit.Engine(small, replay=Failing("copies", 2))
    engine.submit(request(engine, "a", 1, max_tokens=20))
    while engine.replays.unused:
        engine.step()
    (batch,) = engine._executor.lanes.batches()
    (([lost], error),) = engine._executor.lanes.come_back()
    assert (lost.id, str(error)) == ("a", "copies failed: no such device")
    with pytest.raises(RuntimeError, match="what their caches hold is older"):
        _ = batch.caches
    assert [event.reason for event in engine.run() if event.kind == "finished"] == ["error"]


def test_under_pressure_on_a_machine_that_has_failed_the_engine_goes_on(small, tmp_path):
    gib = 1 << 30
    meter = FakeMeter(gib)
    options = {
        "guard": MemoryGuard(gib, meter=meter, interval=0, min_chunk=2),
        "policy": Policy(patience=0, calm_polls=0),
        "prefixes": PrefixStore(small, width=8),
    }

    def press(engine: Any) -> None:
        meter.live = int(0.97 * gib)

    def relax(engine: Any) -> None:
        meter.live = 0

    script = {0: TWO[0], 7: press, 10: relax, 16: TWO[16]}
    replayed = play(small, script, replay=Failing("read", 2, lasting=True), **options)
    assert {replayed.errors[name][0] for name in ("a", "b")} == {"step_failed"}
    assert replayed.ends["c"][0] == "length"
    assert not replayed.engine._executor.sessions()


def test_a_machine_that_failed_is_left_alone(small):
    machine = Failing("launch", 4)
    replayed = play(small, {0: submit(("a", 1)), 12: submit(("b", 2))}, replay=machine)
    assert set(replayed.errors) == {"a"}
    assert list(replayed.replays.refused.values()) == ["RuntimeError: launch failed: no such device"]
    assert machine.calls == {"launch": 4}

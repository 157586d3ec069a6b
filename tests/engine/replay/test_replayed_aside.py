"""Replayed rows that are put aside and come back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

import labkit
from labkit.engine import MemoryGuard, Policy
from labkit.engine.memory import FakeMeter
from labkit.engine.prefix import PrefixStore
from labkit.models import Rows
from tests.engine.replay.playing import (
    DRAWN,
    HOST,
    both,
    play,
    request,
    submit,
)


@pytest.mark.parametrize(
    "beside", [(), pytest.param((("c", 3, {"max_tokens": 17}),), marks=pytest.mark.nightly)], ids=["alone", "of two"]
)
def test_a_row_taken_out_and_put_back(small, roomy, beside):
    """While it is out, others decode by the same recording."""
    kept = []

    def out(engine: Any) -> None:
        kept.append(engine._executor.pause(engine._register.live["a"], []))

    def back(engine: Any) -> None:
        engine._executor.resume(kept.pop())

    first = submit(("a", 1, {**DRAWN, "max_tokens": 14}), *beside)
    _, replayed = both(small, {0: first, 6: out, 7: submit(("b", 2)), 14: back}, at_least=8)
    meanwhile = [record.rows for record in replayed.engine.log if record.index in replayed.where]
    assert any("b" in rows and "a" not in rows for rows in meanwhile), "the others were replayed"


def test_pressure_pauses_and_resumes_replayed_rows(small, tmp_path):
    gib = 1 << 30
    found = []
    for replay in (False, HOST):
        meter = FakeMeter(gib)
        model = replace(small, path=small.path)
        options = {
            "guard": MemoryGuard(gib, meter=meter, interval=0, min_chunk=2),
            "policy": Policy(patience=0, calm_polls=0),
            "prefixes": PrefixStore(model, width=8),
        }

        def press(engine, meter=meter):
            meter.live = int(0.97 * gib)

        def relax(engine, meter=meter):
            meter.live = 0

        script = {0: submit(("a", 1, {"max_tokens": 12}), ("b", 2, {**DRAWN, "max_tokens": 12})), 6: press, 8: relax}
        found.append(play(model, script, replay=replay, **options))
    plain, replayed = found
    assert replayed.tokens == plain.tokens
    assert replayed.ends == plain.ends
    assert replayed.replayed > 4
    assert "paused" in replayed.kinds, "somebody was"


def test_where_memory_is_tight_a_recording_without_rows_goes(small, tmp_path):
    gib = 1 << 30
    meter = FakeMeter(gib)
    guard = MemoryGuard(gib, meter=meter, interval=0, min_chunk=2)
    engine = labkit.Engine(
        small, replay=HOST, guard=guard, policy=Policy(patience=0, calm_polls=0), prefixes=PrefixStore(small, width=8)
    )
    engine.submit(request(engine, "a", 1, max_tokens=40))
    while not engine.replays.nbytes:
        engine.step()
    meter.live = int(0.88 * gib)  # soft: nobody is put aside
    for _ in range(3):
        engine.step()
    assert guard.level == "soft"
    assert engine.replays.nbytes > 0, "its row decodes from it"
    list(engine.run())
    engine.submit(request(engine, "b", 2, max_tokens=2))
    list(engine.run())
    assert engine.replays.nbytes == 0, "nobody does any more"


def test_caches_asked_for_midway_hold_what_they_should(small, roomy):
    found = {}

    def look(engine: Any) -> None:
        (batch,) = engine._executor.lanes.batches()
        states = [array for cache in batch.caches for array in flat(cache.state)]
        found.setdefault(engine, []).append(
            [a.tolist() if isinstance(a, mx.array) else a for a in (*states, batch.pending.token)]
        )

    script = {0: submit(("a", 1, {"max_tokens": 12}), ("b", 2, {**DRAWN, "length": 9, "max_tokens": 12}))}
    script |= dict.fromkeys((4, 5, 8, 11), look)
    both(small, script, at_least=3)
    plain, replayed = found.values()
    assert plain == replayed


def flat(state: Any) -> list:
    return [part for one in state for part in flat(one)] if isinstance(state, (tuple, list)) else [state]


def test_a_checkpoint_midway(small, roomy):
    """Whoever speculates asks the lane for its caches, and finds rows that are not replayed."""

    def try_tokens(engine: Any) -> None:
        (batch,) = engine._executor.lanes.batches()
        caches, (session,) = batch.caches, batch.sessions
        for cache in caches:
            cache.checkpoint()
        engine.loaded.model(mx.array([[1, 2, 3]]), caches, Rows.single(session.fed), logits=None)
        for cache in caches:
            cache.rollback()

    both(small, {0: submit(("a", 1, {"max_tokens": 10})), 6: try_tokens, 8: try_tokens}, at_least=4)

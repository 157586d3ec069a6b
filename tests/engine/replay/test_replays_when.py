"""Who is replayed and when; several engines and threads; schedules at random."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import labkit
from labkit.engine import SamplingParams, worker
from labkit.engine import replay as replaying
from labkit.engine.sampling import RowSampler
from labkit.kernels.targets import use_target
from labkit.measure.direct import DirectRow
from labkit.models import Rows
from tests.engine.replay.playing import (
    DRAWN,
    GREEDY,
    HOST,
    Script,
    Told,
    both,
    hear,
    patience,
    play,
    request,
    submit,
)
from tests.engine.test_batching import prompt

# -- several engines and threads ---------------------------------------------------------------------------------------


def test_two_engines_on_one_model_and_one_machine(small):
    plain = [play(small, {0: submit(("a", seed, DRAWN))}, replay=False) for seed in (1, 2)]
    engines = [labkit.Engine(small, replay=HOST) for _ in plain]
    told = [Told(engine) for engine in engines]
    for seed, engine in enumerate(engines, 1):
        engine.submit(request(engine, "a", seed, **DRAWN))
    while not all(engine.idle for engine in engines):
        for one, engine in zip(told, engines, strict=True):
            hear(one, engine.step())
    assert [one.tokens for one in told] == [one.tokens for one in plain]
    assert all(one.replays.recorded == 1 for one in told)


def test_in_the_engines_own_thread(small, monkeypatch):
    work = worker._work

    def on_reference(*arguments):
        with use_target("reference"):
            work(*arguments)

    monkeypatch.setattr(worker, "_work", on_reference)
    wanted = play(small, {0: submit(("a", 1, DRAWN))}, replay=False).tokens["a"]
    engine = labkit.Engine(small, replay=HOST)

    async def read() -> list[int]:
        params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1, **DRAWN)
        stream = engine.astream(prompt(1, 6), params)
        return [event.token async for event in stream if event.kind == "token"]

    assert asyncio.run(read()) == wanted
    assert engine._executor.lanes.replays.recorded == 1
    engine.close()


# -- who is replayed, and when -----------------------------------------------------------------------------------------


def test_rows_wait_until_they_have_stayed_together(small, monkeypatch):
    monkeypatch.setattr(replaying, "QUIET", 2)
    patience(monkeypatch, 5)
    begun = []
    opened = replaying.Replays.open

    def opening(self, *arguments):
        found = opened(self, *arguments)
        begun.append(found is not None)
        return found

    monkeypatch.setattr(replaying.Replays, "open", opening)
    play(small, {0: submit(("a", 1))}, replay=HOST)
    assert begun == [False] * 5 + [True], "its form was not known"
    begun.clear()
    told = play(small, {0: submit(("a", 1)), 12: submit(("b", 2))}, replay=HOST)
    assert begun == [False] * 5 + [True] + [False] * 2 + [True]
    assert told.replays.recorded == 1


def test_rows_that_come_and_go_are_not_made_ready(small, monkeypatch):
    """Room in the buffers, the step as a function: only for rows that are about to be replayed."""
    patience(monkeypatch, 30)
    asked, decode_step = [], small.model.decode_step
    monkeypatch.setattr(
        small.model, "decode_step", lambda *a: (asked.append(len(a[2])), decode_step(*a))[1], raising=False
    )
    play(small, {0: submit(("a", 1)), 5: submit(("b", 2, {"max_tokens": 4}))}, replay=HOST)
    assert not asked, "no recording is there"
    patience(monkeypatch, 4)
    told = play(small, {0: submit(("a", 1, {"max_tokens": 20})), 8: submit(("b", 2, {"max_tokens": 4}))}, replay=HOST)
    assert set(asked) == {1}, "the recording is of one row"
    assert told.replays.recorded == 1


def test_rows_about_to_end_are_not_replayed(small, monkeypatch):
    monkeypatch.setattr(replaying, "FEWEST", 8)
    told = play(small, {0: submit(("a", 1, {"max_tokens": 9}))}, replay=HOST)
    assert (told.replayed, told.replays.recorded) == (0, 0)


@pytest.mark.nightly
def test_a_direct_row(small, roomy):
    def tokens(replays):
        caches = small.model.make_caches()
        small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
        stream = DirectRow(small.model, caches, 8, replays).tokens(3)
        return [next(stream) for _ in range(12)]

    replays = replaying.Replays(small.model, HOST)
    assert tokens(replays) == tokens(None)
    assert replays.recorded == 1


def test_tokens_may_be_read_as_late_as_one_likes(small):
    """And after the rows have come back."""
    caches = small.model.make_caches()
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    stream = DirectRow(small.model, caches, 8).tokens(3)
    wanted = [next(stream) for _ in range(6)]
    caches = small.model.make_caches()
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    replays, sampler = replaying.Replays(small.model, HOST, patience=0), RowSampler(SamplingParams(**GREEDY), 0)
    replay = None
    while replay is None:
        replay = replays.open((0,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100)
    choices = [replay.launch() for _ in range(6)]
    assert replay.close().token.tolist() == wanted[-1:]
    assert [token for choice in choices for token in choice.token.tolist()] == wanted


# -- at random ---------------------------------------------------------------------------------------------------------


CHOICES = [
    *[GREEDY, DRAWN, {"temperature": 1.3, "min_p": 0.05}, {"temperature": 0.8, "top_k": 5}] * 3,
    {"temperature": 0.7, "repetition_penalty": 1.2}, {"logprobs": 1},
]  # fmt: skip


def random_script(seed: int, requests: int) -> Script:
    draw, acts, at = random.Random(seed), {}, 0
    answers = [1, 4, 9, 20, 35] if requests > 10 else [2, 9, 12]

    def add(step: int, act: Callable) -> None:
        before = acts.get(step)
        acts[step] = act if before is None else lambda engine: (before(engine), act(engine))

    for index in range(requests):
        name, options = f"r{index}", dict(draw.choice(CHOICES))
        options |= {"max_tokens": draw.choice(answers), "length": draw.choice([1, 3, 9, 30, 70])}
        add(at, submit((name, seed * 1000 + index, options)))
        if draw.random() < 0.25:
            add(at + draw.randrange(1, 25), lambda engine, name=name: engine.cancel(name))
        at += draw.choice([0, 0, 1, 6, 12])
    return acts


def random_run(small: Any, seed: int, requests: int) -> Told:
    script = random_script(seed, requests)
    plain, replayed = both(small, script, at_least=requests // 2, max_rows=4)
    assert len(plain.ends) == requests
    assert not replayed.replays.refused
    return replayed


def test_at_random(small, roomy):
    random_run(small, seed=2, requests=5)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
def test_at_random_for_long(small, roomy, seed):
    random_run(small, seed=10 + seed, requests=50)

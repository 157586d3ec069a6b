"""Seed 000's scenarios, scaled: the same ratios of prompts to ceilings, a scripted meter, seconds on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

import labkit
from labkit.engine import Policy
from labkit.engine import batch as batch_module
from tests.engine.parking.conftest import GRID, ask
from tests.engine.parking.pressing import (
    EAGER,
    SAMPLED,
    alone,
    assert_same_but_for_near_ties,
    calm,
    len_before,
    pause_at,
    press,
)


@pytest.fixture(scope="session")
def trained() -> labkit.LoadedModel:
    return labkit.load("tiny-hybrid", graph="adapter")


def three(answer):
    """Prompts in the seed's ratio 130 : 115 : 100."""
    return [ask(id, length, answer, start=length) for id, length in (("a", 130), ("b", 115), ("c", 100))]


def submit_staggered(run, requests):
    """One arrives every other step, as half a second apart at the seed."""
    for request in requests:
        run.engine.submit(request)
        run.step()
        run.step()


def test_three_long_prompts_together_park_and_all_finish(rig, hybrid):
    expected = alone(rig, hybrid, *three(40))
    run = rig(hybrid, 1_000_000, policy=EAGER)
    submit_staggered(run, three(40))
    run.until(lambda run: run.tokens("a") and run.of("b", "prefill") and run.of("b", "prefill")[-1].done >= 48)
    run.meter.outside = 500_000  # "a" fits beside it, and a part of "b"
    run.all()
    assert run.reasons() == {"a": "length", "b": "length", "c": "length"}
    assert run.errors() == {}
    assert run.kinds("parked")
    assert_same_but_for_near_ties(run, expected)
    for event in run.events:
        if event.kind == "parked":
            resumed = next(e for e in run.of(event.request, "resumed") if e.time > event.time)
            assert resumed.done == event.done, "all that was committed is there again"
            assert event.done % GRID == 0
    assert run.engine.memory()["costs"]["recomputed_tokens"] < GRID * len(run.kinds("parked"))


def test_three_long_answers_together_pause_and_all_finish(rig, hybrid):
    expected = alone(rig, hybrid, *three(60))
    run = rig(hybrid, 1_400_000, policy=EAGER)
    submit_staggered(run, three(60))
    run.until(lambda run: all(run.tokens(id) for id in "abc"))
    run.meter.outside = 300_000  # 1,100,000 are left, and the three will want more
    run.all()
    assert run.reasons() == {"a": "length", "b": "length", "c": "length"}
    assert run.errors() == {}
    assert run.kinds("paused")
    assert_same_but_for_near_ties(run, expected)


@pytest.fixture
def logits(monkeypatch):
    """Every row of logits that a token was chosen from, by seed and step."""
    seen = {}
    choose = batch_module.choose

    def spy(scores, fed, samplers, steps, masks):
        for row, (sampler, step) in enumerate(zip(samplers, steps, strict=True)):
            seen.setdefault((sampler.seed, step), []).append(np.array(scores[row].astype(batch_module.mx.float32)))
        return choose(scores, fed, samplers, steps, masks)

    monkeypatch.setattr(batch_module, "choose", spy)
    return seen


@pytest.mark.parametrize(
    ("model", "offsets", "sampling"),
    [
        pytest.param("hybrid", (5, 16, 52, 85), {"seed": 7}, id="random weights, greedy"),
        pytest.param("hybrid", (5, 16, 52, 85), SAMPLED, id="random weights, seeded"),
        pytest.param("trained", (2, 5, 11, 17), {"seed": 7}, id="tiny-hybrid, greedy", marks=pytest.mark.nightly),
        pytest.param("trained", (2, 5, 11, 17), SAMPLED, id="tiny-hybrid, seeded"),
    ],
)
def test_identity_after_four_forced_pauses(rig, request, logits, model, offsets, sampling):
    """Token for token and logit for logit, with no prefill and no new seed."""
    loaded = request.getfixturevalue(model)
    plain = rig(loaded)
    plain.engine.submit(ask("r", 21, offsets[-1] + 5, **sampling))
    plain.all()
    expected = {key: values[0] for key, values in logits.items()}
    logits.clear()
    run = rig(loaded, 10_000_000, policy=EAGER)
    run.engine.submit(ask("r", 21, offsets[-1] + 5, **sampling))
    for offset in offsets:
        pause_at(run, "r", offset)
    run.all()
    assert run.kinds("parked", "paused", "resumed") == ["paused", "resumed"] * 4
    assert [len_before(run, event) for event in run.of("r", "paused")] == [offset + 1 for offset in offsets]
    assert run.tokens("r") == plain.tokens("r")
    assert run.text("r") == plain.text("r")
    chosen = {key: values for key, values in logits.items() if key[1] < len(run.tokens("r"))}
    assert set(chosen) == set(expected)
    for key, values in chosen.items():
        assert len(values) == 1, "a token was chosen twice"
        assert np.array_equal(values[0], expected[key]), key
    prefills = [record for record in run.engine.log if record.kind == "prefill"]
    assert sum(sum(record.lengths) for record in prefills) == 20


def test_a_row_parked_out_of_a_batch_leaves_its_companion_as_it_was(rig, hybrid):
    """Both end with the tokens that they have without a pause; the companion goes on while the other is away."""
    requests = [ask("long", 60, 40), ask("short", 20, 40, start=3)]
    expected = alone(rig, hybrid, *requests)
    run = rig(hybrid, 10_000_000, policy=Policy(patience=5))
    for one in requests:
        run.engine.submit(one)
    run.until(lambda run: len(run.tokens("short")) >= 6 and len(run.tokens("long")) >= 4)
    assert any(len(record.rows) == 2 for record in run.engine.log if record.kind == "decode")
    press(run)
    run.until(lambda run: run.of("long", "paused"), limit=3)
    held = len(run.tokens("long"))
    press(run, 0.925)  # calm enough to go on, too little for another row
    before = len(run.tokens("short"))
    run.until(lambda run: len(run.tokens("short")) >= before + 5)
    assert len(run.tokens("long")) == held
    calm(run)
    run.all()
    assert run.errors() == {}
    assert_same_but_for_near_ties(run, expected)


@pytest.mark.parametrize("pressure", ["park", "single-victim"])
def test_one_victim_is_the_largest_and_the_others_finish(rig, hybrid, pressure):
    """Nothing can pause (no store, prompts all computed): exactly one ends, with a structured error."""
    policy = Policy(pressure=pressure, reserve="nothing", patience=2)
    run = rig(hybrid, 2_000_000, policy=policy, store=False)
    for one in (ask("small", 20, 30), ask("large", 90, 30, start=1), ask("medium", 50, 30, start=2)):
        run.engine.submit(one)
    run.until(lambda run: all(run.tokens(id) for id in ("small", "large", "medium")))
    press(run)
    run.meter.outside = run.meter.outside(0)  # what it frees is free
    run.until(lambda run: run.errors(), limit=12)
    for _ in range(5):
        run.step()
    assert set(run.errors()) == {"large"}
    calm(run)
    run.all()
    error = run.errors()["large"]
    assert (error["code"], error["retryable"]) == ("memory_pressure", True)
    assert error["ceiling_bytes"] == run.engine.guard.ceiling_bytes
    assert run.reasons() == {"large": "error", "small": "length", "medium": "length"}


def test_an_emergency_ends_all_that_hold_memory_and_passes_without_a_latch(rig, hybrid):
    """Trap 46: one reading far above the ceiling; the next request runs."""
    run = rig(hybrid, 2_000_000)
    for one in (ask("a", 30, 50), ask("b", 30, 50, start=1)):
        run.engine.submit(one)
    run.until(lambda run: run.tokens("a") and run.tokens("b"))
    press(run, 1.1)
    run.step()
    calm(run)
    assert {id: error["code"] for id, error in run.errors().items()} == dict.fromkeys("ab", "memory_emergency")
    assert run.engine.idle
    assert run.engine._executor.cache_bytes == 0
    run.engine.submit(ask("next", 30, 5))
    run.step()
    assert run.engine.memory()["level"] == "normal"
    assert run.all().reasons()["next"] == "length"


def test_newcomers_never_starve_the_first_in_line(rig, hybrid):
    run = rig(hybrid, 640_000, policy=Policy(reserve="nothing"))
    started, start = [], run.engine._parking._hands.start
    run.engine._parking._hands.start = lambda id: (started.append(id), start(id))
    run.engine.submit(ask("runs", 100, 30))
    run.until(lambda run: run.tokens("runs"))
    run.engine.submit(ask("large", 120, 5, start=1))
    for number in range(6):
        run.engine.submit(ask(f"small{number}", 10, 3, start=number))
    run.all()
    assert started == ["runs", "large", *(f"small{number}" for number in range(6))]
    assert run.errors() == {}
    assert set(run.reasons().values()) == {"length"}

"""Seed 000's scenarios, scaled: the same ratios of prompts to ceilings, a scripted meter, seconds on a CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest

import labkit
from labkit.engine import CapacityError, Engine, MemoryGuard, Policy
from labkit.engine import batch as batch_module
from labkit.engine.memory import FakeClock, FakeMeter, Lines
from tests.engine.parking.conftest import GRID, ask

EAGER = Policy(reserve="nothing", patience=0)
"""Lets everybody in who fits at that moment, so that pressure comes; puts the only row aside at once."""

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.1}


@pytest.fixture(scope="session")
def trained() -> labkit.LoadedModel:
    return labkit.load("tiny-hybrid", graph="adapter")


def alone(rig, loaded, *requests):
    """What each request answers by itself, nobody watching."""
    answers = {}
    for request in requests:
        run = rig(loaded)
        run.engine.submit(request)
        answers[request.id] = run.all().tokens(request.id)
    return answers


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


def assert_same_but_for_near_ties(run, expected):
    """Batches of other sizes round differently; on this model no two best tokens are so close that it shows."""
    for id, tokens in expected.items():
        assert run.tokens(id) == tokens, id


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


def pause_at(run, id, offset):
    """Let memory be tight once so many tokens were given, and calm again once the row is gone."""
    run.until(lambda run: len(run.tokens(id)) >= offset)
    press(run)
    count = len(run.of(id, "paused"))
    run.until(lambda run: len(run.of(id, "paused")) > count, limit=3)
    calm(run)


def press(run, share=0.97):
    """Memory at this share of the ceiling, whatever the engine does."""
    live, wanted = run.meter.live, int(share * run.engine.guard.ceiling_bytes)
    run.meter.outside = lambda _: max(0, wanted - live())


def calm(run):
    run.meter.outside = 0


def len_before(run, event):
    return sum(e.kind == "token" and e.request == event.request for e in run.events[: run.events.index(event)])


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


def test_never_fits_is_refused_before_anything_starts(rig, hybrid):
    run = rig(hybrid, 600_000)
    known = run.engine.capacity().as_record()
    with pytest.raises(CapacityError) as refused:
        run.engine.submit(ask("huge", 60, 2_000_000))
    record = refused.value.record
    assert (record["code"], record["retryable"]) == ("context_exceeds_capacity", False)
    numbers = {name: value for name, value in record.items() if isinstance(value, int) and name != "retryable"}
    assert set(numbers) == {
        "prompt_tokens", "max_tokens", "required_bytes", "capacity_bytes", "weights_bytes", "kv_bytes_per_token",
        "max_context_tokens",
    }  # fmt: skip
    shared = {"capacity_bytes", "weights_bytes", "kv_bytes_per_token", "max_context_tokens"}
    assert {name: record[name] for name in shared} == {name: known[name] for name in shared}
    assert record["required_bytes"] > record["capacity_bytes"] == run.engine.guard.capacity_bytes
    assert json.loads(json.dumps(record)) == record
    assert run.engine.idle
    assert run.engine.prefixes.stats()["blocks_known"] == 0
    run.engine.submit(ask("small", 20, 3))
    assert run.all().reasons() == {"small": "length"}


def test_the_largest_context_is_accepted_and_one_more_is_not(rig, hybrid):
    run = rig(hybrid, 600_000)
    largest = run.engine.capacity().max_context_tokens
    run.engine.submit(ask("most", largest - 1, 1))
    with pytest.raises(CapacityError):
        run.engine.submit(ask("more", largest, 1))


def test_fits_later_waits_without_an_error(rig, hybrid):
    """The second fits alone and not beside the first: it waits, and starts when the first has ended, from a new
    measurement that knows nothing of what has just been freed into the pool."""
    run = rig(hybrid, 640_000)
    run.engine.submit(ask("first", 130, 12))
    run.until(lambda run: run.tokens("first"))
    run.engine.submit(ask("second", 120, 12, start=5))
    run.step()
    assert run.engine.memory()["requests"] == {"held": 1, "decoding": 1}
    run.until(lambda run: "first" in run.reasons())
    run.meter.pool = 500_000
    run.all()
    assert run.reasons() == {"first": "length", "second": "length"}
    assert not run.kinds("parked", "paused", "error")
    ended = next(e.time for e in run.of("first", "finished"))
    assert all(event.time >= ended for event in run.of("second", "prefill"))


@pytest.mark.parametrize("kept", [0.3, 0.8])
def test_resend_after_cancel_keeps_what_was_committed(rig, hybrid, kept):
    run, length = rig(hybrid, 10_000_000), 100
    run.engine.submit(ask("r", length, 4))
    run.until(lambda run: any(event.done >= kept * length for event in run.of("r", "prefill")))
    done = run.of("r", "prefill")[-1].done
    run.engine.cancel("r")
    run.step()
    run.engine.submit(ask("again", length, 4))
    run.all()
    assert run.of("again", "finished")[0].usage.cached_tokens == done // GRID * GRID > 0


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


def test_trap_47_a_full_pool_refuses_nobody(rig, hybrid):
    run = rig(hybrid, 600_000)
    run.meter.pool = run.engine.guard.ceiling_bytes
    run.engine.submit(ask("tiny", 30, 3))
    run.step()
    run.step()
    assert run.of("tiny", "prefill")
    for _ in range(3):  # under load too
        run.meter.pool = run.engine.guard.ceiling_bytes
        run.step()
    assert run.meter.pool == 0
    run.all()
    assert not run.kinds("parked", "paused", "error")


def test_with_all_options_off_nothing_is_different(hybrid):
    """The same events and the same log as from an engine that never heard of memory, and as with a guard that sees no
    pressure; only times differ."""

    def told(**options):
        engine = Engine(hybrid, prefill_chunk=GRID, **options)
        for one in [ask("a", 30, 9, seed=1), ask("b", 45, 7, start=1, **SAMPLED), ask("c", 12, 30, start=2, seed=2)]:
            engine.submit(one)
        events = []
        while not engine.idle:
            events += engine.step()
            if sum(event.request == "c" and event.kind == "token" for event in events) == 4:
                engine.cancel("c")
        timeless = {"time", "started", "seconds", "usage"}
        strip = lambda record: {name: value for name, value in record.as_record().items() if name not in timeless}
        return [strip(event) for event in events], [strip(record) for record in engine.log]

    off = told()
    meter = FakeMeter(1 << 40)
    assert told(guard=MemoryGuard(meter=meter, clock=FakeClock())) == off
    assert meter.readings > 10
    assert Engine(hybrid).memory() is None


def test_options_that_need_each_other_say_so(hybrid):
    with pytest.raises(ValueError, match="needs a guard"):
        Engine(hybrid, policy=Policy())
    with pytest.raises(ValueError, match=r"leaves .* and the weights take"):
        Engine(hybrid, guard=MemoryGuard(hybrid.weights_bytes, meter=FakeMeter(1 << 40)))
    with pytest.raises(ValueError, match="give the engine a guard and a store"):
        Engine(hybrid).resume_paused()


def test_a_chunk_shrinks_to_what_is_free_and_what_it_computed_is_found_again(rig, hybrid):
    """Smaller chunks round differently: their blocks are stored under their widths, found again after a park by the
    prompt that computed them, and by nobody else."""
    run = rig(hybrid, 10_000_000, policy=EAGER)
    run.engine.submit(ask("r", 60, 4))
    run.until(lambda run: run.of("r", "prefill"))
    run.engine.guard.min_chunk = 3
    press(run, 0.949)
    run.until(lambda run: run.of("r", "prefill")[-1].done >= 32)
    widths = [record.lengths[0] for record in run.engine.log if record.kind == "prefill"]
    assert min(widths) < GRID
    assert all(width >= 1 for width in widths)
    press(run, 0.97)
    run.until(lambda run: run.of("r", "parked"), limit=3)
    assert run.of("r", "parked")[0].done >= 32
    calm(run)
    run.all()
    assert run.of("r", "resumed")[0].done == run.of("r", "parked")[0].done
    other = rig(hybrid, store=False)
    run.engine.submit(ask("same", 60, 4))
    run.all()
    assert run.of("same", "finished")[0].usage.cached_tokens == GRID, "blocks of odd chunks are not a stranger's"
    other.engine.submit(ask("same", 60, 4))
    assert run.tokens("same") == other.all().tokens("same")


def test_lines_move_when_the_seeds_hard_threshold_is_asked_for(hybrid):
    guard = MemoryGuard(1000, lines=Lines(soft=0.7, hard=0.8), meter=FakeMeter(1000, 805), clock=FakeClock())
    assert guard.poll() == "hard"
    assert guard.capacity_bytes == 800

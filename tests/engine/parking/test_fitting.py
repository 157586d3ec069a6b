"""What fits now, later and never; what is kept; options on and off."""

from __future__ import annotations

import dataclasses
import json

import pytest

from labkit.engine import CapacityError, Engine, MemoryGuard, Policy
from labkit.engine.memory import FakeClock, FakeMeter, Lines
from tests.engine.parking.conftest import GRID, ask
from tests.engine.parking.pressing import EAGER, SAMPLED, calm, press


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


def test_a_model_of_nearly_the_whole_ceiling_serves_several_at_once(rig, hybrid):
    """Soft at 85 % of a ceiling of which the weights fill more would let in one request at a time."""
    heavy, room = dataclasses.replace(hybrid, weights_bytes=20_000_000), 1_000_000
    assert heavy.weights_bytes > 0.85 * (heavy.weights_bytes + room) / 0.95
    run = rig(heavy, room, policy=Policy(reserve="nothing"))
    for start, id in enumerate("abc"):
        run.engine.submit(ask(id, 24, 40, start=start))
    run.until(lambda run: all(run.tokens(id) for id in "abc"))
    assert not run.reasons(), "all three answer at the same time"
    run.all()
    assert run.reasons() == dict.fromkeys("abc", "length")
    assert not run.errors()

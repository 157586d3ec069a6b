"""Many short random requests with cancels and failures: all end, and nothing is left behind."""

from __future__ import annotations

import gc
import random
import threading

import mlx.core as mx
import pytest

import labkit
from tests.nightly import many
from tests.settled import falls_to


class Fussy:
    """A constraint that permits everything and fails at some token."""

    def __init__(self, at: int):
        self.left = at

    def mask(self) -> None:
        return None

    def accept(self, token: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the grammar broke")


def soak(engine: labkit.Engine, count: int, seed: int) -> dict[str, str]:
    """Submit `count` requests while others run -> the reason of each one's end."""
    draw = random.Random(seed)
    ends: dict[str, str] = {}
    live: list[str] = []
    submitted, broken = 0, engine.loaded.model
    forward = type(broken).__call__
    while submitted < count or not engine.idle:
        for _ in range(draw.randint(0, 4)):
            if submitted == count or len(live) > 40:
                break
            trouble = draw.random()
            fail_at = draw.randint(0, 5)

            def on_event(event, at=fail_at):
                if event.index == at:
                    raise KeyError("broken callback")

            request = engine.request(
                draw.choices(range(1, 256), k=draw.choice([1, 2, 5, 9, 20])),
                max_tokens=draw.randint(1, 8),
                temperature=draw.choice([0.0, 0.9]),
                stop=draw.choice([(), ("a",), ("ab", "q")]),
                logprobs=draw.choice([None, None, 2]),
                repetition_penalty=draw.choice([None, 1.2]),
                ignore_eos=draw.random() < 0.5,
                priority=draw.randint(0, 2),
            )
            engine.submit(
                request,
                on_event=on_event if trouble < 0.05 else None,
                constraint=Fussy(fail_at) if 0.05 < trouble < 0.12 else None,
            )
            live.append(request.id)
            submitted += 1
        if live and draw.random() < 0.1:
            engine.cancel(draw.choice(live))
        if draw.random() < 0.004:
            type(broken).__call__ = lambda *_, **__: 1 / 0
        try:
            events = engine.step()
        finally:
            type(broken).__call__ = forward
        for event in events:
            if event.kind == "finished":
                assert event.request not in ends, "one end each"
                ends[event.request] = event.reason
                live.remove(event.request)
    return ends


def check(loaded, count: int) -> None:
    """A soak leaves no request, row, byte or thread behind."""
    engine = labkit.Engine(loaded, prefill_chunk=8, max_rows=16, capacity_bytes=loaded.weights_bytes + 6_000_000)
    soak(engine, 20, seed=1)
    gc.collect()
    mx.synchronize()
    bytes_before, threads_before = mx.get_active_memory(), set(threading.enumerate())
    ends = soak(engine, count, seed=2)
    assert len(ends) == count
    reasons = set(ends.values())
    assert {"length", "cancelled", "error", "stop"} <= reasons
    assert engine.idle
    assert not engine._register.live
    assert engine._executor.sessions() == []
    assert engine._executor.cache_bytes == 0
    assert engine._executor.lanes.batches() == []
    joined = [id for record in engine.log for id in record.joins]
    left = [id for record in engine.log for id in record.leaves]
    assert len(joined) == len(set(joined))
    assert sorted(joined) == sorted(left), "whoever joined has left, once"
    assert max(record.cache_bytes for record in engine.log) <= 6_000_000
    assert max(len(record.rows) for record in engine.log) >= 8
    gc.collect()
    assert falls_to(bytes_before + 50_000)
    assert set(threading.enumerate()) <= threads_before


def test_five_hundred_requests(loaded):
    check(loaded("llama"), 500)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid"])
def test_ten_thousand_requests(loaded, name):
    check(loaded(name), many(10_000))

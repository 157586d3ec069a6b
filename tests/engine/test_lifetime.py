"""An engine goes when the last reference to it does: its caches, its model, its store's copies and its thread, at once.

The garbage collector is off throughout: in a program about tight memory nobody waits for it.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import mlx.core as mx
import pytest

import labkit
from labkit.engine.memory import FakeMeter
from labkit.engine.prefix import PrefixStore
from tests.engine.test_batching import prompt
from tests.settled import falls_to
from tests.tiny_models import write_checkpoint

GIB = 1 << 30
SCALARS = 256  # bytes: now and then MLX itself keeps a number or two; the smallest cache here takes thousands


@pytest.fixture(autouse=True)
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("models") / "hybrid", "hybrid")


def fresh(folder, graph="adapter"):
    return labkit.load(folder, graph=graph)


def halfway(engine, requests=3):
    """Prompts and rows that are in the middle of their work: their caches live."""
    for i in range(requests):
        engine.submit(engine.request(prompt(i, 9 + 8 * i), max_tokens=40, ignore_eos=True, temperature=0.5, logprobs=2))
    for _ in range(8):
        engine.step()
    assert engine.cache_bytes > 0


def plain(loaded, tmp_path):
    engine = labkit.Engine(loaded, prefill_chunk=8)
    halfway(engine)
    return engine


def paged(loaded, tmp_path):
    engine = labkit.Engine(loaded, prefill_chunk=8, kv="paged", block_tokens=8, pool_bytes=1 << 20)
    halfway(engine)
    return engine


def with_store(loaded, tmp_path):
    engine = labkit.Engine(loaded, prefixes=PrefixStore(loaded, width=8))
    halfway(engine)
    list(engine.run())
    halfway(engine)
    return engine


def with_folder(loaded, tmp_path):
    engine = labkit.Engine(loaded, prefixes=PrefixStore(loaded, tmp_path / "store", width=8, keep_free_bytes=0))
    halfway(engine)
    return engine


def with_rows_put_aside(loaded, tmp_path):
    meter = FakeMeter(GIB)
    guard = labkit.engine.MemoryGuard(GIB, meter=meter, interval=0)
    engine = labkit.Engine(loaded, guard=guard, prefixes=PrefixStore(loaded, width=8))
    halfway(engine)
    meter.live = int(0.97 * GIB)
    engine.step()
    meter.live = 0
    aside = engine.memory()["costs"]
    assert aside["pauses"] + aside["parks"] == 2
    for _ in range(12):
        engine.step()
    assert engine.memory()["costs"]["resumes"] == 2
    meter.live = int(0.97 * GIB)
    engine.step()
    return engine


def after_a_failing_forward(loaded, tmp_path):
    engine = plain(loaded, tmp_path)
    engine._executor.lanes._lanes["shared"].launch = lambda masks: 1 / 0
    assert "error" in {event.kind for _ in range(3) for event in engine.step()}
    halfway(engine)
    return engine


def after_a_failing_row(loaded, tmp_path):
    engine = plain(loaded, tmp_path)
    session = engine._executor.lanes.sessions()[0]
    session._sampler = type("Broken", (), {"together": None, "__call__": lambda *a: 1 / 0})()
    broken = type("Grammar", (), {"mask": lambda self: None, "accept": lambda self, token: 1 / 0})()
    engine.submit(engine.request([1, 2], max_tokens=9), constraint=broken)
    engine.submit(engine.request([1, 2], max_tokens=9), on_event=lambda event: 1 / 0)
    kinds = [event.kind for _ in range(12) for event in engine.step()]
    assert kinds.count("error") == 3
    return engine


def after_a_refusal(loaded, tmp_path):
    engine = plain(loaded, tmp_path)
    with pytest.raises(labkit.engine.CapacityError):
        engine.submit(engine.request([1], max_tokens=10**9))
    return engine


def after_a_dropped_stream(loaded, tmp_path):
    engine = plain(loaded, tmp_path)
    events = engine.stream([5, 6], max_tokens=30, ignore_eos=True)
    next(events), next(events)
    del events
    return engine


def after_an_answer_and_a_timeline(loaded, tmp_path):
    engine = plain(loaded, tmp_path)
    engine.generate([5, 6], max_tokens=3, stop=("a",), repetition_penalty=1.2, xtc_probability=0.5, seed=1)
    assert engine.log[-1].as_record()
    return engine


SETTINGS = (
    plain,
    paged,
    with_store,
    with_folder,
    with_rows_put_aside,
    after_a_failing_forward,
    after_a_failing_row,
    after_a_refusal,
    after_a_dropped_stream,
    after_an_answer_and_a_timeline,
)


def live_bytes():
    mx.synchronize()
    return mx.get_active_memory()


@pytest.mark.parametrize("make", SETTINGS, ids=lambda make: make.__name__)
def test_the_last_reference_takes_everything_along(folder, tmp_path, make):
    make(fresh(folder), tmp_path / "before")  # what is kept for good (tables, compiled functions) is made by the first
    gc.collect()
    before = live_bytes()
    loaded = fresh(folder)
    held = live_bytes()
    engine = make(loaded, tmp_path / "now")
    gone, store = weakref.ref(engine), engine.prefixes
    parts = [weakref.ref(part) for part in (engine._executor, engine._register, engine._delivery, engine._scheduler)]
    if store is not None:
        parts += [weakref.ref(part) for part in (store, store._tiers, store._tiers.memory, store._shared)]
    del store
    assert live_bytes() > held + 10 * SCALARS, "caches live"
    del engine
    assert gone() is None
    assert [part() for part in parts if part() is not None] == []
    assert falls_to(held + SCALARS)
    model = weakref.ref(loaded.model)
    del loaded
    assert model() is None
    assert falls_to(before + SCALARS)


@pytest.mark.parametrize("end", ["read to its end", "left", "refused", "broken"])
def test_after_astream_too_and_its_thread_ends(folder, monkeypatch, end):
    """And leaves no stream of MLX's behind, which now and then would abort the program at its end."""
    left_by, clear_streams = [], mx.clear_streams
    monkeypatch.setattr(mx, "clear_streams", lambda: left_by.append(threading.current_thread()) or clear_streams())
    others = set(threading.enumerate())
    loaded = fresh(folder)
    held = live_bytes()

    async def read(engine):
        events, kinds = engine.astream([1], max_tokens=10**9 if end == "refused" else 30, ignore_eos=True), []
        try:
            async for event in events:
                kinds.append(event.kind)
                if end == "left" and event.index == 2:
                    break
        except labkit.engine.CapacityError:  # here: an error that leaves asyncio.run lies in a cycle of asyncio's own
            kinds.append("refused")
        await events.aclose()
        return kinds[-1]

    engine = labkit.Engine(loaded)
    gone = weakref.ref(engine)
    if end == "broken":
        monkeypatch.setattr(engine._scheduler, "plan", lambda *_: 1 / 0)
    last = {"left": "token", "refused": "refused"}.get(end, "finished")
    assert asyncio.run(read(engine)) == last
    (thread,) = set(threading.enumerate()) - others
    del engine
    thread.join(600)
    assert not thread.is_alive()
    assert left_by == [thread]
    assert gone() is None
    assert falls_to(held + SCALARS)


def test_an_async_stream_holds_its_engine(folder):
    async def read():
        return [event async for event in labkit.Engine(fresh(folder)).astream([1], max_tokens=5, ignore_eos=True)]

    assert asyncio.run(read())[-1].reason == "length"


def test_an_engine_in_the_middle_of_its_threads_work_ends_with_it(folder):
    # The thread holds the engine for the length of a step; then nobody does.
    others = set(threading.enumerate())
    engine = labkit.Engine(fresh(folder))
    gone = weakref.ref(engine)

    async def begin(engine):
        events = engine.astream([1], max_tokens=4000, ignore_eos=True)
        return [await anext(events) for _ in range(3)], await events.aclose()

    asyncio.run(begin(engine))
    (thread,) = set(threading.enumerate()) - others
    del engine
    thread.join(600)
    assert not thread.is_alive()
    assert gone() is None

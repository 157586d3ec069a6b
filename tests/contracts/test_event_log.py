"""Contract 4, event log: plain data from which a run can be told, drawn and replayed."""

from __future__ import annotations

import json

import pytest

import labkit


def run(hybrid) -> tuple[labkit.Engine, list, list[labkit.Request]]:
    engine = labkit.Engine(hybrid, prefill_chunk=4)
    requests = [
        engine.request(tuple(range(20, 31)), max_tokens=5, ignore_eos=True),
        engine.request((9,), max_tokens=3, ignore_eos=True),
        engine.request((7, 8), max_tokens=400, ignore_eos=True),
    ]
    for request in requests:
        engine.submit(request)
    events = []
    while not engine.idle:
        events += engine.step()
        if sum(event.kind == "token" and event.request == requests[2].id for event in events) == 2:
            engine.cancel(requests[2].id)
    return engine, events, requests


def test_everything_is_json(hybrid):
    engine, events, _ = run(hybrid)
    for record in (*engine.log, *events):
        assert json.loads(json.dumps(record.as_record()))


def test_the_log_adds_up(hybrid):
    engine, events, requests = run(hybrid)
    assert [record.index for record in engine.log] == list(range(len(engine.log)))
    starts = [record.started for record in engine.log]
    assert starts == sorted(starts)
    for request in requests:
        mine = [record for record in engine.log if request.id in record.rows]
        column = [record.rows.index(request.id) for record in mine]
        assert [request.id in record.joins for record in mine] == [True, *[False] * (len(mine) - 1)]
        fed = [token for record, at in zip(mine, column, strict=True) for token in record.inputs[at]]
        tokens = [event.token for event in events if event.request == request.id and event.kind == "token"]
        assert fed[: len(request.tokens)] == list(request.tokens)
        assert tokens[: len(fed) - len(request.tokens)] == fed[len(request.tokens) :]
        position = 0
        for record, at in zip(mine, column, strict=True):
            assert record.positions[at] == position
            assert record.lengths[at] == len(record.inputs[at])
            position += record.lengths[at]
        chunks = [record.chunk for record in mine if record.kind == "prefill" and record.chunk]
        assert all(end - start <= 4 for start, end in chunks)
    for record in engine.log:
        assert record.cache_bytes > 0 or record.leaves
        if record.kind != "read":
            assert record.shape == (len(record.rows), max(record.lengths))
    left = [id for record in engine.log for id in record.leaves]
    assert sorted(left) == sorted(request.id for request in requests), "whoever joined leaves once, cancelled ones too"
    reasons = {event.request: event.reason for event in events if event.kind == "finished"}
    assert [reasons[request.id] for request in requests] == ["length", "length", "cancelled"]


@pytest.mark.parametrize("reason", ["forward", "callback"])
def test_a_request_that_fails_leaves_the_log_too(hybrid, monkeypatch, reason):
    engine = labkit.Engine(hybrid)
    seen = []

    def on_event(event):
        seen.append(event.kind)
        if seen.count("token") < 2:
            return
        if reason == "callback":
            raise RuntimeError("broken")
        monkeypatch.setattr(type(hybrid.model), "__call__", lambda *_, **__: 1 / 0)

    request = engine.request((7, 8), max_tokens=9, ignore_eos=True)
    engine.submit(request, on_event=on_event)
    assert list(engine.run())[-1].reason == "error"
    assert [record.joins for record in engine.log if record.joins] == [(request.id,)]
    assert [record.leaves for record in engine.log if record.leaves] == [(request.id,)]


def test_the_log_is_bounded(hybrid):
    engine = labkit.Engine(hybrid, log_limit=10)
    engine.generate((1, 2), max_tokens=30, ignore_eos=True)
    assert len(engine.log) <= 10
    assert engine.log[-1].index > 25


def test_a_pause_is_told_and_the_log_adds_up_across_it(hybrid, tmp_path):
    from labkit.engine import MemoryGuard, Policy
    from labkit.engine.memory import FakeClock, FakeMeter
    from labkit.engine.prefix import PrefixStore

    meter = FakeMeter(1 << 40, hybrid.weights_bytes)
    guard = MemoryGuard(1 << 30, meter=meter, clock=FakeClock(), interval=0)
    with PrefixStore(hybrid, tmp_path / "store", width=4, keep_free_bytes=0) as store:
        engine = labkit.Engine(hybrid, guard=guard, policy=Policy(patience=0), prefixes=store)
        request = engine.request(tuple(range(20, 31)), max_tokens=6, ignore_eos=True)
        engine.submit(request)
        events = []
        while not engine.idle:
            events += engine.step()
            kinds = [event.kind for event in events]
            meter.live = int(0.97 * (1 << 30)) if kinds.count("token") == 3 and "paused" not in kinds else 0
    for record in (*engine.log, *events):
        assert json.loads(json.dumps(record.as_record()))
    assert [kind for kind in kinds if kind in ("parked", "paused", "resumed")] == ["paused", "resumed"]
    fed = [token for record in engine.log for token in record.inputs[0]]
    tokens = [event.token for event in events if event.kind == "token"]
    assert fed == [*request.tokens, *tokens[:-1]]
    operations = [operation for record in engine.log for operation in record.operations]
    assert ("pause", request.id) in operations
    assert ("resume", request.id) in operations
    assert [record.leaves for record in engine.log if record.leaves] == [(request.id,)]

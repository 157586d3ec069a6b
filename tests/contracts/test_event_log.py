"""Contract 4, event log: plain data from which a run can be told, drawn and replayed."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

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
        mine = [record for record in engine.log if record.rows == (request.id,)]
        assert [record.joins for record in mine if record.joins] == [(request.id,)]
        fed = [token for record in mine for token in record.inputs[0]]
        tokens = [event.token for event in events if event.request == request.id and event.kind == "token"]
        assert fed[: len(request.tokens)] == list(request.tokens)
        assert tokens[: len(fed) - len(request.tokens)] == fed[len(request.tokens) :]
        position = 0
        for record in mine:
            assert record.positions == (position,)
            assert record.lengths == (len(record.inputs[0]),)
            position += record.lengths[0]
            assert record.cache_bytes > 0 or record.leaves
        chunks = [record.chunk for record in mine if record.kind == "prefill"]
        assert all(end - start <= 4 for start, end in chunks)
    left = [id for record in engine.log for id in record.leaves]
    assert left == [request.id for request in requests], "whoever joined leaves, cancelled ones too"
    reasons = {event.request: event.reason for event in events if event.kind == "finished"}
    assert list(reasons.values()) == ["length", "length", "cancelled"]


def test_mlx_lm_replays_the_log_to_the_same_tokens(hybrid):
    """The log alone, fed to mlx-lm's module on mlx-lm's caches, chooses the tokens that the engine chose."""
    engine, events, requests = run(hybrid)
    module, caches, chosen = hybrid.model.module, {}, {request.id: [] for request in requests}
    for record in engine.log:
        for operation, *about in record.operations:
            assert operation == "new"
            caches[about[0]] = make_prompt_cache(module)
        if record.shape == (0, 0):
            continue
        assert record.shape == (1, len(record.inputs[0]))
        logits = module(mx.array([record.inputs[0]]), cache=caches[record.rows[0]])
        if record.kind == "decode":
            chosen[record.rows[0]].append(mx.argmax(logits[0, -1]).item())
    for request in requests:
        tokens = [event.token for event in events if event.request == request.id and event.kind == "token"]
        assert chosen[request.id][: len(tokens)] == tokens
        assert len(tokens) >= 2


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

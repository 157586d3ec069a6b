"""Many requests at once: each gets the answer that it gets alone, whoever its neighbours are."""

from __future__ import annotations

import asyncio
import random

import mlx.core as mx
import pytest

import labkit
from labkit.engine import RequestFailed


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, 256), k=length))


def run(engine, requests, **at):
    """Submit requests (some only at a step, by index in `at`), work everything off -> tokens by id, all events."""
    events, step, late = [], 0, dict(at)
    for index, request in enumerate(requests):
        if f"r{index}" not in late:
            engine.submit(request)
    while not engine.idle or late:
        for name in [name for name, when in late.items() if when <= step]:
            engine.submit(requests[int(name[1:])])
            del late[name]
        events += engine.step()
        step += 1
    tokens = {request.id: [] for request in requests}
    for event in events:
        if event.kind == "token":
            tokens[event.request].append(event.token)
    return tokens, events


@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid", "hybrid-moe", "capped", "mamba"])
def test_neighbours_change_no_answer(loaded, name):
    model = loaded(name)
    engine = labkit.Engine(model, prefill_chunk=16)
    lengths = [(3, 9), (40, 5), (1, 7), (17, 12), (9, 1), (33, 6)]
    requests = [
        engine.request(prompt(i, n), max_tokens=m, ignore_eos=True, temperature=0.7 * (i % 2), seed=i)
        for i, (n, m) in enumerate(lengths)
    ]
    tokens, _ = run(engine, requests, r3=4, r4=6, r5=7)
    for request in requests:
        alone = labkit.Engine(model, prefill_chunk=16).generate(request.tokens, request.params)
        assert tuple(tokens[request.id]) == alone.tokens, request
    together = max(len(record.rows) for record in engine.log if record.kind == "decode")
    assert together >= 3 if engine.runs_alone is None else together == 1
    assert engine._executor.cache_bytes == 0


def test_a_model_that_cannot_batch_says_so_and_takes_turns(loaded, monkeypatch):
    model = loaded("llama")
    monkeypatch.setattr(model.model, "batches", False)
    engine = labkit.Engine(model)
    assert "one by one" in engine.runs_alone
    requests = [engine.request(prompt(i, 4), max_tokens=9, ignore_eos=True) for i in range(3)]
    tokens, events = run(engine, requests)
    assert [len(answer) for answer in tokens.values()] == [9, 9, 9]
    order = [event.request for event in events if event.kind == "token"]
    # Once all three run, nobody gets a second token before everybody had one.
    running = next(i for i in range(len(order)) if set(order[:i]) == set(tokens))
    assert all(len(set(order[i : i + 3])) == 3 for i in range(running, running + 6))


def test_a_joiner_waits_for_a_prefix_that_is_just_computed_and_gets_a_copy(loaded):
    model = loaded("hybrid")
    engine = labkit.Engine(model, prefill_chunk=8)
    common = prompt(0, 24)
    requests = [engine.request((*common, *prompt(10 + i, 5 + i)), max_tokens=6, ignore_eos=True) for i in range(3)]
    tokens, events = run(engine, requests, r1=1, r2=2)
    computed = sum(sum(record.lengths) for record in engine.log if record.kind == "prefill")
    assert computed == 24 + sum(len(request.tokens) - 1 - 24 for request in requests)
    cached = {event.request: event.usage.cached_tokens for event in events if event.kind == "finished"}
    assert [cached[request.id] for request in requests] == [0, 24, 24]
    for request in requests:
        alone = labkit.Engine(model, prefill_chunk=8).generate(request.tokens, request.params)
        assert tuple(tokens[request.id]) == alone.tokens


def test_whoever_waits_for_a_prompt_that_is_cancelled_computes_it(loaded):
    engine = labkit.Engine(loaded("hybrid"), prefill_chunk=8)
    first, second = (engine.request(prompt(0, 40), max_tokens=3, ignore_eos=True) for _ in range(2))
    engine.submit(first)
    engine.submit(second)
    engine.step()
    engine.cancel(first.id)
    ends = {event.request: event.reason for event in engine.run() if event.kind == "finished"}
    assert ends == {first.id: "cancelled", second.id: "length"}


def test_async_streams_run_together_in_one_thread(loaded):
    engine = labkit.Engine(loaded("hybrid"))
    solo = [labkit.Engine(loaded("hybrid")).generate(prompt(i, 6), max_tokens=8, ignore_eos=True) for i in range(3)]

    async def answer(i):
        return [event async for event in engine.astream(prompt(i, 6), max_tokens=8, ignore_eos=True)]

    async def everything():
        return await asyncio.gather(*(answer(i) for i in range(3)))

    for events, alone in zip(asyncio.run(everything()), solo, strict=True):
        assert tuple(event.token for event in events if event.kind == "token") == alone.tokens
        assert events[-1].reason == "length"
    assert max(len(record.rows) for record in engine.log) == 3
    with pytest.raises(RuntimeError, match="thread of its own"):
        engine.step()
    engine.close()


def test_a_forward_that_fails_ends_its_rows_and_the_engine_goes_on(loaded, monkeypatch):
    model = loaded("hybrid")
    engine = labkit.Engine(model, prefill_chunk=8)
    running = [engine.request(prompt(i, 4), max_tokens=30, ignore_eos=True) for i in range(2)]
    for request in running:
        engine.submit(request)
    events = [event for _ in range(4) for event in engine.step()]
    waiting = engine.request(prompt(7, 30), max_tokens=3, ignore_eos=True)
    engine.submit(waiting)
    forward, calls = type(model.model).__call__, []

    def fails(self, tokens, *args, **kwargs):
        if tokens.shape[1] == 1 and not calls:
            calls.append(1)
            raise RuntimeError("no such kernel")
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "__call__", fails)
    events += list(engine.run())
    ends = {event.request: event.reason for event in events if event.kind == "finished"}
    assert ends == {running[0].id: "error", running[1].id: "error", waiting.id: "length"}
    assert engine._executor.cache_bytes == 0


def test_memory_is_shared_out_before_it_is_taken(loaded):
    model = loaded("llama")
    engine = labkit.Engine(model, capacity_bytes=model.weights_bytes + 3 * 65_536)
    requests = [engine.request(prompt(i, 20), max_tokens=8, ignore_eos=True) for i in range(7)]
    tokens, _ = run(engine, requests)
    assert all(len(answer) == 8 for answer in tokens.values())
    assert max(record.cache_bytes for record in engine.log) <= 3 * 65_536
    assert max(len(record.rows) for record in engine.log) == 3


def test_generate_reports_a_failure_as_before(engine):
    with pytest.raises(RequestFailed):
        engine.generate([1], logit_bias={token: -float("inf") for token in range(288)})
    assert mx.array(1).item() == 1

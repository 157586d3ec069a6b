"""Traps that batching engines fell into, each as a test of its whole kind."""

from __future__ import annotations

import asyncio
import random
import threading

import mlx.core as mx
import numpy as np
import pytest

import labkit
from labkit.caches import BatchedContiguous, BatchedRecurrent, Contiguous
from labkit.engine import batch as batch_module
from labkit.models import Rows
from tests.engine.test_batching import prompt, run
from tests.settled import falls_to
from tests.tiny_models import CONFIGS, EOS, adapter

FAMILIES = [name for name in CONFIGS if name not in ("mamba", "capped")]  # gemma2's mask takes no rows: it runs alone


def prefilled(model, lengths):
    """Rows of these lengths, each in serial caches of its own."""
    rows = []
    for seed, length in enumerate(lengths):
        caches = model.make_caches()
        model(mx.array([prompt(seed, length)]), caches, Rows.single(), logits=None)
        rows.append(caches)
    return rows


def merged(rows):
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]


# -- positions, masks, padding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_each_rows_own_position(name):
    # Two families of one engine rotated all rows by one scalar offset; the logits were 8.7 off.
    model, lengths = adapter(name), [3, 17, 9]
    token = mx.array([[5], [6], [7]])
    together = model(token, merged(prefilled(model, lengths)), Rows.batch(lengths)).logits
    for row, caches in enumerate(prefilled(model, lengths)):
        alone = model(token[row : row + 1], caches, Rows.single(lengths[row])).logits
        np.testing.assert_allclose(together[row], alone[0], atol=2e-3, rtol=2e-3)


def test_a_position_is_captured_once_in_a_forward():
    # Read before the write for the keys and after it for the queries, it rotates them one position apart.
    cache = BatchedContiguous([2, 0])
    captured = cache.offset
    before = captured.tolist()
    cache.update_and_fetch(*[mx.zeros((2, 1, 3, 4))] * 2)
    assert captured.tolist() == before
    assert cache.offset.tolist() == [position + 3 for position in before]


def test_one_token_of_a_padded_batch_has_a_real_mask_and_a_lone_row_none():
    cache = BatchedContiguous([2, 0])
    cache.update_and_fetch(*[mx.zeros((2, 1, 4, 4))] * 2)
    mask = cache.make_mask(1)
    assert (mask.shape, mask.dtype) == ((2, 1, 1, 5), mx.bool_)
    assert mask[:, 0, 0].tolist() == [[False, False, True, True, True], [True] * 5]
    alone = Contiguous()
    alone.update_and_fetch(*[mx.zeros((1, 1, 4, 4))] * 2)
    assert alone.make_mask(1) is None


def test_masks_follow_what_is_stored_through_decode_filter_and_extend():
    # A mask built from offsets that count padding as negative hides tokens or shows padding.
    def mask_of(cache, lengths):
        width = max(lengths) + 1
        wanted = [[column >= width - 1 - length for column in range(width)] for length in lengths]
        assert cache.make_mask(1)[:, 0, 0].tolist() == wanted

    def row(length):
        single = Contiguous()
        single.update_and_fetch(*[mx.zeros((1, 1, length, 4))] * 2)
        return single

    cache, lengths = Contiguous.merge([row(3), row(7), row(10)]), [3, 7, 10]
    mask_of(cache, lengths)
    cache.update_and_fetch(*[mx.zeros((3, 1, 1, 4))] * 2)
    mask_of(cache, lengths := [length + 1 for length in lengths])
    cache.filter([0, 1])
    mask_of(cache, lengths := lengths[:2])
    cache.extend(row(15))
    mask_of(cache, [*lengths, 15])


def test_the_width_shrinks_when_the_longest_row_leaves(loaded):
    # Padding that all survivors share, kept, was read by every later step and changed logits.
    engine, widths = labkit.Engine(loaded("llama")), {}
    for length, answer in ((30, 9), (4, 20), (6, 20)):
        engine.submit(engine.request(prompt(0, length), max_tokens=answer, ignore_eos=True))
    while not engine.idle:
        engine.step()
        if engine.log[-1].kind == "decode" and engine._executor.lanes.batches():
            widths.setdefault(len(engine.log[-1].rows), []).append(engine._executor.lanes.batches()[0].caches[0].size())
    assert widths[3][-1] >= 30 + 5
    assert widths[2][-1] <= 6 + 20


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_a_prompts_last_token_goes_through_the_decode_forward_also_behind_a_shared_prefix(loaded):
    # One row's product with a matrix is not computed like many rows': the first token's logits would differ.
    engine = labkit.Engine(loaded("hybrid"), prefill_chunk=8)
    requests = [engine.request((*prompt(0, 16), *prompt(9, n)), max_tokens=3, ignore_eos=True) for n in (4, 7)]
    run(engine, requests)
    for request in requests:
        fed = [
            r for r in engine.log if request.id in r.rows and request.tokens[-1] in r.inputs[r.rows.index(request.id)]
        ]
        last = next(r for r in fed if r.positions[r.rows.index(request.id)] == len(request.tokens) - 1)
        assert last.kind == "decode"
        assert last.shape[1] == 1


def test_only_one_column_a_row_goes_through_the_head_and_all_rows_at_once(loaded, monkeypatch):
    # Logits of a whole prompt are gigabytes; one row at a time rounds differently from the batch.
    model, seen = loaded("llama-untied"), []
    head = model.model.module.lm_head
    call = type(head).__call__
    monkeypatch.setattr(
        type(head), "__call__", lambda self, x: (seen.append(x.shape) if self is head else None, call(self, x))[1]
    )
    engine = labkit.Engine(model, prefill_chunk=8)
    requests = [engine.request(prompt(i, 20 + i), max_tokens=9 + i, ignore_eos=True) for i in range(3)]
    run(engine, requests)
    decodes = [record.shape[0] for record in engine.log if record.kind == "decode"]
    assert all(shape[1] == 1 for shape in seen), "one column a row"
    assert max(shape[0] for shape in seen) == max(decodes) == 3, "every row in one product"


def test_packed_prompts_leave_no_padding_in_recurrent_state():
    # The mask of right padding got lost in one engine as soon as rows had different lengths.
    model = adapter("hybrid")
    tokens = [prompt(1, 5), prompt(2, 21)]
    caches = model.make_caches(2)
    width = 8
    for start in range(0, 21, width):
        pieces = [row[start : start + width] for row in tokens]
        lengths = [len(piece) for piece in pieces]
        padded = mx.array([[*piece, *[77] * (max(lengths) - len(piece))] for piece in pieces])
        rows = Rows.batch([min(start, len(row)) for row in tokens], lengths=lengths)
        model(padded, caches, rows, logits=None)
    lengths = [len(row) for row in tokens]
    together = model(mx.array([[3], [4]]), caches, Rows.batch(lengths)).logits
    for row, own in enumerate(tokens):
        alone = model.make_caches()
        for start in range(0, len(own), width):
            model(mx.array([own[start : start + width]]), alone, Rows.single(start), logits=None)
        logits = model(mx.array([[3 + row]]), alone, Rows.single(len(own))).logits
        np.testing.assert_allclose(together[row], logits[0], atol=1e-3, rtol=1e-3)
        for cache, single in zip(caches, alone, strict=True):
            if cache.kind == "recurrent":
                for mine, its in zip(cache.extract(row).cache, single.cache, strict=True):
                    np.testing.assert_allclose(mine, its, atol=1e-4, rtol=1e-4)


def test_a_model_that_lets_padding_through_is_never_given_any(loaded):
    from labkit.engine.prefill import masks_padding

    assert not masks_padding(loaded("mamba").model)
    assert masks_padding(loaded("hybrid").model)
    engine = labkit.Engine(loaded("mamba"))
    run(engine, [engine.request(prompt(i, 6 + i), max_tokens=3, ignore_eos=True) for i in range(4)])
    assert all(len(record.rows) == 1 for record in engine.log if record.kind == "prefill")


@pytest.mark.parametrize("length", [1, 2, 9, 17])
def test_the_same_prompt_many_times_at_once_and_one_after_the_other(loaded, length):
    # With nothing left to compute behind a shared prefix, one engine's thread died and its clients got empty answers.
    engine = labkit.Engine(loaded("hybrid"), prefill_chunk=8)
    requests = [engine.request(prompt(3, length), max_tokens=4, ignore_eos=True) for _ in range(3)]
    tokens, _ = run(engine, requests, r2=30)
    answers = set(map(tuple, tokens.values()))
    assert len(answers) == 1
    assert len(answers.pop()) == 4


# -- rows come and go --------------------------------------------------------------------------------------------------


def test_a_join_loses_nobody(loaded):
    # A change of the batch's signature once routed the running rows into nothing.
    engine = labkit.Engine(loaded("sliding"), prefill_chunk=8)
    requests = [engine.request(prompt(i, 3 + 4 * i), max_tokens=14, ignore_eos=True) for i in range(5)]
    tokens, _ = run(engine, requests, r1=4, r2=7, r3=9, r4=12)
    assert all(len(answer) == 14 for answer in tokens.values())
    assert sorted({len(record.rows) for record in engine.log if record.kind == "decode"})[-1] == 5


def test_a_late_joiner_beyond_the_window_and_a_row_that_leaves_after_the_ring_has_turned(loaded):
    model = loaded("sliding")  # a window of 8
    engine = labkit.Engine(model, prefill_chunk=8)
    lengths, answers = (6, 4, 30, 2), (6, 20, 12, 16)
    requests = [
        engine.request(prompt(i, n), max_tokens=m, ignore_eos=True)
        for i, (n, m) in enumerate(zip(lengths, answers, strict=True))
    ]
    tokens, _ = run(engine, requests, r2=9, r3=11)
    for request in requests:
        assert (
            tuple(tokens[request.id])
            == labkit.Engine(model, prefill_chunk=8).generate(request.tokens, request.params).tokens
        )


def test_a_cold_row_joins_with_zeros_and_leaves_with_them():
    warm, fresh = adapter("hybrid").make_caches(), adapter("hybrid").make_caches(2)
    model = adapter("hybrid")
    model(mx.array([[1, 2, 3]]), warm, Rows.single(), logits=None)
    for own, other in zip(warm, fresh, strict=True):
        if own.kind == "recurrent":
            batch = BatchedRecurrent.from_rows([own])
            batch.extend(other)
            batch.filter([2])
            assert batch.batch_size == 1
            assert all(not mx.any(state).item() for state in batch.cache)


@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid"])
def test_a_row_that_leaves_is_a_copy_that_keeps_no_batch_alive(name):
    model = adapter(name)
    rows = prefilled(model, [200, 220, 240])
    session = lambda id: type("S", (), {"id": id, "finished": False})()
    caches = merged(rows)
    del rows
    batch = batch_module.DecodingBatch(
        model, [session("a"), session("b"), session("c")], caches, batch_module.Choice.given([1, 2, 3])
    )
    del caches
    mx.eval([cache.state for cache in batch.caches])
    whole = batch.nbytes
    alone, _ = batch.leave(batch.sessions[1])
    batch.release()
    mx.synchronize()
    used = mx.get_active_memory()
    size = alone.nbytes
    del alone
    assert size < whole
    assert falls_to(used - 0.9 * size), "its bytes are its own"


def test_a_row_that_stopped_by_itself_writes_one_column_more_and_is_gone(loaded):
    model = loaded("llama")
    first = labkit.Engine(model).generate("ab", max_tokens=6, ignore_eos=True).tokens
    engine = labkit.Engine(model)
    stops = engine.request("ab", max_tokens=9, ignore_eos=True, stop_token_ids=[first[2]])
    other = engine.request("cd", max_tokens=12, ignore_eos=True)
    run(engine, [stops, other])
    fed = [record for record in engine.log if stops.id in record.rows and record.kind == "decode"]
    end = first.index(first[2])
    assert len(fed) == 1 + end + 1, "the prompt's last token, those before the stop, and the stop itself"
    after = [record for record in engine.log if record.index > fed[-1].index]
    assert not any(stops.id in record.rows for record in after)


def test_the_end_token_is_never_emitted_in_a_batch_either(loaded):
    engine = labkit.Engine(loaded("llama"))
    ends = engine.request("ab", max_tokens=9, logit_bias={EOS: 1000.0})
    goes_on = engine.request("cd", max_tokens=5, ignore_eos=True)
    tokens, events = run(engine, [ends, goes_on])
    assert tokens[ends.id] == []
    last = next(e for e in events if e.request == ends.id and e.kind == "finished")
    assert (last.reason, last.stop, last.text) == ("stop", EOS, "")
    assert len(tokens[goes_on.id]) == 5


# -- per row -----------------------------------------------------------------------------------------------------------


class Only:
    """Permits one residue class of tokens; remembers what was chosen."""

    def __init__(self, rest: int):
        self.rest, self.accepted = rest, []

    def mask(self) -> mx.array:
        words = np.zeros(9, np.uint32)
        for token in range(self.rest, 288, 4):
            words[token // 32] |= np.uint32(1 << (token % 32))
        return mx.array(words)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_constraints_keep_to_their_rows_while_rows_come_and_go(loaded):
    engine = labkit.Engine(loaded("hybrid"), prefill_chunk=8)
    constraints = [Only(rest) for rest in range(4)]
    requests = [engine.request(prompt(i, 5 + 3 * i), max_tokens=4 + 2 * i, ignore_eos=True) for i in range(4)]
    free = engine.request(prompt(9, 4), max_tokens=15, ignore_eos=True)
    engine.submit(free)
    events = []
    for request, constraint in zip(requests, constraints, strict=True):
        engine.submit(request, constraint=constraint)
        events += [event for _ in range(2) for event in engine.step()]
    events += list(engine.run())
    for request, constraint in zip(requests, constraints, strict=True):
        tokens = [event.token for event in events if event.request == request.id and event.kind == "token"]
        assert tokens == constraint.accepted, "every token was told, the last one too, and none after the end"
        assert len(tokens) == request.params.max_tokens
        assert all(token % 4 == constraint.rest for token in tokens)
    unbound = [event.token for event in events if event.request == free.id and event.kind == "token"]
    alone = labkit.Engine(loaded("hybrid"), prefill_chunk=8).generate(free.tokens, free.params)
    assert tuple(unbound) == alone.tokens, "a free row is what it is alone, beside constrained ones"


def test_penalties_bias_logprobs_and_stops_are_each_rows_own(loaded):
    model = loaded("llama")
    options = [
        {"repetition_penalty": 1.5, "repetition_context_size": 5},
        {"logit_bias": {7: 3.0, 9: -4.0}, "presence_penalty": 0.7},
        {"logprobs": 3},
        {"temperature": 0.8, "top_k": 20, "seed": 4},
        {"frequency_penalty": 0.6, "temperature": 1.1, "min_p": 0.05, "seed": 5},
        {},
    ]
    engine = labkit.Engine(model)
    requests = [engine.request(prompt(i, 3 + i), max_tokens=10, ignore_eos=True, **o) for i, o in enumerate(options)]
    tokens, events = run(engine, requests)
    assert max(len(record.rows) for record in engine.log) == len(options)
    for request in requests:
        alone = labkit.Engine(model).generate(request.tokens, request.params)
        assert tuple(tokens[request.id]) == alone.tokens
        told = [e for e in events if e.request == request.id and e.kind == "token"]
        if request.params.logprobs is not None:
            for event, (logprob, _) in zip(told, alone.logprobs, strict=True):
                assert event.logprob == pytest.approx(logprob, abs=1e-4)
                assert len(event.top_logprobs) == 3
        else:
            assert all(event.logprob is None for event in told)


def test_requests_of_the_same_instant_draw_different_seeds(loaded):
    engine = labkit.Engine(loaded("llama"))
    for _ in range(100):
        engine.submit(engine.request([1], max_tokens=1))
    seeds = {event.seed for event in engine.run() if event.kind == "submitted"}
    assert len(seeds) == 100


def test_a_processor_that_fails_ends_its_row_alone(loaded, monkeypatch):
    engine = labkit.Engine(loaded("llama"))
    requests = [engine.request(prompt(i, 4), max_tokens=6, ignore_eos=True) for i in range(3)]
    for request in requests:
        engine.submit(request)
    events = [event for _ in range(6) for event in engine.step()]
    victim = next(s for s in engine._executor.sessions() if s.id == requests[1].id)
    monkeypatch.setattr(victim, "_sampler", type("Broken", (), {"together": None, "__call__": lambda *a: 1 / 0})())
    events += list(engine.run())
    ends = {event.request: event.reason for event in events if event.kind == "finished"}
    assert ends == {requests[0].id: "length", requests[1].id: "error", requests[2].id: "length"}


# -- memory, order, threads --------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_is_refused_while_others_wait_and_nothing_deadlocks(loaded):
    model = loaded("llama")
    engine = labkit.Engine(model, capacity_bytes=model.weights_bytes + 2 * 65_536 + 100)
    ids = [engine.submit(engine.request(prompt(i, 10), max_tokens=5, ignore_eos=True)) for i in range(5)]
    with pytest.raises(labkit.engine.CapacityError) as caught:
        engine.submit(engine.request(prompt(0, 10), max_tokens=2000))
    numbers = [value for name, value in caught.value.record.items() if name not in ("code", "retryable")]
    assert len(numbers) == 7
    assert all(isinstance(number, int) for number in numbers)
    ends = [event.request for event in engine.run() if event.kind == "finished"]
    assert ends == ids, "in order: nobody overtakes one that waits for room"


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones(loaded):
    model = loaded("llama")
    room = 4 * 65_536
    engine = labkit.Engine(model, capacity_bytes=model.weights_bytes + room)
    sizes = [(4, 12)] * 3 + [(300, 200)] + [(4, 12)] * 5
    requests = [engine.request(prompt(i, n), max_tokens=m, ignore_eos=True) for i, (n, m) in enumerate(sizes)]
    for request in requests:
        engine.submit(request)
    begun = [id for record in _drain(engine) for id in record.joins]
    assert begun == [request.id for request in requests]


def _drain(engine):
    list(engine.run())
    return engine.log


def test_a_cancelled_prompt_stops_within_a_chunk_and_a_waiting_one_never_starts(loaded):
    engine = labkit.Engine(loaded("llama"), prefill_chunk=8, max_rows=1)
    running = engine.submit(engine.request(prompt(0, 200), max_tokens=2))
    waiting = engine.submit(engine.request(prompt(1, 200), max_tokens=2))
    engine.step()
    engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    list(engine.run())
    assert len(engine.log) == 2
    assert all(waiting not in record.rows for record in engine.log)


def test_a_worker_that_breaks_tells_every_reader(loaded, monkeypatch):
    # A thread that died left its clients with an empty answer, or without one for ever.
    others = set(threading.enumerate())
    engine = labkit.Engine(loaded("llama"))
    step, calls = engine.step, []

    def breaks():
        calls.append(1)
        if len(calls) == 4:
            raise SystemError("the machine is on fire")
        return step()

    monkeypatch.setattr(engine, "step", breaks)

    async def read(seed):
        return [event async for event in engine.astream(prompt(seed, 5), max_tokens=30, ignore_eos=True)]

    async def everything():
        first = await asyncio.wait_for(asyncio.gather(read(1), read(2)), timeout=600)
        return first, await asyncio.wait_for(read(3), timeout=600)

    broken, after = asyncio.run(everything())
    for events in broken:
        assert [event.kind for event in events[-2:]] == ["error", "finished"]
        assert "on fire" in events[-2].error["message"]
    assert after[-1].reason == "length", "and the next request is served"
    engine.close()
    assert not any(thread.name == "labkit-engine" for thread in set(threading.enumerate()) - others)


def test_leaving_an_async_stream_cancels_it(loaded):
    engine = labkit.Engine(loaded("llama"))

    async def leave():
        events = engine.astream([1, 2, 3], max_tokens=4000, ignore_eos=True)
        async for event in events:
            if event.index == 2:
                break
        await events.aclose()
        return [event async for event in engine.astream([4], max_tokens=2, ignore_eos=True)]

    assert asyncio.run(leave())[-1].reason == "length"
    engine.close()
    assert engine._executor.cache_bytes == 0


def test_random_cancels_from_another_thread(loaded):
    engine = labkit.Engine(loaded("llama"), prefill_chunk=8)
    ids = [engine.submit(engine.request(prompt(i, 12), max_tokens=40, ignore_eos=True)) for i in range(12)]
    draw = random.Random(3)
    victims = draw.sample(ids, 6)
    other = threading.Thread(target=lambda: [engine.cancel(id) for id in victims])
    other.start()
    ends = {event.request: event.reason for event in engine.run() if event.kind == "finished"}
    other.join()
    assert set(ends) == set(ids)
    assert set(ends.values()) <= {"length", "cancelled"}
    assert all(ends[id] == "length" for id in set(ids) - set(victims))

"""Paged engines: the contiguous engine's tokens, blocks shared between live requests, admission in blocks, no leak."""

from __future__ import annotations

import gc
import random

import pytest

import labkit
from labkit.engine import CapacityError
from tests.engine.test_batching import prompt, run
from tests.nightly import many
from tests.tiny_models import write_checkpoint


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """name of a tiny model -> it, behind the adapter: the native graph of a CPU reads plain caches only."""
    folder, models = tmp_path_factory.mktemp("paged"), {}

    def get(name: str) -> labkit.LoadedModel:
        if name not in models:
            models[name] = labkit.load(write_checkpoint(folder / name, name), graph="adapter")
        return models[name]

    return get


def paged(model, **options):
    return labkit.Engine(model, **({"prefill_chunk": 16, "kv": "paged", "block_tokens": 4} | options))


def assert_empty(engine) -> None:
    gc.collect()
    assert engine.paged.faults() == []
    assert engine.paged.used == 0
    assert engine._executor.cache_bytes == 0


@pytest.mark.parametrize(
    ("name", "block"),
    [("llama", 8), ("llama", 16), ("sliding", 8), ("sliding", 16), ("hybrid", 16), ("hybrid-moe", 8), ("capped", 8)],
)
def test_tokens_are_the_contiguous_engines(loaded, name, block):
    model, common, answers = loaded(name), prompt(99, 21), []
    lengths = [(3, 9), (40, 5), (1, 7), (17, 12), (9, 1), (33, 16)]
    for options in ({}, {"kv": "paged", "block_tokens": block}):
        engine = labkit.Engine(model, prefill_chunk=16, **options)
        requests = [
            engine.request(
                (common if i % 2 else ()) + prompt(i, n),
                max_tokens=m,
                ignore_eos=True,
                temperature=0.7 * (i % 2),
                seed=i,
            )
            for i, (n, m) in enumerate(lengths)
        ]
        tokens, _ = run(engine, requests, r3=4, r4=6, r5=7)
        answers.append([tokens[request.id] for request in requests])
    assert answers[0] == answers[1]
    together = max(len(record.rows) for record in engine.log if record.kind == "decode")
    assert together >= 3 if engine.runs_alone is None else together == 1
    assert_empty(engine)


@pytest.mark.parametrize("name", ["llama", "sliding"])
def test_a_prompt_that_begins_like_a_live_one_begins_with_its_blocks(loaded, name):
    engine, common = paged(loaded(name)), prompt(0, 30)
    first = engine.request((*common, 7), max_tokens=40, ignore_eos=True)
    engine.submit(first)
    for _ in range(6):
        engine.step()  # decodes by now: nobody could wait for it
    before = engine.paged.snapshot()
    second = engine.request((*common, 8, 9), max_tokens=3, ignore_eos=True)
    engine.submit(second)
    ends = {event.request: event for event in engine.run() if event.kind == "finished"}
    cached = ends[second.id].usage.cached_tokens
    # A window's blocks before the last few are given back once its row has moved on.
    assert cached == 28 if name == "llama" else cached in range(0, 29, 4)
    assert before["saved"] == 0
    alone = labkit.Engine(loaded(name), prefill_chunk=16).generate(second.tokens, second.params)
    again, _ = run(engine, [engine.request(second.tokens, second.params)])
    assert tuple(*again.values()) == alone.tokens
    assert_empty(engine)


def test_followers_share_blocks_even_where_states_are_recurrent(loaded):
    """Eight requests with a long common beginning, of a hybrid: one copy of its keys and values."""
    engine, common = paged(loaded("hybrid"), prefill_chunk=8), prompt(1, 160)
    requests = [engine.request((*common, *prompt(10 + i, 4)), max_tokens=6, ignore_eos=True) for i in range(8)]
    for request in requests:
        engine.submit(request)
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, engine.paged.snapshot()["used"])
    one = engine.paged.block_bytes * (len(common) // 4)
    assert one <= most < 2 * one
    assert_empty(engine)


def test_what_does_not_fit_waits_for_blocks_in_order_and_never_fails(loaded):
    model = loaded("llama")
    block = paged(model).paged.block_bytes
    engine = paged(model, pool_bytes=16 * block)
    requests = [engine.request(prompt(i, 20), max_tokens=10, ignore_eos=True) for i in range(5)]  # 7 blocks each
    for request in requests:
        engine.submit(request)
    starts, most = [], 0
    while not engine.idle:
        for event in engine.step():
            assert event.kind != "error", event
            if event.kind == "token" and event.request not in starts:
                starts.append(event.request)
        most = max(most, max(pages.pool.used for pages in engine.paged.pages))
        assert all(pages.pool.unpromised >= 0 for pages in engine.paged.pages)
    assert starts == [request.id for request in requests]
    assert most <= 14  # two at a time
    assert max(len(record.rows) for record in engine.log) == 2
    assert_empty(engine)


def test_shared_blocks_are_admitted_once(loaded):
    model = loaded("llama")
    engine = paged(model, pool_bytes=16 * paged(model).paged.block_bytes)
    common = prompt(3, 33)  # eight blocks; each row needs two more
    requests = [engine.request((*common, i), max_tokens=8, ignore_eos=True) for i in range(4)]
    engine.submit(requests[0])
    for _ in range(5):
        engine.step()
    for request in requests[1:]:
        engine.submit(request)
    list(engine.run())
    assert max(len(record.rows) for record in engine.log if record.kind == "decode") >= 3  # alone, no two would fit
    assert_empty(engine)


def test_what_never_fits_is_refused_with_the_numbers(loaded):
    model = loaded("llama")
    engine = paged(model, pool_bytes=5 * paged(model).paged.block_bytes)
    with pytest.raises(CapacityError, match="10 more need 10 blocks of 4 tokens, and the pool has 5") as caught:
        engine.submit(engine.request(prompt(0, 30), max_tokens=10))
    record = caught.value.record
    assert (record["needed_blocks"], record["capacity_blocks"], record["retryable"]) == (10, 5, False)
    assert len(engine.generate(prompt(0, 9), max_tokens=12, ignore_eos=True).tokens) == 12


def test_bad_options_are_refused_at_the_door(loaded, monkeypatch):
    model = loaded("llama")
    with pytest.raises(ValueError, match='kv is "contiguous" or "paged", not \'pages\''):
        labkit.Engine(model, kv="pages")
    with pytest.raises(ValueError, match='belong to kv="paged"'):
        labkit.Engine(model, block_tokens=8)
    with pytest.raises(ValueError, match="pool_bytes 10 holds none"):
        labkit.Engine(model, kv="paged", pool_bytes=10)
    with pytest.raises(ValueError, match="block_tokens must be a whole number"):
        labkit.Engine(model, kv="paged", block_tokens=0)
    monkeypatch.setattr(type(model.model), "takes_pages", False)
    with pytest.raises(ValueError, match='reads plain caches only: load the model with graph="adapter"'):
        labkit.Engine(model, kv="paged")


def soak(model, count: int, seed: int) -> None:
    """Random requests that end by length, are cancelled, or fail in a callback; a pool that is always short."""
    draw = random.Random(seed)
    block = paged(model).paged.block_bytes
    engine = paged(model, prefill_chunk=8, pool_bytes=40 * block, max_rows=6)
    prefixes = [prompt(1000 + i, 16) for i in range(3)]
    open_requests, ended = set(), {}

    def fails(event) -> None:
        if event.kind == "token" and event.index == 1:
            raise RuntimeError("callback")

    submitted = 0
    while submitted < count or not engine.idle:
        while submitted < count and draw.random() < 0.5:
            head = draw.choice(prefixes)[: draw.choice([0, 5, 16])]
            request = engine.request(
                (*head, *prompt(draw.random(), draw.randint(1, 20))), max_tokens=draw.randint(1, 8), ignore_eos=True
            )
            engine.submit(request, on_event=fails if draw.random() < 0.15 else None)
            open_requests.add(request.id)
            submitted += 1
        if open_requests and draw.random() < 0.1:
            engine.cancel(draw.choice(sorted(open_requests)))
        for event in engine.step():
            if event.kind == "finished":
                open_requests.discard(event.request)
                ended[event.request] = event.reason
        assert engine.paged.faults() == []
    assert len(ended) == count
    assert set(ended.values()) >= {"length", "cancelled", "error"}
    assert_empty(engine)


@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid"])
def test_no_block_leaks_in_a_soak(loaded, name):
    soak(loaded(name), 40, 7)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["llama", "sliding", "hybrid"])
def test_no_block_leaks_in_a_long_soak(loaded, name):
    for seed in range(4):
        soak(loaded(name), max(40, many(300)), seed)


def test_a_failing_forward_gives_its_blocks_back(loaded, monkeypatch):
    model = loaded("hybrid")
    engine = paged(model, prefill_chunk=8)
    for i in range(3):
        engine.submit(engine.request(prompt(i, 12), max_tokens=20, ignore_eos=True))
    for _ in range(10):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(type(model.model), "__call__", lambda *_, **__: 1 / 0)
        ends = [event for event in engine.run() if event.kind == "finished"]
    assert [event.reason for event in ends] == ["error"] * 3
    assert_empty(engine)
    assert len(engine.generate(prompt(9, 12), max_tokens=5, ignore_eos=True).tokens) == 5


def test_the_parity_of_stores_and_pages(loaded, tmp_path):
    """What a store of prefixes keeps of a paged engine is the plain classes', and comes back into the pool."""
    from labkit.engine.prefix import PrefixStore

    model, common, answers = loaded("hybrid"), prompt(5, 40), []
    for kv in ("paged", "contiguous", "paged"):
        store = PrefixStore(model, tmp_path, width=8)
        options = {"block_tokens": 4} if kv == "paged" else {}
        engine = labkit.Engine(model, prefixes=store, kv=kv, **options)
        request = engine.request((*common, 1, 2, 3), max_tokens=8, ignore_eos=True)
        tokens, events = run(engine, [request])
        cached = next(event.usage.cached_tokens for event in events if event.kind == "finished")
        answers.append((tokens[request.id], cached))
        if kv == "paged":
            assert_empty(engine)
        engine.close()
        store.close()
    assert [answer for answer, _ in answers] == [answers[0][0]] * 3
    assert answers[0][1] == 0
    assert min(answers[1][1], answers[2][1]) >= 40


@pytest.mark.parametrize(
    ("lengths", "shared", "most"),
    [([608 + n for n in range(8)], 600, 1 / 4), ([1500, *[20] * 7], 0, 1 / 2)],
    ids=["eight with a long prefix", "very unequal lengths"],
)
def test_an_engine_holds_less(loaded, lengths, shared, most):
    """The most bytes of keys and values at any step, of the same requests in both kinds of engine."""
    model, held = loaded("llama"), {}
    for name, options in {"contiguous": {}, "paged": {"kv": "paged", "block_tokens": 16}}.items():
        engine = labkit.Engine(model, prefill_chunk=128, **options)
        for n, length in enumerate(lengths):
            tokens = (*prompt(0, shared), *prompt(n + 1, length - shared))
            engine.submit(engine.request(tokens, max_tokens=12, ignore_eos=True))
        held[name] = 0
        while not engine.idle:
            engine.step()
            now = engine._executor.cache_bytes if engine.paged is None else engine.paged.nbytes
            held[name] = max(held[name], now)
        assert max(len(record.rows) for record in engine.log) == 8
    assert held["paged"] <= most * held["contiguous"], f"{held['paged'] / held['contiguous']:.3f}"

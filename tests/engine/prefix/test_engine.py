"""The engine with a store gives the bits that it gives without one, and computes less."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import labkit
from labkit.engine import RequestFailed
from labkit.engine.prefix import PrefixStore

B = 16
MODELS = ["llama", "sliding", "hybrid", "hybrid on mlx-lm"]


def prompt(length: int, first: int = 7) -> list[int]:
    return [(first + 5 * i * i) % 250 for i in range(length)]


def answer(engine: labkit.Engine, tokens, **options) -> tuple:
    """Everything by which two runs can differ, and the tokens that were not computed."""
    options = {"max_tokens": 6, "ignore_eos": True, "logprobs": 3, "temperature": 0.7, "seed": 11} | options
    done = engine.generate(tokens, **options)
    return (done.tokens, done.logprobs, done.finish_reason), done.usage.cached_tokens


@pytest.fixture(scope="session")
def on_adapter(loaded) -> labkit.LoadedModel:
    return labkit.load(loaded("hybrid").path, graph="adapter")


@pytest.fixture(params=MODELS)
def model(request, loaded) -> labkit.LoadedModel:
    """Whoever computes: mlx-lm's modules, and what `load` takes for a hybrid on this device."""
    return request.getfixturevalue("on_adapter") if request.param == "hybrid on mlx-lm" else loaded(request.param)


@pytest.fixture
def store(model, tmp_path):
    with PrefixStore(model, tmp_path / "store", width=B, keep_free_bytes=0) as opened:
        yield opened


LENGTHS = [1, 2, B - 1, B, B + 1, 2 * B, 3 * B + 2]


def test_trap_10_every_length_hits_as_it_should_with_the_bits_of_no_store(model, store):
    """Short prompts were never kept; chunked prefill captured nothing. An exact full hit feeds its last token."""
    plain, cached = labkit.Engine(model, prefill_chunk=B), labkit.Engine(model, prefixes=store)
    for length in LENGTHS:
        tokens = prompt(length, first=length)
        wanted, _ = answer(plain, tokens)
        cold, first = answer(cached, tokens)
        warm, second = answer(cached, tokens)
        store.flush(600)
        store.release_memory()
        disk, third = answer(cached, tokens)
        assert cold == warm == disk == wanted
        assert (first, second, third) == (0, *[(length - 1) // B * B] * 2)
    assert store.stats()["leases"] == 0


def test_the_bits_are_the_same_after_a_restart(model, tmp_path):
    tokens = prompt(3 * B + 5)
    wanted, _ = answer(labkit.Engine(model, prefill_chunk=B), tokens)
    with PrefixStore(model, tmp_path / "store", width=B, keep_free_bytes=0) as store:
        answer(labkit.Engine(model, prefixes=store), tokens)
    with PrefixStore(model, tmp_path / "store", width=B, keep_free_bytes=0) as store:
        assert answer(labkit.Engine(model, prefixes=store), tokens) == (wanted, 3 * B)


def test_trap_7_a_prompt_that_parts_is_answered_as_if_it_were_the_first(model, store):
    """After a trim to the common part, recurrent layers kept the old state."""
    plain, cached = labkit.Engine(model, prefill_chunk=B), labkit.Engine(model, prefixes=store)
    system = prompt(2 * B + 3)
    for turn in range(4):
        tokens = [*system, *prompt(B + turn, first=100 + turn)]
        assert answer(cached, tokens) == (answer(plain, tokens)[0], 2 * B if turn else 0)


def test_trap_15_the_same_prompt_twice_is_answered_twice(model, store):
    """Nothing was left to compute, and the answer was empty."""
    cached = labkit.Engine(model, prefixes=store)
    for length in (1, 2 * B):
        first, _ = answer(cached, prompt(length))
        again, _ = answer(cached, prompt(length))
        assert again == first
        assert len(again[0]) == 6


def test_trap_14_a_stream_is_kept_like_a_whole_answer(model, store):
    """Streamed generations were not stored."""
    cached, tokens = labkit.Engine(model, prefixes=store), prompt(2 * B + 1)
    events = list(cached.stream(tokens, max_tokens=3, ignore_eos=True))
    assert events[-1].usage.cached_tokens == 0
    again = list(cached.stream(tokens, max_tokens=3, ignore_eos=True))
    assert again[-1].usage.cached_tokens == 2 * B
    assert [event.token for event in again][-3:] == [event.token for event in events][-3:]
    assert answer(cached, tokens)[1] == 2 * B


def test_with_tails_the_same_prompt_again_computes_one_token(model, tmp_path):
    tokens = prompt(2 * B + 9)
    wanted, _ = answer(labkit.Engine(model, prefill_chunk=B), tokens)
    with PrefixStore(model, tmp_path / "store", width=B, keep_free_bytes=0, tail=True) as store:
        cached = labkit.Engine(model, prefixes=store)
        assert answer(cached, tokens) == (wanted, 0)
        assert answer(cached, tokens) == (wanted, 2 * B + 8)
        assert answer(cached, [*tokens, 5, 5])[1] == 2 * B


def test_two_requests_on_one_prefix_get_what_each_gets_alone(model, store):
    plain, cached = labkit.Engine(model, prefill_chunk=B), labkit.Engine(model, prefixes=store, pack_prompts=False)
    prompts = [[*prompt(2 * B), *prompt(5 + turn, first=turn)] for turn in range(3)]
    alone = [plain.generate(tokens, max_tokens=5, ignore_eos=True).tokens for tokens in prompts]
    answer(cached, prompts[0])
    requests = [cached.request(tokens, max_tokens=5, ignore_eos=True) for tokens in prompts]
    for request in requests:
        cached.submit(request)
    events = list(cached.run())
    together = [tuple(e.token for e in events if e.request == r.id and e.kind == "token") for r in requests]
    assert together == alone
    assert {e.usage.cached_tokens for e in events if e.kind == "finished"} == {2 * B}


def test_what_was_computed_before_a_cancel_is_kept(model, store):
    """Resend after cancel: blocks that were committed are not computed again."""
    cached, tokens = labkit.Engine(model, prefixes=store), prompt(10 * B + 3)
    stream = cached.stream(tokens, max_tokens=4)
    for event in stream:
        if event.kind == "prefill" and event.done >= 8 * B:
            break
    stream.close()
    assert cached.idle
    assert store.stats()["leases"] == 0
    wanted, _ = answer(labkit.Engine(model, prefill_chunk=B), tokens)
    assert answer(cached, tokens) == (wanted, 8 * B)


def test_trap_56_nobody_computes_for_a_reader_that_has_gone(model, store):
    """The client had gone, the server went on, and the retry began anew."""
    cached, tokens = labkit.Engine(model, prefixes=store), prompt(20 * B)
    stream = cached.stream(tokens, max_tokens=4)
    while next(stream).kind != "prefill":
        pass
    stream.close()
    steps = len(cached.log)
    assert cached.step() == []
    assert len(cached.log) == steps
    assert answer(cached, tokens)[1] >= B


@pytest.mark.parametrize("broken", ["callback", "forward"])
def test_a_request_that_fails_leaves_its_blocks_and_no_lease(model, store, broken, monkeypatch):
    cached, tokens = labkit.Engine(model, prefixes=store), prompt(3 * B + 2)
    answer(cached, tokens[: B + 1])

    def fail(*_, **__):
        raise RuntimeError("it breaks")

    if broken == "callback":
        cached.submit(cached.request(tokens, max_tokens=3), on_event=lambda e: e.kind == "token" and fail())
        assert [event.kind for event in cached.run()][-1] == "finished"
        kept = 3 * B
    else:
        monkeypatch.setattr(type(model.model), "__call__", fail)
        with pytest.raises(RequestFailed, match="it breaks"):
            cached.generate(tokens, max_tokens=3)
        monkeypatch.undo()
        kept = B
    assert store.stats()["leases"] == 0
    assert answer(cached, tokens) == (answer(labkit.Engine(model, prefill_chunk=B), tokens)[0], kept)


def test_a_store_in_trouble_costs_time_and_nothing_else(model, tmp_path):
    from tests.engine.prefix.faults import BROKEN, Failing

    system, tokens = Failing(), prompt(3 * B + 2)
    wanted, _ = answer(labkit.Engine(model, prefill_chunk=B), tokens)
    with PrefixStore(model, tmp_path / "s", width=B, keep_free_bytes=0, system=system, memory_bytes=0) as store:
        cached = labkit.Engine(model, prefixes=store)
        for step in ("write", "sync", "replace", "create", "touch", "read"):
            system.failing = {step: BROKEN}
            for _ in range(2):
                assert answer(cached, tokens)[0] == wanted
                assert store.flush(600)
        assert store.stats()["writer"]["failed"]
        assert store.stats()["disk"]["read_failed"]


def test_a_chunk_of_another_width_is_refused_at_the_door(model, store):
    with pytest.raises(ValueError, match="grid"):
        labkit.Engine(model, prefixes=store, prefill_chunk=B + 1)


KILLED = """
import sys
import labkit
from labkit.engine.prefix import PrefixStore
model = labkit.load(sys.argv[2])
store = PrefixStore(model, sys.argv[1], width=32, keep_free_bytes=0)
tokens = [(7 + 5 * i * i) % 250 for i in range(32 * 40 + 5)]
for event in labkit.Engine(model, prefixes=store).stream(tokens, max_tokens=4):
    if event.kind == "prefill":
        store.flush()
        print(event.done, flush=True)
"""


def test_a_request_goes_on_from_its_last_committed_block_after_a_kill(tmp_path, loaded):
    """The whole engine dies in the middle of a prompt; the next one begins where it was."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    model = loaded("hybrid")
    command = [sys.executable, str(script), str(tmp_path / "store"), str(model.path)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    done = 0
    while done < 5 * 32:
        done = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    said = child.stdout.read().split()
    child.stdout.close()
    done = int(said[-1]) if said else done
    tokens = [(7 + 5 * i * i) % 250 for i in range(32 * 12 + 5)]
    plain = labkit.Engine(model, prefill_chunk=32)
    with PrefixStore(model, tmp_path / "store", width=32, keep_free_bytes=0) as store:
        cached = answer(labkit.Engine(model, prefixes=store), tokens)
        assert cached == (answer(plain, tokens)[0], cached[1])
        assert min(done, 12 * 32) <= cached[1] <= 12 * 32
        assert store.stats()["disk"].get("damaged", 0) == 0


@pytest.mark.parametrize("graph", ["adapter", "auto"])
def test_the_shipped_hybrid_continues_with_the_same_bits(tmp_path, graph):
    model, tokens = labkit.load("tiny-hybrid", graph=graph), prompt(3 * B + 9)
    wanted, _ = answer(labkit.Engine(model, prefill_chunk=B), tokens)
    for expected in (0, 3 * B):
        with PrefixStore(model, tmp_path / "store", width=B, keep_free_bytes=0) as store:
            assert answer(labkit.Engine(model, prefixes=store), tokens) == (wanted, expected)


def test_engines_with_and_without_pages_share_a_store(model, store):
    if not getattr(model.model, "takes_pages", False):
        pytest.skip(f"{type(model.model).__name__} reads plain caches only")
    tokens = prompt(3 * B + 5)
    wanted, _ = answer(labkit.Engine(model, prefill_chunk=B, kv="paged", block_tokens=8), tokens)
    for length, kv in ((2 * B + 3, "contiguous"), (3 * B + 5, "paged"), (3 * B + 5, "contiguous")):
        options = {"kv": "paged", "block_tokens": 8} if kv == "paged" else {}
        found, cached = answer(labkit.Engine(model, prefixes=store, **options), tokens[:length])
        assert cached == {2 * B + 3: 0, 3 * B + 5: 2 * B if kv == "paged" else 3 * B}[length]
        if length == len(tokens):
            assert found == wanted

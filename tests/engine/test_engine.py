"""The engine as its users meet it: streams, ends, cancels, errors, order, capacity."""

from __future__ import annotations

import json
import pickle
import threading
from dataclasses import asdict

import mlx.core as mx
import pytest

import labkit
from labkit import devices
from labkit.engine import CapacityError, RequestFailed, prefill
from tests.settled import falls_to
from tests.tiny_models import EOS


def greedy(engine, prompt, count, **options):
    return engine.generate(prompt, max_tokens=count, ignore_eos=True, **options)


def test_a_stream_tells_everything_once_and_in_order(loaded):
    engine = labkit.Engine(loaded("hybrid"), prefill_chunk=8)
    events = list(engine.stream([1 + i for i in range(20)], max_tokens=5, ignore_eos=True))
    kinds = [event.kind for event in events]
    assert kinds == ["submitted", "prefill", "prefill", "prefill", *["token"] * 5, "finished"]
    assert [(e.done, e.total) for e in events if e.kind == "prefill"] == [(8, 20), (16, 20), (19, 20)]
    assert [e.index for e in events if e.kind == "token"] == [0, 1, 2, 3, 4]
    last = events[-1]
    assert (last.reason, last.usage.prompt_tokens, last.usage.completion_tokens) == ("length", 20, 5)
    assert last.usage.first_token_seconds >= last.usage.prefill_seconds > 0
    assert [e.time for e in events] == sorted(e.time for e in events)
    for event in events:
        assert json.loads(json.dumps(event.as_record()))["kind"] == event.kind
    text = "".join(event.text for event in events)
    tokens = [e.token for e in events if e.kind == "token"]
    assert text == loaded("hybrid").tokenizer.decode(tokens)


def test_the_models_own_end_is_no_text(loaded):
    engine = labkit.Engine(loaded("llama"))
    answer = engine.generate("ab", max_tokens=9, logit_bias={EOS: 1000.0})
    assert (answer.finish_reason, answer.stop, answer.tokens, answer.text) == ("stop", EOS, (), "")
    ignored = engine.generate("ab", max_tokens=3, logit_bias={EOS: 1000.0}, ignore_eos=True)
    assert ignored.tokens == (EOS,) * 3
    chosen = greedy(engine, "ab", 9).tokens
    stopped = engine.generate("ab", max_tokens=9, ignore_eos=True, stop_token_ids=[chosen[4]])
    assert stopped.tokens == chosen[: chosen.index(chosen[4])]


class Scripted:
    """Forces these tokens, one after the other."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.at, self.accepted = tokens, 0, []

    def mask(self) -> mx.array:
        token, words = self.tokens[min(self.at, len(self.tokens) - 1)], [0] * 9
        words[token // 32] = 1 << (token % 32)
        return mx.array(words, dtype=mx.uint32)

    def accept(self, token: int) -> None:
        self.accepted.append(token)
        self.at += 1


@pytest.mark.parametrize("cut", [0, 3])
def test_stop_strings_end_the_text_before_them(engine, cut):
    script = list(b"say beta gamma delta")
    events = list(engine.stream("p", max_tokens=19, stop=["beta gamma", "ta del"], constraint=Scripted(script)))
    assert "".join(event.text for event in events) == "say "
    assert (events[-1].reason, events[-1].stop) == ("stop", "beta gamma")
    assert sum(event.kind == "token" for event in events) == len("say beta gamma")
    # Cut off before the stop string is complete, the text that was held back belongs to the answer.
    short = list(engine.stream("p", max_tokens=5 + cut, stop=["beta gamma"], constraint=Scripted(script)))
    assert "".join(event.text for event in short) == "say beta"[: 5 + cut]
    assert short[-1].reason == "length"


def test_half_characters_are_never_shown(engine):
    script = list("né 🙂!".encode())
    events = list(engine.stream("p", max_tokens=len(script), constraint=Scripted(script)))
    assert "".join(event.text for event in events) == "né 🙂!"
    assert not any("\ufffd" in event.text for event in events)


def test_seeds_reproduce_and_drawn_seeds_are_reported(engine):
    first = greedy(engine, "ab", 12, temperature=1.0)
    again = greedy(engine, "ab", 12, temperature=1.0, seed=first.seed)
    other = greedy(engine, "ab", 12, temperature=1.0)
    assert first.tokens == again.tokens
    assert other.seed != first.seed
    assert other.tokens != first.tokens


@pytest.mark.parametrize("after", range(7))
def test_cancel_at_any_point_keeps_the_text_so_far(loaded, after):
    engine = labkit.Engine(loaded("hybrid"), prefill_chunk=4)
    whole = greedy(engine, "0123456789", 8)
    id = engine.submit(engine.request("0123456789", max_tokens=8, ignore_eos=True))
    events = []
    for _ in range(after):
        events += engine.step()
    assert engine.cancel(id)
    events += engine.run()
    tokens = [event.token for event in events if event.kind == "token"]
    assert events[-1].reason == "cancelled"
    assert sum(event.kind == "finished" for event in events) == 1
    assert tuple(tokens) == whole.tokens[: len(tokens)]
    assert not engine.cancel(id)
    assert engine.idle


def test_leaving_a_stream_cancels_it_and_frees_the_engine(engine):
    for event in engine.stream("ab", max_tokens=50, ignore_eos=True):
        if event.kind == "token":
            break
    del event
    assert engine.idle
    assert greedy(engine, "ab", 3).finish_reason == "length"


def test_cancel_from_another_thread(engine):
    id = engine.submit(engine.request("ab", max_tokens=4000, ignore_eos=True))
    timer = threading.Timer(0.2, engine.cancel, [id])
    timer.start()
    events = list(engine.run())
    timer.join()
    assert events[-1].reason == "cancelled"


def test_requests_queue_by_priority_then_arrival(engine):
    requests = [engine.request(text, max_tokens=2, ignore_eos=True) for text in ("a", "b", "c")]
    urgent = labkit.Request((100,), labkit.SamplingParams(max_tokens=2, ignore_eos=True), id="urgent", priority=1)
    for request in (*requests, urgent):
        engine.submit(request)
    finished = [event.request for event in engine.run() if event.kind == "finished"]
    assert finished == ["urgent", *(request.id for request in requests)]


def test_a_stream_runs_what_was_queued_before_and_keeps_its_events(engine):
    id = engine.submit(engine.request("a", max_tokens=3, ignore_eos=True))
    mine = list(engine.stream("b", max_tokens=3, ignore_eos=True))
    assert {event.request for event in mine} != {id}
    others = list(engine.run())
    assert {event.request for event in others} == {id}
    assert others[-1].reason == "length"


def test_a_stream_whose_end_somebody_else_read_says_so(engine):
    mine = engine.stream("b", max_tokens=3, ignore_eos=True)
    next(mine)
    assert list(engine.run())[-1].kind == "finished"
    with pytest.raises(RuntimeError, match="read elsewhere"):
        list(mine)


def test_closing_ends_every_request(engine):
    heard = []
    mine = engine.stream("b", max_tokens=30, ignore_eos=True)
    id = engine.submit(engine.request("a", max_tokens=3), on_event=heard.append)
    next(mine)
    engine.close()
    assert (heard[-1].kind, heard[-1].reason) == ("finished", "cancelled")
    assert list(mine)[-1].reason == "cancelled"
    assert [(event.request, event.reason) for event in engine.run() if event.kind == "finished"] == [(id, "cancelled")]
    assert engine.idle
    engine.close()
    assert engine.step() == [], "a second time there is nobody to end"


def test_a_callback_that_raises_ends_its_request_alone(engine):
    def on_event(event):
        if event.index == 2:
            raise KeyError("broken callback")

    bad = engine.submit(engine.request("a", max_tokens=9, ignore_eos=True), on_event=on_event)
    good = engine.submit(engine.request("b", max_tokens=4, ignore_eos=True))
    events = list(engine.run())
    error = next(event for event in events if event.kind == "error")
    assert error.request == bad
    assert error.error["code"] == "callback_failed"
    assert "broken callback" in error.error["message"]
    ends = {event.request: event.reason for event in events if event.kind == "finished"}
    assert ends == {bad: "error", good: "length"}
    assert greedy(engine, "b", 4).tokens == tuple(e.token for e in events if e.request == good and e.kind == "token")


@pytest.mark.parametrize("when", ["make_caches", "forward"])
def test_a_model_that_raises_ends_the_request_and_the_engine_goes_on(loaded, monkeypatch, when):
    engine = labkit.Engine(loaded("llama"))
    model, calls = engine.loaded.model, []

    def fails(*args, **kwargs):
        calls.append(1)
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch:
        if when == "make_caches":
            patch.setattr(model, "make_caches", fails)
        else:
            patch.setattr(type(model.module), "__call__", fails)
        with pytest.raises(RequestFailed, match="no such kernel") as caught:
            engine.generate("ab")
        assert caught.value.record["code"] == "step_failed"
        assert len(calls) == 1
    assert greedy(engine, "ab", 3).finish_reason == "length"


def test_a_step_inside_a_callback_is_refused(engine):
    caught = []

    def on_event(event):
        if event.kind == "token":
            try:
                engine.step()
            except RuntimeError as error:
                caught.append(str(error))

    engine.submit(engine.request("a", max_tokens=2, ignore_eos=True), on_event=on_event)
    assert list(engine.run())[-1].reason == "length"
    assert "callback" in caught[0]


def test_an_interrupt_in_the_middle_of_a_step_leaves_a_usable_engine(engine, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            type(engine.loaded.model.module), "__call__", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            engine.generate("ab")
    assert engine.idle
    assert greedy(engine, "ab", 3).finish_reason == "length"


def test_bad_input_is_refused_at_the_door(engine):
    with pytest.raises(ValueError, match="token 999 is not"):
        engine.stream([1, 999])
    with pytest.raises(ValueError, match="empty"):
        engine.stream([])
    with pytest.raises(ValueError, match="vocabulary"):
        engine.stream([1], logit_bias={4000: 1.0})
    with pytest.raises(TypeError, match="temprature"):
        engine.stream("a", temprature=1)
    request = engine.request("a")
    engine.submit(request)
    with pytest.raises(ValueError, match="already"):
        engine.submit(request)
    with pytest.raises(ValueError, match="prefill_chunk"):
        labkit.Engine(engine.loaded, prefill_chunk=0)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": 2},
        {"xtc_threshold": 0.7},
        {"repetition_penalty": 0},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"seed": -4},
        {"logprobs": -1},
        {"stop": [""]},
        {"stop": [3]},
        {"stop_token_ids": ["x"]},
        {"logit_bias": {3: float("nan")}},
        {"min_tokens_to_keep": 0},
    ],
)
def test_options_are_checked_when_made(options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=name):
        labkit.SamplingParams(**options)


def test_requests_and_events_travel_as_plain_data(engine):
    request = engine.request("ab", max_tokens=2, logit_bias={3: 1}, stop=["x"], temperature=0.5)
    assert pickle.loads(pickle.dumps(request)) == request
    assert json.loads(json.dumps(asdict(request)))["params"]["max_tokens"] == 2
    events = list(engine.stream("ab", max_tokens=2, logprobs=1))
    assert pickle.loads(pickle.dumps((events, engine.log))) == (events, engine.log)


def test_one_stop_string_may_come_without_a_list():
    assert labkit.SamplingParams(stop="end").stop == ("end",)


def test_what_can_never_fit_is_refused_with_the_numbers(loaded):
    model = loaded("hybrid")
    engine = labkit.Engine(model, capacity_bytes=model.weights_bytes + 400_000)
    with pytest.raises(CapacityError, match="max_tokens") as caught:
        engine.stream("ab", max_tokens=2000)
    record = caught.value.record
    assert (record["code"], record["retryable"], record["prompt_tokens"]) == ("context_exceeds_capacity", False, 2)
    assert record["required_bytes"] > record["capacity_bytes"]
    numbers = engine.capacity().as_record()
    for name in ("capacity_bytes", "weights_bytes", "kv_bytes_per_token", "max_context_tokens"):
        assert record[name] == numbers[name]
    assert numbers["kv_bytes_per_token"] == 2 * 128
    assert numbers["state_bytes"] > 0
    fits = numbers["max_context_tokens"]
    engine.submit(engine.request([1] * 10, max_tokens=fits - 10))
    with pytest.raises(CapacityError):
        engine.submit(engine.request([1] * 10, max_tokens=fits - 9))
    engine.close()


def test_a_prompt_longer_than_the_models_context_is_refused(loaded):
    with pytest.raises(CapacityError, match="4097 tokens is longer than the context of 4096"):
        labkit.Engine(loaded("llama")).stream([1] * 4097, max_tokens=1)


def test_messages_go_through_the_template_with_their_segments(engine):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
    request = engine.request(messages, thinking=False)
    text = engine.loaded.tokenizer.decode(request.tokens)
    assert text.endswith("<|im_start|>assistant\n<think></think>")
    assert [segment.source for segment in request.segments] == ["messages[0]", "messages[1]", "generation prompt"]
    assert request.segments[0].start == 0
    assert request.segments[-1].end == len(request.tokens)
    assert engine.loaded.tokenizer.decode(engine.request(messages).tokens).endswith("assistant\n")


def test_memory_does_not_grow_with_requests(engine):
    greedy(engine, "ab", 2)
    before = mx.get_active_memory()
    for _ in range(20):
        greedy(engine, "ab" * 40, 2)
    assert falls_to(before + 10_000)


@pytest.mark.parametrize(("target", "pool", "cleared"), [(None, 1, 3), ("cuda", 0.02, 0), ("cuda", 0.04, 3)])
def test_between_chunks_a_gpu_keeps_memory_for_the_next_one(loaded, monkeypatch, target, pool, cleared):
    """Given back after each chunk, the driver maps it anew for the next; kept without end, buffers that have grown
    leave ever larger ones behind."""
    known = loaded("hybrid")
    working_set, calls = devices.this_device().working_set_bytes, []
    monkeypatch.setattr(prefill, "device_target", lambda: target)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: int(pool * working_set))
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append(1))
    greedy(labkit.Engine(known, prefill_chunk=8), [1 + i for i in range(20)], 1)
    assert len(calls) == cleared

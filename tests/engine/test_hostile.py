"""What a careless or hostile caller does to an engine: refused in words, and the engine goes on."""

from __future__ import annotations

import asyncio

import mlx.core as mx
import numpy as np
import pytest

import labkit
from labkit.engine import RequestFailed


def works(engine) -> bool:
    return engine.generate("ab", max_tokens=2, ignore_eos=True).finish_reason == "length" and engine.idle


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"logprobs": 2}, {"repetition_penalty": 1.1}])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_end_the_request_instead_of_giving_tokens(loaded, monkeypatch, options, value):
    engine = labkit.Engine(loaded("llama"))
    module = type(engine.loaded.model.module)
    forward = module.__call__
    with monkeypatch.context() as patch:
        patch.setattr(module, "__call__", lambda *a, **k: forward(*a, **k) * 0 + value)
        with pytest.raises(RequestFailed, match="logits are NaN or infinite"):
            engine.generate("ab", max_tokens=5, **options)
    assert works(engine)


@pytest.mark.parametrize("mask", [[1] * 9, np.ones(9, np.uint32), 5])
def test_a_mask_that_is_no_array_of_mlx(engine, mask):
    class Wrong:
        def mask(self):
            return mask

        def accept(self, token):
            pass

    with pytest.raises(RequestFailed, match=type(mask).__name__):
        engine.generate("ab", constraint=Wrong())
    assert works(engine)


def test_a_stream_that_is_closed_or_dropped_before_its_first_event_is_cancelled(engine):
    engine.stream("ab", max_tokens=50).close()
    assert not engine._register.live
    stream = engine.stream("ab", max_tokens=50)
    del stream
    assert not engine._register.live
    assert [event.reason for event in engine.run() if event.kind == "finished"] == []
    assert works(engine)


@pytest.mark.parametrize("kind", ["submitted", "token", "finished"])
@pytest.mark.parametrize("leave", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_exits_takes_its_request_with_it(engine, kind, leave):
    def on_event(event):
        if event.kind == kind:
            raise leave

    def whole_run():
        engine.submit(engine.request("ab", max_tokens=2, ignore_eos=True), on_event=on_event)
        list(engine.run())

    with pytest.raises(leave):
        whole_run()
    assert not engine._register.live
    list(engine.run())
    assert works(engine)


@pytest.mark.parametrize(
    "fields",
    [
        {"priority": "x"},
        {"priority": float("nan")},
        {"arrival": None},
        {"id": None},
        {"id": ""},
        {"params": None},
        {"params": {}},
    ],
)
def test_requests_are_checked_when_made(engine, fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        labkit.Request(**{"tokens": (1,), **fields})
    assert works(engine)


@pytest.mark.parametrize("prompt", [[1.7], ["1"], [[1]], [float("nan")], b"abc", None, 5, {"role": "user"}, [2**70]])
def test_prompts_that_are_none(engine, prompt):
    with pytest.raises(ValueError, match=r"token|message"):
        engine.stream(prompt)
    assert engine.idle


@pytest.mark.parametrize("prompt", ["a\ud800", [{"role": "user", "content": "\udfff"}]])
def test_text_that_is_no_unicode(engine, prompt):
    with pytest.raises(ValueError, match="not valid Unicode"):
        engine.stream(prompt)


def test_tokens_may_come_as_any_whole_numbers(engine):
    wanted = engine.generate([1, 2], max_tokens=2).tokens
    for tokens in (mx.array([1, 2]), np.array([1, 2]), [np.int32(1), np.int64(2)], (1, 2)):
        assert engine.generate(tokens, max_tokens=2).tokens == wanted


@pytest.mark.parametrize("name", ["prefill_chunk", "capacity_bytes", "log_limit"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "x", True, float("nan")])
def test_an_engines_sizes_are_whole_numbers(loaded, name, value):
    with pytest.raises(ValueError, match=name):
        labkit.Engine(loaded("llama"), **{name: value})


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_log_never_grows_past_its_limit(loaded, limit):
    engine = labkit.Engine(loaded("llama"), log_limit=limit)
    for _ in engine.stream("ab", max_tokens=12, ignore_eos=True):
        assert len(engine.log) <= limit


@pytest.mark.parametrize(
    "options",
    [
        {"stop": 5},
        {"stop": None},
        {"stop_token_ids": 5},
        {"stop_token_ids": [True]},
        {"ignore_eos": "no"},
        {"logit_bias": 5},
        {"logit_bias": [1]},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1: None}},
    ],
)
def test_options_of_a_wrong_type_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        labkit.SamplingParams(**options)


@pytest.mark.parametrize("temperature", [1e-6, 1e-7, 1e-39, 1e-300, 5e-324])
def test_a_temperature_that_is_nearly_none_takes_the_most_likely_token(engine, temperature):
    greedy = engine.generate("ab", max_tokens=4, ignore_eos=True).tokens
    assert engine.generate("ab", max_tokens=4, ignore_eos=True, temperature=temperature, seed=1).tokens == greedy


EXTREMES = {
    "the hottest": {"temperature": 1e6, "top_k": 1},
    "the hottest, by share": {"temperature": 1e6, "min_p": 1.0},
    "more kept than there are": {"temperature": 1.0, "min_p": 0.5, "min_tokens_to_keep": 1 << 40},
    "more alternatives than there are": {"logprobs": 1 << 40, "top_k": 1 << 40},
    "no nucleus": {"temperature": 1.0, "top_p": 1e-300},
    "any context": {"repetition_penalty": 1e6, "repetition_context_size": 1 << 80, "presence_penalty": 1e6},
    "the other way": {"repetition_penalty": 1e-6, "frequency_penalty": -1e6, "frequency_context_size": 1 << 80},
    "the strongest bias": {"logit_bias": {3: 1e6, 4: -1e300, 5: float("-inf")}},
    "any seed": {"temperature": 1.0, "seed": 1 << 200},
}


@pytest.mark.parametrize("options", EXTREMES.values(), ids=EXTREMES)
def test_the_most_that_options_allow_gives_an_answer(engine, options):
    answer = engine.generate("ab", max_tokens=4, ignore_eos=True, **options)
    assert answer.finish_reason == "length"
    if options.get("temperature") == 1e6 or "top_p" in options:
        assert answer.tokens == engine.generate("ab", max_tokens=4, ignore_eos=True).tokens


@pytest.mark.parametrize(
    "options",
    [
        *({name: value} for name in ("temperature", "repetition_penalty") for value in (10**400, 1e7, "1", True, 1j)),
        *({name: value} for name in ("presence_penalty", "frequency_penalty") for value in (10**400, 1e7, -1e7)),
        {"repetition_penalty": 1e-7},
        *({"logit_bias": {3: value}} for value in (1e7, float("inf"), float("nan"), 10**400)),
        {"stop": "\ud800"},
        {"stop": b"ab"},
    ],
    ids=lambda options: ascii(options)[:40],
)
def test_options_beyond_their_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        labkit.SamplingParams(**options)


def test_numbers_may_come_from_numpy():
    """And travel as Python's own: a paused row is JSON."""
    options = {"temperature": np.float32(0.5), "top_p": np.float64(0.5), "seed": np.int64(3), "max_tokens": np.uint8(7)}
    params = labkit.SamplingParams(**options, stop_token_ids=np.array([1, 2]), logit_bias={np.int32(3): np.float32(1)})
    assert params == labkit.SamplingParams(
        temperature=0.5, top_p=0.5, seed=3, max_tokens=7, stop_token_ids=(1, 2), logit_bias={3: 1.0}
    )
    assert {type(getattr(params, name)) for name in options} == {float, int}


@pytest.mark.parametrize(
    "fields", [{"priority": 10**400}, {"arrival": 10**400}, {"id": "a\ud800"}, {"segments": 5}, {"extra": "\ud800"}]
)
def test_requests_that_could_not_be_written_down_are_refused(fields):
    """An id or a key that no file can name would stop the engine when it pauses the row."""
    with pytest.raises(ValueError, match="extra key" if "extra" in fields else next(iter(fields))):
        labkit.Request(**{"tokens": (1,), **fields})


@pytest.mark.parametrize("params", [{"temperature": 1}, "greedy", 0.7])
def test_options_that_are_no_params(engine, params):
    with pytest.raises(ValueError, match="SamplingParams"):
        engine.stream("ab", params)


@pytest.mark.parametrize(("name", "value"), [("guard", 5), ("policy", 5), ("prefixes", "a folder")])
def test_an_engines_parts_are_what_they_should_be(loaded, name, value):
    with pytest.raises(ValueError, match=name):
        labkit.Engine(loaded("llama"), **{name: value})


@pytest.mark.parametrize("model", ["tiny-hybrid", None])
def test_an_engine_takes_a_loaded_model(model):
    with pytest.raises(ValueError, match=r"labkit\.load"):
        labkit.Engine(model)


@pytest.mark.parametrize("hooks", [{"on_event": 5}, {"constraint": 5}, {"constraint": lambda token: None}])
def test_hooks_that_cannot_be_called(engine, hooks):
    with pytest.raises(ValueError, match=next(iter(hooks))):
        engine.submit(engine.request("ab"), **hooks)
    assert engine.idle


@pytest.mark.parametrize("kind", ["submitted", "prefill", "token", "finished"])
@pytest.mark.parametrize("work", [lambda engine: engine.step(), lambda engine: list(engine.run()), works])
def test_no_callback_steps_its_engine(engine, kind, work):
    """Whichever it is called from: `submit` tells the first event, `step` the others."""
    seen = []

    def on_event(event):
        if event.kind == kind and not seen:
            with pytest.raises(RuntimeError, match="inside a callback"):
                work(engine)
            seen.append(event)

    engine.submit(engine.request("ab", max_tokens=2, ignore_eos=True), on_event=on_event)
    ends = [event.reason for event in engine.run() if event.kind == "finished"]
    assert seen
    assert ends == ["length"]
    assert works(engine)


def test_a_callback_that_raises_at_the_end_is_heard_of(engine, caplog):
    """The request has ended by itself: there is no event left to say it."""

    def on_event(event):
        if event.kind == "finished":
            raise ValueError("the reader's own trouble")

    id = engine.submit(engine.request("ab", max_tokens=2, ignore_eos=True), on_event=on_event)
    assert [event.reason for event in engine.run() if event.kind == "finished"] == ["length"]
    assert id in caplog.text
    assert "the reader's own trouble" in caplog.text
    assert works(engine)


def test_only_the_engines_own_thread_takes_requests_once_there_is_one(engine):
    """Whoever wants to ask from another thread asks with `astream`."""

    async def answered():
        return [event.kind async for event in engine.astream("ab", max_tokens=2, ignore_eos=True)]

    assert asyncio.run(answered())[-1] == "finished"
    for ask in (lambda: engine.submit(engine.request("ab")), lambda: engine.stream("ab"), engine.resume_paused):
        with pytest.raises(RuntimeError, match="use astream"):
            ask()
    assert asyncio.run(answered())[-1] == "finished"
    engine.close()

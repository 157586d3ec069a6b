"""What a careless or hostile caller does to an engine: refused in words, and the engine goes on."""

from __future__ import annotations

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

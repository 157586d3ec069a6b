"""Contract 3, step: the device runs one token ahead, and whoever stops a row meets exactly one pending token."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

import labkit
from labkit.engine import step as step_module

PROMPT = tuple(range(20, 31))


def attention_offset(session) -> int:
    return next(cache.offset for cache in session._caches if cache.kind == "contiguous")


@pytest.mark.parametrize("constrained", [False, True])
def test_at_every_boundary_exactly_one_chosen_token_is_not_in_the_caches(hybrid, constrained):
    engine = labkit.Engine(hybrid, prefill_chunk=4)
    request = engine.request(PROMPT, max_tokens=6, ignore_eos=True)
    engine.submit(request, constraint=EvenTokens() if constrained else None)
    read = 0
    while not engine.idle:
        events = engine.step()
        read += sum(event.kind == "token" for event in events)
        session = engine._active
        if session is None or session._row is None:
            continue
        row = session._row
        assert row.pending is not None
        assert row.fed == attention_offset(session) == len(PROMPT) + row.chosen - 1
        assert row.chosen - read == 1, "all chosen tokens but the pending one were read"


def test_the_next_forward_is_launched_before_the_host_reads(hybrid, monkeypatch):
    order = []
    forward, read = step_module.DecodingRow._forward, step_module.DecodingRow.read
    monkeypatch.setattr(
        step_module.DecodingRow, "_forward", lambda self, t: (order.append("launch"), forward(self, t))[1]
    )
    monkeypatch.setattr(step_module.DecodingRow, "read", lambda self, c: (order.append("read"), read(self, c))[1])
    labkit.Engine(hybrid).generate(PROMPT, max_tokens=4, ignore_eos=True)
    # The last token is read without another forward, which nobody would use.
    assert order == ["launch", *["launch", "read"] * 3, "read"]
    order.clear()
    labkit.Engine(hybrid).generate(PROMPT, max_tokens=4, ignore_eos=True, constraint=EvenTokens())
    assert order == ["launch", *["read", "launch"] * 3, "read"]


class EvenTokens:
    """Permits even tokens; remembers what was chosen before each mask was asked for."""

    def __init__(self):
        self.accepted, self.asked_after = [], []

    def mask(self) -> mx.array:
        self.asked_after.append(len(self.accepted))
        return mx.full((9,), 0x55555555, dtype=mx.uint32)

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_a_constraint_sees_every_token_before_it_gives_the_next_mask(hybrid):
    constraint = EvenTokens()
    answer = labkit.Engine(hybrid).generate(PROMPT, max_tokens=8, ignore_eos=True, constraint=constraint)
    assert len(answer.tokens) == 8
    assert all(token % 2 == 0 for token in answer.tokens)
    assert tuple(constraint.accepted) == answer.tokens
    assert constraint.asked_after == list(range(8))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (mx.zeros((9,), mx.uint32), "permits no token"),
        (mx.full((8,), 0xFFFFFFFF, dtype=mx.uint32), r"uint32 \[9\]"),
        (mx.ones((9,), mx.int32), r"uint32 \[9\]"),
    ],
    ids=["nothing", "too short", "signed"],
)
def test_a_mask_that_cannot_be_ends_its_request_after_every_token_that_was_accepted(hybrid, mask, words):
    class Broken(EvenTokens):
        def mask(self) -> mx.array:
            return super().mask() if len(self.accepted) < 3 else mask

    constraint, engine = Broken(), labkit.Engine(hybrid)
    events = list(engine.stream(PROMPT, max_tokens=8, ignore_eos=True, constraint=constraint))
    assert [event.kind for event in events[-2:]] == ["error", "finished"]
    assert re.search(words, events[-2].error["message"])
    assert [event.token for event in events if event.kind == "token"] == constraint.accepted
    assert len(constraint.accepted) == 3


def test_the_token_stays_on_the_device_between_steps(hybrid, monkeypatch):
    """The forward is fed the very array that was chosen, unread."""
    fed, chosen = [], []
    choose = step_module.choose

    def spy(logits, token, *rest):
        fed.append(token)
        choice = choose(logits, token, *rest)
        chosen.append(choice.token)
        return choice

    monkeypatch.setattr(step_module, "choose", spy)
    labkit.Engine(hybrid).generate(PROMPT, max_tokens=5, ignore_eos=True)
    assert all(later is earlier for later, earlier in zip(fed[1:], chosen, strict=False))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_the_host_sees_first_chooses_the_same_tokens(hybrid, temperature):
    class Anything(EvenTokens):
        def mask(self):
            return None

    engine = labkit.Engine(hybrid)
    options = {"max_tokens": 10, "ignore_eos": True, "temperature": temperature, "seed": 5}
    assert engine.generate(PROMPT, **options).tokens == engine.generate(PROMPT, constraint=Anything(), **options).tokens

"""Contract 3, step: the device runs one token ahead, and whoever stops a row meets exactly one pending token."""

from __future__ import annotations

import re

import mlx.core as mx
import pytest

import labkit
from labkit.engine import batch as batch_module
from labkit.engine import lanes as lanes_module

PROMPT = tuple(range(20, 31))


def offsets(batch) -> list[int]:
    """Tokens in the caches of each row, as the attention layers count them."""
    offset = next(cache.offset for cache in batch.caches if cache.kind == "contiguous")
    return [offset] if isinstance(offset, int) else offset.tolist()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("constrained", [False, True])
def test_at_every_boundary_exactly_one_chosen_token_is_not_in_the_caches(hybrid, constrained, rows):
    engine = labkit.Engine(hybrid, prefill_chunk=4)
    prompts = [PROMPT[: len(PROMPT) - 3 * row] for row in range(rows)]
    for row, prompt in enumerate(prompts):
        request = engine.request(prompt, max_tokens=6 + row, ignore_eos=True)
        engine.submit(request, constraint=EvenTokens() if constrained else None)
    read, boundaries = {}, 0
    while not engine.idle:
        for event in engine.step():
            read[event.request] = read.get(event.request, 0) + (event.kind == "token")
        for batch in engine._executor.lanes.batches():
            for row, fed in zip(batch.sessions, offsets(batch), strict=True):
                if row.finished:
                    continue
                boundaries += 1
                assert row.fed == fed
                # Before its first step a row's pending token is its prompt's last.
                assert row.fed == len(row.request.tokens) + row.chosen - 1
                assert row.chosen - read[row.id] == (1 if row.chosen else 0)
            assert batch.pending.token.shape == (len(batch),)
    assert boundaries >= 5 * rows


def test_the_next_forward_is_launched_before_the_host_reads(hybrid, monkeypatch):
    order = []
    launch, read = batch_module.DecodingBatch.launch, lanes_module.read
    monkeypatch.setattr(
        batch_module.DecodingBatch, "launch", lambda self, *given: (order.append("launch"), launch(self, *given))[1]
    )
    monkeypatch.setattr(lanes_module, "read", lambda choice: (order.append("read"), read(choice))[1])
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


@pytest.mark.parametrize("rows", [1, 3])
def test_the_token_stays_on_the_device_between_steps(hybrid, monkeypatch, rows):
    """The forward is fed the very array that was chosen, unread."""
    fed, chosen = [], []
    choose = batch_module.choose

    def spy(logits, token, *rest):
        fed.append(token)
        choice = choose(logits, token, *rest)
        chosen.append(choice.token)
        return choice

    monkeypatch.setattr(batch_module, "choose", spy)
    # Where the CPU has the logits anyway it chooses at once; without that the native graph keeps the contract as well.
    monkeypatch.setattr(batch_module, "likeliest", lambda *_: None)
    engine = labkit.Engine(hybrid)
    for row in range(rows):
        engine.submit(engine.request(PROMPT[row:], max_tokens=5, ignore_eos=True))
    list(engine.run())
    assert len(fed) == 5
    assert all(later is earlier for later, earlier in zip(fed[1:], chosen, strict=False))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_the_host_sees_first_chooses_the_same_tokens(hybrid, temperature):
    class Anything(EvenTokens):
        def mask(self):
            return None

    engine = labkit.Engine(hybrid)
    options = {"max_tokens": 10, "ignore_eos": True, "temperature": temperature, "seed": 5}
    assert engine.generate(PROMPT, **options).tokens == engine.generate(PROMPT, constraint=Anything(), **options).tokens

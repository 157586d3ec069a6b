"""Rows that decode by a recording have the tokens and log-probabilities, bit for bit, of rows that decode by MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from labkit.caches import contiguous, contiguous_batch, tail
from labkit.models.hybrid import recordable
from tests.engine.replay.playing import (
    DRAWN,
    GREEDY,
    HOST,
    Script,
    both,
    compare,
    of_two_layers,
    play,
    request,
    submit,
)
from tests.models.hybrid.small import TEXT
from tests.tiny_models import VOCABULARY

# -- the same ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_one_row(small, roomy, options):
    _, replayed = both(small, {0: submit(("a", 1, {**options, "max_tokens": 9}))}, at_least=6)
    assert replayed.replays.recorded == 1
    assert len(replayed.tokens["a"]) == 9


def test_rows_of_several_lengths_with_options_of_their_own(tmp_path_factory, roomy):
    """With experts."""
    small = of_two_layers(tmp_path_factory, TEXT)
    rows = [("a", 1, GREEDY), ("b", 2, {**DRAWN, "length": 3}), ("c", 3, {"temperature": 1.2, "length": 11})]
    _, replayed = both(small, {0: submit(*rows)}, at_least=4)
    assert replayed.replays.recorded == 1


def test_rows_that_join_and_leave_midway(small, roomy):
    """Two, three and again two rows of several lengths: the longest leaves, and the columns before it are cut off."""
    first = submit(("a", 1, {"max_tokens": 18}), ("b", 2, {**DRAWN, "max_tokens": 10, "length": 40}))
    later = submit(("c", 3, {"max_tokens": 7, "temperature": 0.7}))
    _, replayed = both(small, {0: first, 7: later}, at_least=7)
    shapes = {record.shape[0] for record in replayed.engine.log if record.kind == "decode"}
    assert shapes == {1, 2, 3}


@pytest.mark.parametrize("name", ["b", pytest.param("a", marks=pytest.mark.nightly)])
def test_one_after_the_other_by_one_recording(small, roomy, name):
    """The states, options, seeds and keys of the next row, not those of the one that was recorded; of its name, too."""
    script = {0: submit(("a", 1)), 11: submit((name, 2, {**DRAWN, "length": 9}))}
    _, replayed = both(small, script, at_least=9)
    assert replayed.replays.recorded == 1


def test_full_tails_and_growing_buffers(small, monkeypatch):
    for module in (tail, recordable, contiguous):
        monkeypatch.setattr(module, "TAIL", 8)
    monkeypatch.setattr(tail, "AHEAD", 16)
    for module in (contiguous, contiguous_batch):
        monkeypatch.setattr(module, "rounded", lambda columns: -(-columns // 16) * 16)
    script = {0: submit(("a", 1, {"max_tokens": 32}), ("b", 2, {**DRAWN, "max_tokens": 6, "length": 9}))}
    _, replayed = both(small, script, at_least=14, bits=False)
    assert replayed.replays.recorded >= 3, "buffers that grew were recorded anew"


def test_buffers_that_are_a_part_of_larger_ones(small):
    """The longest row leaves, the columns before the others are cut off, and what is left has room for all to come: the
    buffers have strides."""
    rows = [("a", 1, {"max_tokens": 4, "length": 60}), ("b", 2, {"max_tokens": 10}), ("c", 3, {"max_tokens": 10})]
    _, replayed = both(small, {0: submit(*rows)}, at_least=5, bits=False)
    assert not replayed.replays.refused


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_cancel_at_any_token(small, roomy):
    """One after the other on one engine, each ended a step later than the one before, beside a row that goes on."""

    def script(engine_steps: int) -> Script:
        acts: Script = {0: submit(("long", 9, {"max_tokens": 40}))}
        at = 3
        for step in range(1, engine_steps):
            acts[at] = submit((f"r{step}", step, {"max_tokens": 20}))
            acts[at + step] = lambda engine, name=f"r{step}": engine.cancel(name)
            at += step + 2
        return acts

    _, replayed = both(small, script(5), at_least=6)
    assert {reason for reason, *_ in replayed.ends.values()} == {"cancelled", "length"}


def test_stops_and_end_tokens(small, roomy):
    """A text, a token and the model's own end in the middle of a replayed stretch, beside a row that goes on."""
    plain = play(small, {0: submit(("a", 1), ("b", 2, DRAWN))}, replay=False)
    end = plain.tokens["a"][6]
    text = small.tokenizer.decode([plain.tokens["b"][5]])
    acts = submit(
        ("a", 1, {"stop_token_ids": (end,)}), ("b", 2, {**DRAWN, "stop": (text,)}), ("c", 3, {"max_tokens": 13})
    )
    _, replayed = both(small, {0: acts}, at_least=4)
    assert replayed.ends["a"][0] == "stop"
    assert replayed.ends["c"] == ("length", None, 13)


def test_a_callback_that_raises_ends_its_row(small, roomy):
    def acts(engine: Any) -> None:
        def on_event(event):
            if event.kind == "token" and event.index == 5:
                raise OSError("the reader has gone")

        engine.submit(request(engine, "a", 1, max_tokens=12))
        engine.submit(request(engine, "b", 2, max_tokens=12), on_event=on_event)

    _, replayed = both(small, {0: acts}, at_least=5)
    assert len(replayed.tokens["b"]) < 8 < 12 == len(replayed.tokens["a"])


# -- rows that are not replayed ----------------------------------------------------------------------------------------


class Even:
    """A constraint: every second token is permitted."""

    def mask(self):
        return mx.full((VOCABULARY // 32,), 0x55555555, dtype=mx.uint32)

    def accept(self, token):
        assert token % 2 == 0


OTHERS = {
    "penalties": {"repetition_penalty": 1.3},
    "constraint": {},
    "log-probabilities": {"logprobs": 2},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.1, "temperature": 1.0},
}


@pytest.mark.parametrize(
    "which", [*OTHERS][:2] + [pytest.param(one, marks=pytest.mark.nightly) for one in [*OTHERS][2:]]
)
def test_rows_that_ask_for_more_are_not_replayed_and_interrupt_their_neighbours(small, roomy, which):
    def other(engine: Any) -> None:
        constraint = Even() if which == "constraint" else None
        engine.submit(request(engine, "other", 5, max_tokens=6, **OTHERS[which]), constraint=constraint)

    script = {0: submit(("a", 1, {"max_tokens": 16, **DRAWN})), 6: other, 20: other}
    _, replayed = both(small, script, at_least=4)
    alone = [r for r in replayed.engine.log if r.kind == "decode" and r.rows == ("other",)]
    assert len(alone) >= 4, "it decoded alone too"
    assert {r.rows for r in replayed.engine.log if r.index in replayed.where} == {("a",)}
    beside = [r for r in replayed.engine.log if r.kind == "decode" and r.shape[0] == 2]
    assert beside, "they decoded together"


def test_models_that_do_not_offer_it(roomy, loaded):
    script = {0: submit(("a", 1), ("b", 2, DRAWN))}
    plain, replayed = (play(loaded("llama"), script, replay=replay) for replay in (False, HOST))
    compare(plain, replayed)
    assert not plain.errors
    assert (replayed.replayed, replayed.replays.recorded, replayed.replays.refused) == (0, 0, {})


def test_lanes_that_take_turns_do_not_write_into_each_others_recording(small, roomy, monkeypatch):
    """Rows of a model that cannot batch have the same form, and there is one recording: of the row that was first."""
    monkeypatch.setattr(small.model, "batches", False, raising=False)
    script = {0: submit(("a", 1, {"max_tokens": 14})), 6: submit(("b", 2, {**DRAWN, "max_tokens": 12}))}
    _, replayed = both(small, script, at_least=8)
    assert replayed.engine.runs_alone

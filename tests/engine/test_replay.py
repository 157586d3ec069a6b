"""Rows that decode by a recording have the tokens and log-probabilities, bit for bit, of rows that decode by MLX."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest

import labkit
from labkit.caches import contiguous, contiguous_batch, paged_rows, tail
from labkit.engine import MemoryGuard, Policy, SamplingParams, lanes, worker
from labkit.engine import replay as replaying
from labkit.engine.memory import FakeMeter
from labkit.engine.prefix import PrefixStore
from labkit.engine.sampling import RowSampler
from labkit.kernels.recording.on_host import OnHost
from labkit.kernels.targets import use_target
from labkit.measure.direct import DirectRow
from labkit.models import Rows
from labkit.models.hybrid import Hybrid, Variants, recordable
from tests.engine.test_batching import prompt
from tests.models.hybrid.small import DENSE, TEXT, config, random_module
from tests.settled import falls_to, settled_memory
from tests.tiny_models import VOCABULARY, write_checkpoint


class Pinned(OnHost):
    """Leaves what is read in memory of each graph's own, as a GPU does: the second replay after it overwrites that."""

    def __init__(self):
        super().__init__("reference")
        self._memory: dict[int, list] = {}

    def launch(self, built, reads):
        self._memory[id(built)] = super().launch(built, reads)
        return id(built)

    def read(self, begun):
        return self._memory[begun]


HOST = Pinned()
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return of_two_layers(tmp_path_factory, DENSE)


def of_two_layers(tmp_path_factory, text: dict) -> labkit.LoadedModel:
    """The specialised hybrid of two layers, one of each kind, behind the tiny models' tokenizer."""
    settings = config(text, vocab_size=VOCABULARY, num_hidden_layers=2)
    # As recorded steps compute: by labkit's launches alone, which nothing fuses.
    model = Hybrid.from_module(random_module(settings), settings, variants=Variants(compiled=False, decode_rows="own"))
    loaded = labkit.load(write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama"))
    return replace(loaded, model=model, weights_bytes=model.weights_bytes, name="small")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Rows are replayed from their third step on."""
    monkeypatch.setattr(replaying, "QUIET", 1)
    patience(monkeypatch, 2)
    monkeypatch.setattr(replaying, "FEWEST", 2)
    for module in (tail, recordable, contiguous):
        monkeypatch.setattr(module, "TAIL", 32)
    for module in (tail, paged_rows):
        monkeypatch.setattr(module, "AHEAD", 256)
    with use_target("reference"):
        yield


@pytest.fixture
def roomy(monkeypatch):
    """Buffers are as large without replays as with them: references round by the number of columns."""
    with_room(monkeypatch)


def with_room(patched: pytest.MonkeyPatch) -> None:
    open_tail = tail.Tailed.open_tail

    def opening(self, length):
        self.make_room(1 << 20)
        return open_tail(self, length)

    patched.setattr(tail.Tailed, "open_tail", opening)
    open_tails = paged_rows.PagedRows.open_tails

    def opening_all(self, length):
        self.widen(1 << 20)
        open_tails(self, length)

    patched.setattr(paged_rows.PagedRows, "open_tails", opening_all)
    for module in (tail, recordable, contiguous):
        patched.setattr(module, "TAIL", 32)
    for module in (tail, paged_rows):
        patched.setattr(module, "AHEAD", 256)


def patience(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setitem(replaying.Replays.__init__.__kwdefaults__, "patience", steps)


@dataclass
class Told:
    """What an engine's requests were told, and what it read of its steps, in order."""

    engine: Any
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, tuple] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    reads: list[tuple] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    where: list[int] = field(default_factory=list)

    @property
    def replayed(self) -> int:
        """Steps that were."""
        return len(self.where)

    @property
    def replays(self) -> replaying.Replays:
        return self.engine._executor.lanes.replays


def request(engine: Any, name: str, seed: int, length: int = 6, **options: Any) -> Any:
    params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, "seed": seed, **options})
    return replace(engine.request(prompt(seed, length), params), id=name)


Script = dict[int, Callable[[Any], Any]]


def play(model: Any, script: Script, *, replay: Any, steps: int = 10_000, **options: Any) -> Told:
    """Run an engine until nothing is to be done; `script` says what happens before which step."""
    engine = labkit.Engine(model, replay=replay, **options)
    told, waiting = Told(engine), dict(script)
    with pytest.MonkeyPatch.context() as patched:
        follow(told, patched)
        for step in range(steps):
            if step in waiting:
                waiting.pop(step)(engine)
            if engine.idle and not waiting:
                break
            hear(told, engine.step())
    return told


def follow(told: Told, patched: pytest.MonkeyPatch) -> None:
    read, launch = lanes.read, replaying.Replay.launch

    def reading(choice):
        told.reads.append((choice.token.tolist(), choice.total.tolist()))
        return read(choice)

    def launching(self):
        told.where.append(told.engine._journal.steps)
        return launch(self)

    patched.setattr(lanes, "read", reading)
    patched.setattr(replaying.Replay, "launch", launching)


def hear(told: Told, events: list) -> None:
    for event in events:
        told.kinds.add(event.kind)
        if event.kind == "token":
            told.tokens.setdefault(event.request, []).append(event.token)
        elif event.kind == "finished":
            told.ends[event.request] = event.reason, event.stop, event.usage.completion_tokens
        elif event.kind == "error":
            told.errors[event.request] = event.error["code"], event.error["message"]


def both(model: Any, script: Script, *, at_least: int = 1, bits: bool = True, **options: Any) -> tuple[Told, Told]:
    """Without and with replays: the same, log-probabilities but for rounding unless `bits`, and so many steps
    replayed."""
    plain, replayed = (play(model, script, replay=replay, **options) for replay in (False, HOST))
    compare(plain, replayed, bits)
    assert plain.replayed == 0
    assert replayed.replayed >= at_least, replayed.replays.refused
    return plain, replayed


def compare(plain: Told, replayed: Told, bits: bool = True) -> None:
    assert (replayed.tokens, replayed.ends, replayed.errors) == (plain.tokens, plain.ends, plain.errors)
    if bits:
        assert replayed.reads == plain.reads
        return
    for (mine, totals), (theirs, wanted) in zip(replayed.reads, plain.reads, strict=True):
        assert mine == theirs
        assert totals == pytest.approx(wanted, abs=1e-4)


def submit(*many: tuple, **common: Any) -> Callable[[Any], None]:
    """(name, seed, options) each."""

    def do(engine: Any) -> None:
        for name, seed, *options in many:
            engine.submit(request(engine, name, seed, **{**common, **(options[0] if options else {})}))

    return do


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


# -- pages -------------------------------------------------------------------------------------------------------------

PAGED = {"kv": "paged", "pool_bytes": 1 << 24, "block_tokens": 8}


def test_rows_in_pages(small, roomy):
    """Alone and together, of several lengths, one prompt twice: blocks are filled, taken and shared; rows join and
    leave."""
    first = submit(("a", 1, {"max_tokens": 50}), ("b", 2, {**DRAWN, "max_tokens": 16, "length": 40}))
    later = submit(("twin", 2, {"max_tokens": 26, "length": 40}))
    _, replayed = both(small, {0: first, 9: later}, at_least=25, prefill_chunk=16, **PAGED)
    shapes = {record.shape[0] for record in replayed.engine.log if record.index in replayed.where}
    assert shapes == {1, 2, 3}
    assert not replayed.replays.refused
    assert not replayed.engine.paged.faults()
    assert replayed.engine.paged.used == 0


def test_rows_in_pages_of_another_length_than_those_that_were_recorded(small, roomy):
    """Their own tables, finished blocks and places in the tails, not those of the one that was recorded."""
    script = {0: submit(("a", 1, {"max_tokens": 12})), 16: submit(("b", 2, {**DRAWN, "length": 27, "max_tokens": 12}))}
    _, replayed = both(small, script, at_least=14, **{**PAGED, "pool_bytes": 1 << 18})
    assert replayed.replays.recorded <= 2


def test_rows_in_pages_taken_out_and_put_back(small, roomy):
    kept = []
    out = lambda engine: kept.append(engine._executor.pause(engine._register.live["a"], []))
    script = {
        0: submit(("a", 1, {**DRAWN, "max_tokens": 24}), ("c", 3, {"max_tokens": 26})),
        8: out,
        14: lambda engine: engine._executor.resume(kept.pop()),
    }
    both(small, script, at_least=12, **PAGED)


def test_pools_are_not_kept_while_a_prompt_writes_new_ones(small, roomy):
    seen = []

    def look(engine: Any) -> None:
        recording = engine.replays._recording
        seen.append((bool(engine._executor.prefill.sessions), recording is not None and bool(recording._given)))

    script = {0: submit(("a", 1, {"max_tokens": 40})), 8: submit(("b", 2, {"length": 40, "max_tokens": 8}))}
    script |= dict.fromkeys(range(9, 30), look)
    both(small, script, at_least=10, prefill_chunk=8, **PAGED)
    replayed = seen[len(seen) // 2 :]
    assert (False, True) in replayed, "it was replayed"
    assert (True, False) in replayed, "and the prompt was computed beside it"
    assert (True, True) not in replayed


# -- aside and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "beside", [(), pytest.param((("c", 3, {"max_tokens": 17}),), marks=pytest.mark.nightly)], ids=["alone", "of two"]
)
def test_a_row_taken_out_and_put_back(small, roomy, beside):
    """While it is out, others decode by the same recording."""
    kept = []

    def out(engine: Any) -> None:
        kept.append(engine._executor.pause(engine._register.live["a"], []))

    def back(engine: Any) -> None:
        engine._executor.resume(kept.pop())

    first = submit(("a", 1, {**DRAWN, "max_tokens": 14}), *beside)
    _, replayed = both(small, {0: first, 6: out, 7: submit(("b", 2)), 14: back}, at_least=8)
    meanwhile = [record.rows for record in replayed.engine.log if record.index in replayed.where]
    assert any("b" in rows and "a" not in rows for rows in meanwhile), "the others were replayed"


def test_pressure_pauses_and_resumes_replayed_rows(small, tmp_path):
    gib = 1 << 30
    found = []
    for replay in (False, HOST):
        meter = FakeMeter(gib)
        model = replace(small, path=small.path)
        options = {
            "guard": MemoryGuard(gib, meter=meter, interval=0, min_chunk=2),
            "policy": Policy(patience=0, calm_polls=0),
            "prefixes": PrefixStore(model, width=8),
        }

        def press(engine, meter=meter):
            meter.live = int(0.97 * gib)

        def relax(engine, meter=meter):
            meter.live = 0

        script = {0: submit(("a", 1, {"max_tokens": 12}), ("b", 2, {**DRAWN, "max_tokens": 12})), 6: press, 8: relax}
        found.append(play(model, script, replay=replay, **options))
    plain, replayed = found
    assert replayed.tokens == plain.tokens
    assert replayed.ends == plain.ends
    assert replayed.replayed > 4
    assert "paused" in replayed.kinds, "somebody was"


def test_where_memory_is_tight_a_recording_without_rows_goes(small, tmp_path):
    gib = 1 << 30
    meter = FakeMeter(gib)
    guard = MemoryGuard(gib, meter=meter, interval=0, min_chunk=2)
    engine = labkit.Engine(
        small, replay=HOST, guard=guard, policy=Policy(patience=0, calm_polls=0), prefixes=PrefixStore(small, width=8)
    )
    engine.submit(request(engine, "a", 1, max_tokens=40))
    while not engine.replays.nbytes:
        engine.step()
    meter.live = int(0.88 * gib)  # soft: nobody is put aside
    for _ in range(3):
        engine.step()
    assert guard.level == "soft"
    assert engine.replays.nbytes > 0, "its row decodes from it"
    list(engine.run())
    engine.submit(request(engine, "b", 2, max_tokens=2))
    list(engine.run())
    assert engine.replays.nbytes == 0, "nobody does any more"


def test_caches_asked_for_midway_hold_what_they_should(small, roomy):
    found = {}

    def look(engine: Any) -> None:
        (batch,) = engine._executor.lanes.batches()
        states = [array for cache in batch.caches for array in flat(cache.state)]
        found.setdefault(engine, []).append(
            [a.tolist() if isinstance(a, mx.array) else a for a in (*states, batch.pending.token)]
        )

    script = {0: submit(("a", 1, {"max_tokens": 12}), ("b", 2, {**DRAWN, "length": 9, "max_tokens": 12}))}
    script |= dict.fromkeys((4, 5, 8, 11), look)
    both(small, script, at_least=3)
    plain, replayed = found.values()
    assert plain == replayed


def flat(state: Any) -> list:
    return [part for one in state for part in flat(one)] if isinstance(state, (tuple, list)) else [state]


def test_a_checkpoint_midway(small, roomy):
    """Whoever speculates asks the lane for its caches, and finds rows that are not replayed."""

    def try_tokens(engine: Any) -> None:
        (batch,) = engine._executor.lanes.batches()
        caches, (session,) = batch.caches, batch.sessions
        for cache in caches:
            cache.checkpoint()
        engine.loaded.model(mx.array([[1, 2, 3]]), caches, Rows.single(session.fed), logits=None)
        for cache in caches:
            cache.rollback()

    both(small, {0: submit(("a", 1, {"max_tokens": 10})), 6: try_tokens, 8: try_tokens}, at_least=4)


# -- what fails --------------------------------------------------------------------------------------------------------


class Failing(Pinned):
    """Fails when it is asked for something for the n-th time, and from then on if told so."""

    def __init__(self, name: str, at: int, lasting: bool = False):
        super().__init__()
        self.name, self.at, self.lasting, self.calls = name, at, lasting, Counter()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name != super().__getattribute__("__dict__").get("name"):
            return found

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            if self.calls[name] == self.at or (self.lasting and self.calls[name] > self.at):
                raise RuntimeError(f"{name} failed: no such device")
            return found(*arguments)

        return call


TWO = {
    0: submit(("a", 1, {"max_tokens": 9}), ("b", 2, {**DRAWN, "max_tokens": 11})),
    16: submit(("c", 3, {"max_tokens": 7})),
}


@pytest.fixture(scope="module")
def without_replays(small):
    with pytest.MonkeyPatch.context() as patched, use_target("reference"):
        with_room(patched)
        return play(small, TWO, replay=False)


@pytest.mark.parametrize(("name", "at"), [("prepare", 1), ("launch", 1), ("copy", 2)])
def test_a_machine_that_fails_while_recording_costs_no_row(small, roomy, without_replays, name, at):
    plain = without_replays
    replayed = play(small, TWO, replay=Failing(name, at))
    compare(plain, replayed)
    assert list(replayed.replays.refused.values()) == [f"RuntimeError: {name} failed: no such device"]


@pytest.mark.parametrize(
    ("name", "at", "lasting"),
    [
        ("launch", 5, False),
        ("read", 4, True),
        ("copies", 2, False),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in (("launch", 5, True), ("read", 4, False))),
    ],
)
def test_a_machine_that_fails_while_replaying_ends_the_rows_of_the_step(small, without_replays, name, at, lasting):
    plain = without_replays
    machine = Failing(name, at, lasting)
    replayed = play(small, TWO, replay=machine)
    failed = {id for id, (code, _) in replayed.errors.items() if code == "step_failed"}
    assert {"b"} <= failed <= {"a", "b"}
    for id, tokens in plain.tokens.items():
        mine = replayed.tokens.get(id, [])
        assert mine == tokens[: len(mine)]
    assert replayed.ends["c"] == plain.ends["c"]
    assert replayed.tokens["c"] == plain.tokens["c"], "the engine goes on"
    assert replayed.engine.cache_bytes == replayed.replays.nbytes
    assert not replayed.engine._executor.sessions()


def test_rows_that_cannot_come_back_end_and_are_never_decoded_from_what_is_stale(small, without_replays):
    """One is taken out in the middle: it fails with its neighbour, whose caches are as old; and nobody else does."""
    events = []

    def out(engine: Any) -> None:
        assert engine._executor.pause(engine._register.live["a"], events) is None
        engine._delivery.tell(events)

    replayed = play(small, {0: TWO[0], 7: out, 16: TWO[16]}, replay=Failing("copies", 2))
    assert {session.id for session, _ in events} == {"a", "b"}
    assert {code for code, _ in replayed.errors.values()} == {"step_failed"}
    assert replayed.tokens["c"] == without_replays.tokens["c"]
    for name in ("a", "b"):
        assert replayed.tokens[name] == without_replays.tokens[name][: len(replayed.tokens[name])]
    assert not replayed.engine._executor.sessions()


def test_rows_that_could_not_come_back_for_a_prompt_end_alone(small, roomy):
    """What they would decode from is stale; the prompt goes on."""
    script = {
        0: submit(("a", 1, {"max_tokens": 30}), ("b", 2, {**DRAWN, "max_tokens": 30})),
        7: submit(("c", 3, {"length": 20, "max_tokens": 7})),
    }
    plain = play(small, script, replay=False, **PAGED)
    replayed = play(small, script, replay=Failing("copies", 2), **PAGED)
    assert {name: code for name, (code, _) in replayed.errors.items()} == {"a": "step_failed", "b": "step_failed"}
    for name in ("a", "b"):
        assert replayed.tokens[name] == plain.tokens[name][: len(replayed.tokens[name])]
    assert replayed.tokens["c"] == plain.tokens["c"]
    assert not replayed.engine.paged.faults()
    assert replayed.engine.paged.used == 0


def test_who_asks_for_stale_caches_again_is_refused_again(small):
    replays, sampler = (
        replaying.Replays(small.model, Failing("copies", 2), patience=0),
        RowSampler(SamplingParams(**GREEDY), 0),
    )
    caches, replay = small.model.make_caches(), None
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    while replay is None:
        replay = replays.open((0,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100)
    replay.launch()
    with pytest.raises(RuntimeError, match="copies failed"):
        replay.close()
    for again in (replay.close, replay.launch):
        with pytest.raises(RuntimeError, match="the machine failed while these rows were replayed"):
            again()
    replay.discard()
    assert replays.open((1,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100) is None


def test_a_batch_that_could_not_come_back_gives_nobody_its_caches(small):
    engine = labkit.Engine(small, replay=Failing("copies", 2))
    engine.submit(request(engine, "a", 1, max_tokens=20))
    while engine.replays.unused:
        engine.step()
    (batch,) = engine._executor.lanes.batches()
    (([lost], error),) = engine._executor.lanes.come_back()
    assert (lost.id, str(error)) == ("a", "copies failed: no such device")
    with pytest.raises(RuntimeError, match="what their caches hold is older"):
        _ = batch.caches
    assert [event.reason for event in engine.run() if event.kind == "finished"] == ["error"]


def test_under_pressure_on_a_machine_that_has_failed_the_engine_goes_on(small, tmp_path):
    gib = 1 << 30
    meter = FakeMeter(gib)
    options = {
        "guard": MemoryGuard(gib, meter=meter, interval=0, min_chunk=2),
        "policy": Policy(patience=0, calm_polls=0),
        "prefixes": PrefixStore(small, width=8),
    }

    def press(engine: Any) -> None:
        meter.live = int(0.97 * gib)

    def relax(engine: Any) -> None:
        meter.live = 0

    script = {0: TWO[0], 7: press, 10: relax, 16: TWO[16]}
    replayed = play(small, script, replay=Failing("read", 2, lasting=True), **options)
    assert {replayed.errors[name][0] for name in ("a", "b")} == {"step_failed"}
    assert replayed.ends["c"][0] == "length"
    assert not replayed.engine._executor.sessions()


def test_a_machine_that_failed_is_left_alone(small):
    machine = Failing("launch", 4)
    replayed = play(small, {0: submit(("a", 1)), 12: submit(("b", 2))}, replay=machine)
    assert set(replayed.errors) == {"a"}
    assert list(replayed.replays.refused.values()) == ["RuntimeError: launch failed: no such device"]
    assert machine.calls == {"launch": 4}


# -- memory ------------------------------------------------------------------------------------------------------------


def test_nothing_of_rows_that_ended_is_held(small, monkeypatch):
    """Keys, values and states go with their rows, whether they ended by themselves or were cancelled."""
    little = 64 << 10
    engine = labkit.Engine(small, replay=HOST, max_rows=4)
    before = settled_memory()
    for round, ends in enumerate(("length", "cancelled")):
        engine.submit(request(engine, f"a{round}", round, length=400))
        while (
            engine._executor.lanes.replays._opened_last() is None
            or engine._executor.lanes.replays._opened_last().closed
        ):
            engine.step()
        assert mx.get_active_memory() - before > 400 * 2 * 2 * 64 * 4, "keys and values of 400 tokens"
        if ends == "cancelled":
            engine.cancel(f"a{round}")
        list(engine.run())
        recording = engine._executor.lanes.replays.nbytes
        assert recording > 0
        assert falls_to(before + recording + little, seconds=20), mx.get_active_memory() - before - recording
    monkeypatch.setattr(replaying, "KEPT", 0)
    engine.submit(request(engine, "last", 5))
    list(engine.run())
    assert engine._executor.lanes.replays.nbytes == 0 == engine.cache_bytes
    assert falls_to(before + little, seconds=20), mx.get_active_memory() - before


def test_states_that_rows_began_with_are_not_held_while_they_are_replayed(small, monkeypatch):
    """Nobody needs them: what they decode with is the recording's. Both when it is made and when it is there."""
    began, decode_step = [], small.model.decode_step

    def watching(*arguments):
        step = decode_step(*arguments)
        began[:] = [weakref.ref(array) for array in step.memory]
        return step

    monkeypatch.setattr(small.model, "decode_step", watching, raising=False)
    replays, sampler = replaying.Replays(small.model, HOST, patience=0), RowSampler(SamplingParams(**GREEDY), 0)
    for name in (1, 2):
        caches = small.model.make_caches()
        small.model(mx.array([prompt(name, 8)]), caches, Rows.single(0), logits=None)
        replay = None
        while replay is None:
            replay = replays.open((name,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100)
        gc.collect()
        assert [one() for one in began] == [None] * 4, "a layer's convolution and state, another's tail"
        replay.discard()
    assert replays.recorded == 1


def test_recordings_go_with_their_engine(small):
    told = play(small, {0: submit(("a", 1))}, replay=HOST)
    gone = weakref.ref(told.replays._recording)
    del told
    gc.collect()
    assert gone() is None


@pytest.fixture(scope="module")
def recorded_bytes(small):
    """Of one row's recording."""
    with pytest.MonkeyPatch.context() as patched, use_target("reference"):
        with_room(patched)
        patience(patched, 2)
        told = play(small, {0: submit(("a", 1, {"max_tokens": 40}))}, replay=HOST)
    return told.replays.nbytes


def test_bytes_of_a_recording_are_counted_once(small, roomy):
    def look(engine: Any) -> None:
        (batch,) = engine._executor.lanes.batches()
        assert batch._replay is not None
        buffers = sum(c._keys.nbytes + c._values.nbytes for c in batch._caches if c.kind == "contiguous")
        assert engine.cache_bytes == buffers + engine.replays.nbytes, "states and tails lie in the recording"

    play(small, {0: submit(("a", 1, {"max_tokens": 12})), 8: look}, replay=HOST)


def test_rows_that_are_replayed_take_no_more_than_was_projected(small):
    """Room in the buffers for what the longest row may come to have, not for what another one wants behind it."""
    found = []

    def look(engine: Any) -> None:
        sessions = engine._executor.sessions()
        buffers = engine.cache_bytes - engine.replays.nbytes
        found.append((buffers, engine._admission.projected([session.total for session in sessions])))

    first = submit(("long", 1, {"length": 240, "max_tokens": 12}), ("other", 2, {"max_tokens": 100}))
    script = {0: first} | dict.fromkeys(range(6, 12), look) | {12: lambda engine: engine.cancel("other")}
    replayed = play(small, script, replay=HOST)
    assert replayed.replayed >= 4
    assert all(0 < buffers <= projected for buffers, projected in found), found


def test_no_recording_takes_what_those_who_started_may_come_to_need(small, roomy, recorded_bytes):
    """Its rows decode by MLX, and ask again."""
    script = {0: submit(("a", 1, {"max_tokens": 14}))}
    plain = play(small, script, replay=False)
    mine = small.weights_bytes + plain.engine._admission.projected([20])
    for spare, recorded in ((recorded_bytes // 2, 0), (4 * recorded_bytes, 1)):
        replayed = play(small, script, replay=HOST, capacity_bytes=mine + spare)
        compare(plain, replayed)
        assert (replayed.replays.recorded, replayed.replayed > 4) == (recorded, bool(recorded))
        assert not replayed.replays.refused


def test_a_recording_goes_for_who_starts(small, roomy, recorded_bytes):
    tokens = 1500
    row = labkit.Engine(small)._admission.projected([6 + tokens])
    assert row > 4 * recorded_bytes, "beside one row there is room"
    held, long = {}, {"max_tokens": tokens}

    def look(engine: Any) -> None:
        held.setdefault(engine, []).append((len(engine._executor.sessions()), engine.replays.nbytes))

    script = {0: submit(("a", 1, long)), 9: submit(("b", 2, long))} | dict.fromkeys((8, *range(10, 24)), look)
    script[24] = lambda engine: (engine.cancel("a"), engine.cancel("b"))
    options = {"capacity_bytes": small.weights_bytes + 2 * row + recorded_bytes // 2}
    _, replayed = both(small, script, at_least=4, **options)
    (alone, *beside) = held[replayed.engine]
    assert alone == (1, recorded_bytes)
    assert set(beside) == {(2, 0)}
    assert replayed.replays.recorded == 1


def test_rows_take_a_recordings_arrays_when_it_goes(small, roomy):
    """Nothing is copied where memory is short; and they decode on."""
    caches = small.model.make_caches()
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    stream = DirectRow(small.model, caches, 8).tokens(3)
    wanted = [next(stream) for _ in range(8)]
    caches, machine = small.model.make_caches(), Failing("copies", 1000)
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    replays, sampler = replaying.Replays(small.model, machine, patience=0), RowSampler(SamplingParams(**GREEDY), 0)
    replay = None
    while replay is None:
        replay = replays.open((0,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100)
    for _ in range(4):
        replay.launch()
    copied, gone = machine.calls["copies"], weakref.ref(replays._recording)
    replays.spare()
    assert replays.nbytes == 0
    assert replay.close().token.tolist() == wanted[3:4]
    assert machine.calls["copies"] == copied
    del replay
    gc.collect()
    assert gone() is None
    stream = DirectRow(small.model, caches, 12).tokens(wanted[3])
    assert [next(stream) for _ in range(4)] == wanted[4:]


class Following(FakeMeter):
    """Finds what it is told, and the recording."""

    engine: Any = None
    base = 0

    def read(self):
        self.live = self.base + (0 if self.engine is None else self.engine.replays.nbytes)
        return super().read()


def guarded(small: Any, ceiling: int) -> tuple[Any, Following]:
    meter = Following(ceiling)
    guard = MemoryGuard(ceiling, meter=meter, interval=0, min_chunk=2)
    policy = Policy(patience=0, calm_polls=0)
    meter.engine = labkit.Engine(small, replay=HOST, guard=guard, policy=policy, prefixes=PrefixStore(small, width=8))
    return meter.engine, meter


@pytest.mark.parametrize("where", ["beyond", "before"])
def test_at_the_hard_line_a_recording_goes_before_anybody_is_put_aside(small, roomy, recorded_bytes, where):
    """Before the line, where what its rows would take when they come back does not fit below it."""
    engine, meter = guarded(small, 200 * recorded_bytes)
    told = Told(engine)
    for name, seed in (("a", 1), ("b", 2)):
        engine.submit(request(engine, name, seed, max_tokens=30))
    while not engine.replays.nbytes:
        hear(told, engine.step())
    assert engine.memory()["recording_bytes"] == engine.replays.nbytes
    short = engine.replays.nbytes // 2 if where == "beyond" else engine.replays.nbytes + engine.replays.owed // 2
    meter.base = 190 * recorded_bytes - short
    hear(told, engine.step())
    assert engine.replays.nbytes == 0
    assert engine.memory()["level"] == "soft", "without it memory is below the hard line"
    for _ in range(8):
        hear(told, engine.step())
        assert engine.replays.nbytes == 0, "none is made beyond the soft line"
    meter.base = 0
    while not engine.idle:
        hear(told, engine.step())
    assert engine.replays.recorded == 2
    assert told.kinds == {"submitted", "prefill", "token", "finished"}, "nobody was"
    plain = play(small, {0: submit(("a", 1, {"max_tokens": 30}), ("b", 2, {"max_tokens": 30}))}, replay=False)
    assert told.tokens == plain.tokens


def test_at_the_soft_line_a_recording_goes_where_somebody_waits(small, roomy, recorded_bytes):
    engine, meter = guarded(small, 200 * recorded_bytes)
    engine.submit(request(engine, "a", 1, max_tokens=60))
    while not engine.replays.nbytes:
        engine.step()
    meter.base = 170 * recorded_bytes
    for _ in range(3):
        engine.step()
    assert engine.memory()["level"] == "soft"
    assert engine.replays.nbytes > 0, "nobody does"
    engine.submit(request(engine, "b", 2, max_tokens=4))
    for _ in range(2):
        engine.step()
    assert engine.replays.nbytes == 0
    meter.base = 0
    list(engine.run())


def test_who_comes_in_finds_a_recordings_memory_free(small, roomy, recorded_bytes):
    """It needs what the recording takes, and gets it."""
    long = {"length": 6, "max_tokens": 2000}
    engine, meter = guarded(small, 1 << 30)
    need = engine._parking._hands._estimates.need(6, 2000, chunk=8)
    engine, meter = guarded(small, 12 * need)
    engine.submit(request(engine, "a", 1, max_tokens=200))
    while not engine.replays.nbytes:
        engine.step()
    engine.submit(request(engine, "b", 2, **long))
    free = engine._parking._hands.room("b")
    meter.base = engine.guard.capacity_bytes - free.prompts - engine.replays.nbytes // 2
    engine.step()
    assert engine.memory()["requests"] == {"decoding": 1, "prefilling": 1}
    assert engine.replays.nbytes == 0
    assert engine.guard.level == "normal", "it was not the lines"
    engine.close()


# -- several engines and threads ---------------------------------------------------------------------------------------


def test_two_engines_on_one_model_and_one_machine(small):
    plain = [play(small, {0: submit(("a", seed, DRAWN))}, replay=False) for seed in (1, 2)]
    engines = [labkit.Engine(small, replay=HOST) for _ in plain]
    told = [Told(engine) for engine in engines]
    for seed, engine in enumerate(engines, 1):
        engine.submit(request(engine, "a", seed, **DRAWN))
    while not all(engine.idle for engine in engines):
        for one, engine in zip(told, engines, strict=True):
            hear(one, engine.step())
    assert [one.tokens for one in told] == [one.tokens for one in plain]
    assert all(one.replays.recorded == 1 for one in told)


def test_in_the_engines_own_thread(small, monkeypatch):
    work = worker._work

    def on_reference(*arguments):
        with use_target("reference"):
            work(*arguments)

    monkeypatch.setattr(worker, "_work", on_reference)
    wanted = play(small, {0: submit(("a", 1, DRAWN))}, replay=False).tokens["a"]
    engine = labkit.Engine(small, replay=HOST)

    async def read() -> list[int]:
        params = SamplingParams(max_tokens=8, ignore_eos=True, seed=1, **DRAWN)
        stream = engine.astream(prompt(1, 6), params)
        return [event.token async for event in stream if event.kind == "token"]

    assert asyncio.run(read()) == wanted
    assert engine._executor.lanes.replays.recorded == 1
    engine.close()


# -- who is replayed, and when -----------------------------------------------------------------------------------------


def test_rows_wait_until_they_have_stayed_together(small, monkeypatch):
    monkeypatch.setattr(replaying, "QUIET", 2)
    patience(monkeypatch, 5)
    begun = []
    opened = replaying.Replays.open

    def opening(self, *arguments):
        found = opened(self, *arguments)
        begun.append(found is not None)
        return found

    monkeypatch.setattr(replaying.Replays, "open", opening)
    play(small, {0: submit(("a", 1))}, replay=HOST)
    assert begun == [False] * 5 + [True], "its form was not known"
    begun.clear()
    told = play(small, {0: submit(("a", 1)), 12: submit(("b", 2))}, replay=HOST)
    assert begun == [False] * 5 + [True] + [False] * 2 + [True]
    assert told.replays.recorded == 1


def test_rows_that_come_and_go_are_not_made_ready(small, monkeypatch):
    """Room in the buffers, the step as a function: only for rows that are about to be replayed."""
    patience(monkeypatch, 30)
    asked, decode_step = [], small.model.decode_step
    monkeypatch.setattr(
        small.model, "decode_step", lambda *a: (asked.append(len(a[2])), decode_step(*a))[1], raising=False
    )
    play(small, {0: submit(("a", 1)), 5: submit(("b", 2, {"max_tokens": 4}))}, replay=HOST)
    assert not asked, "no recording is there"
    patience(monkeypatch, 4)
    told = play(small, {0: submit(("a", 1, {"max_tokens": 20})), 8: submit(("b", 2, {"max_tokens": 4}))}, replay=HOST)
    assert set(asked) == {1}, "the recording is of one row"
    assert told.replays.recorded == 1


def test_rows_about_to_end_are_not_replayed(small, monkeypatch):
    monkeypatch.setattr(replaying, "FEWEST", 8)
    told = play(small, {0: submit(("a", 1, {"max_tokens": 9}))}, replay=HOST)
    assert (told.replayed, told.replays.recorded) == (0, 0)


@pytest.mark.nightly
def test_a_direct_row(small, roomy):
    def tokens(replays):
        caches = small.model.make_caches()
        small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
        stream = DirectRow(small.model, caches, 8, replays).tokens(3)
        return [next(stream) for _ in range(12)]

    replays = replaying.Replays(small.model, HOST)
    assert tokens(replays) == tokens(None)
    assert replays.recorded == 1


def test_tokens_may_be_read_as_late_as_one_likes(small):
    """And after the rows have come back."""
    caches = small.model.make_caches()
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    stream = DirectRow(small.model, caches, 8).tokens(3)
    wanted = [next(stream) for _ in range(6)]
    caches = small.model.make_caches()
    small.model(mx.array([prompt(1, 8)]), caches, Rows.single(0), logits=None)
    replays, sampler = replaying.Replays(small.model, HOST, patience=0), RowSampler(SamplingParams(**GREEDY), 0)
    replay = None
    while replay is None:
        replay = replays.open((0,), caches, [sampler], [8], [0], mx.array([3], dtype=mx.uint32), 100)
    choices = [replay.launch() for _ in range(6)]
    assert replay.close().token.tolist() == wanted[-1:]
    assert [token for choice in choices for token in choice.token.tolist()] == wanted


# -- at random ---------------------------------------------------------------------------------------------------------

CHOICES = [
    *[GREEDY, DRAWN, {"temperature": 1.3, "min_p": 0.05}, {"temperature": 0.8, "top_k": 5}] * 3,
    {"temperature": 0.7, "repetition_penalty": 1.2}, {"logprobs": 1},
]  # fmt: skip


def random_script(seed: int, requests: int) -> Script:
    draw, acts, at = random.Random(seed), {}, 0
    answers = [1, 4, 9, 20, 35] if requests > 10 else [2, 9, 12]

    def add(step: int, act: Callable) -> None:
        before = acts.get(step)
        acts[step] = act if before is None else lambda engine: (before(engine), act(engine))

    for index in range(requests):
        name, options = f"r{index}", dict(draw.choice(CHOICES))
        options |= {"max_tokens": draw.choice(answers), "length": draw.choice([1, 3, 9, 30, 70])}
        add(at, submit((name, seed * 1000 + index, options)))
        if draw.random() < 0.25:
            add(at + draw.randrange(1, 25), lambda engine, name=name: engine.cancel(name))
        at += draw.choice([0, 0, 1, 6, 12])
    return acts


def random_run(small: Any, seed: int, requests: int) -> Told:
    script = random_script(seed, requests)
    plain, replayed = both(small, script, at_least=requests // 2, max_rows=4)
    assert len(plain.ends) == requests
    assert not replayed.replays.refused
    return replayed


def test_at_random(small, roomy):
    random_run(small, seed=2, requests=5)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(6))
def test_at_random_for_long(small, roomy, seed):
    random_run(small, seed=10 + seed, requests=50)

"""Engines that decode with a recording and without, and what their requests were told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

import labkit
from labkit.caches import contiguous, paged_rows, tail
from labkit.engine import SamplingParams, lanes
from labkit.engine import replay as replaying
from labkit.kernels.recording.on_host import OnHost
from labkit.models.hybrid import Hybrid, Variants, recordable
from tests.engine.test_batching import prompt
from tests.models.hybrid.small import config, random_module
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


HOST = Pinned()
PAGED = {"kv": "paged", "pool_bytes": 1 << 24, "block_tokens": 8}
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def of_two_layers(tmp_path_factory, text: dict) -> labkit.LoadedModel:
    """The specialised hybrid of two layers, one of each kind, behind the tiny models' tokenizer."""
    settings = config(text, vocab_size=VOCABULARY, num_hidden_layers=2)
    # As recorded steps compute: by labkit's launches alone, which nothing fuses.
    model = Hybrid.from_module(random_module(settings), settings, variants=Variants(compiled=False, decode_rows="own"))
    loaded = labkit.load(write_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama"))
    return replace(loaded, model=model, weights_bytes=model.weights_bytes, name="small")


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

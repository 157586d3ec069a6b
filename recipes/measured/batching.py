"""Many rows at once on this machine: labkit's engine against mlx-lm's batch generator, by turns, point by point.

    python -m recipes.measured.batching --out data/measured --commit $(git rev-parse --short HEAD) --seconds 400
    python -m recipes.measured.batching --out data/measured --commit $(git rev-parse --short HEAD) --seconds 560 \\
        --name cpu --model tiny-hybrid --graph auto --context 128 --answer 12 --rounds 5    # on a CPU, ten minutes

At the full shape weights are random, of Qwen3.6-35B-A3B, 4 bits in groups of 64; `--model tiny-hybrid` runs the shipped
model. On a CPU a third side joins: labkit's engine on mlx-lm's own graph, so that engine and graph can be told apart.
There a point of many rows takes fewer rounds, two at least, and a side that is quick runs several times a round.
The points come in the order of their worth, each is written as soon as it is measured, and none begins after
`--seconds`; the same command at the same commit goes on with those that are missing. A part that fails is reported,
and the next one begins.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

import labkit
from labkit.devices import this_device
from labkit.measure import floors
from labkit.measure.batching import BatchGeneratorSide, EngineSide, Point, Workload, host_cost, sweep_point
from labkit.measure.batching.sides import Contexts, Side
from labkit.measure.end_to_end.fair_line import own_deltanet
from labkit.measure.end_to_end.sides import FAIR, RELEASED
from labkit.measure.end_to_end.subject import Subject, open_subject
from labkit.models import LoadedModel
from recipes.measured.table import Table

SHAPE = "qwen3.6-35b-a3b"
TURN, POINT = 0.3, 15.0
"""On a CPU: seconds of a side's turn at least, and of a point, after two rounds, at most."""
ORDER = {"cpu": ((1, 8), (4, 2, 16, 32)), "gpu": ((8, 1, 32), (16, 4, 2))}  # of rows: first, and later


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--model", default=SHAPE, help="a shape of data/configs, or a model")
    parser.add_argument("--graph", default="specialised")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to try the script")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--answer", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--name", default="h200", help="prefix of the file")
    arguments = parser.parse_args()
    Sweep(arguments).all()


class Sweep:
    """One run: what has been measured so far is in the table's file after every point."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.notes = arguments, {}
        path = arguments.out / f"{arguments.name}_batching.json"
        self.table = Table(path, arguments.commit, seconds=arguments.seconds, conditions=self.notes)
        self.table.rows = self.kept()
        self.warm: set[str] = set()

    def kept(self) -> list[dict[str, Any]]:
        """Points that an earlier run at this commit has measured."""
        known = json.loads(self.table.path.read_text()) if self.table.path.is_file() else {}
        same = known.get("commit") == self.arguments.commit and known["conditions"].get("model") == self.arguments.model
        return [row for row in known["rows"] if "point" in row] if same else []

    def all(self) -> None:
        """Every part, in order."""
        for part in (self.prepare, self.host, self.points):
            self.table.attempt(part.__name__, part)
        self.table.say(f"table: {self.table.path.name}, {len(self.table.rows)} rows")

    def prepare(self) -> None:
        """The model on both sides, and this device's read rate."""
        a = self.arguments
        layers = {} if a.layers is None else {"layers": a.layers}
        self.subject = open_subject(a.model, graph=a.graph, **layers)
        loaded = as_loaded(self.subject)
        contexts = Contexts(self.subject.model.layouts)
        self.ours = EngineSide(loaded, contexts)
        known = self.subject.model.vocab_size
        self.fair = BatchGeneratorSide(self.subject.module, contexts, FAIR, vocabulary=known, context=own_deltanet)
        self.released = BatchGeneratorSide(self.subject.module, contexts, RELEASED, vocabulary=known)
        self.against = [self.released] if self.on_cpu else [self.fair]
        if self.on_cpu:
            same = as_loaded(open_subject(a.model, graph="adapter"))
            self.against.append(EngineSide(same, contexts, "labkit, mlx-lm's graph"))
        self.rates = rates = floors.measure()
        read, computed = rates.read.value, rates.matmul.value
        self.notes |= {"model": a.model, "graph": self.subject.graph, "weights_bytes": self.subject.weights_bytes}
        self.table.rows.append({"name": "rates", "read_bytes_a_second": read, "operations_a_second": computed})
        self.table.say(f"{a.model}, {self.subject.graph} graph, {read / 1e9:.1f} GB/s, {computed / 1e9:.0f} GFLOP/s")

    @property
    def on_cpu(self) -> bool:
        """Whether rows cost nearly as much as steps here."""
        return this_device().kind == "cpu"

    def host(self) -> None:
        """What a step costs the host."""
        for rows in (1, 8, 32):
            for options in ({}, {"temperature": 0.8, "top_p": 0.95}):
                cost = host_cost(self.ours.loaded, rows, steps=100, **options)
                kind = "sampled" if options else "greedy"
                row = {"name": "host cost of a step", "choice": kind, **asdict(cost), "engine": cost.engine}
                self.table.rows.append(row)
                self.table.say(f"host, B={rows}, {kind}: {cost.engine * 1e6:.0f} us of {cost.step * 1e6:.0f} us")

    def points(self) -> None:
        """Points in the order of their worth, until time is up."""
        done = {row["point"] for row in self.table.rows if "point" in row}
        for name, make in self.plan():
            if name in done:
                continue
            if self.table.left < 0:
                self.notes.setdefault("left out for lack of time", []).append(name)
                continue
            self.table.attempt(name, lambda name=name, make=make: self.point(name, *make()))
            mx.clear_cache()

    def plan(self) -> Iterator[tuple[str, Callable[[], tuple[Workload, list[Side], int]]]]:
        """What is measured: name -> workload, sides, rounds."""
        a, both = self.arguments, [self.ours, *self.against]
        first, later = ORDER["cpu" if self.on_cpu else "gpu"]

        def point(name: str, workload: Workload, sides: list[Side] = both, rounds: int = a.rounds) -> tuple:
            return f"{name} B={workload.rows}", lambda: (workload, sides, rounds)

        def answer(rows: int) -> int:
            # On a CPU a step of many rows takes most of a second on mlx-lm's graph.
            return a.answer if rows <= 8 or not self.on_cpu else max(2 * a.answer // 3, 6)

        def equal(rows: int) -> Workload:
            return Workload.equal(rows, a.context, answer(rows))

        def unequal(rows: int) -> Workload:
            return Workload.unequal(rows, 4 * a.context, answer(rows))

        def prompts(rows: int) -> Workload:
            return Workload.equal(rows, a.context // 2, a.answer, prefilled=False)

        yield from (point("equal", equal(rows)) for rows in first)
        yield point("unequal", unequal(8))
        yield from (point("equal", equal(rows)) for rows in later)
        for rows in first:
            yield point("prompts", prompts(rows), both[:2], 2)
        if self.fair in self.against:
            short = replace(equal(8), answer=min(a.answer, 32))
            yield point("as released", short, [self.ours, self.released], 2)
        yield from (point("sampled", equal(rows).sampled()) for rows in (8, 32))
        yield from (point("unequal", unequal(rows)) for rows in later)
        for rows in later:
            # The longest of all on a CPU.
            yield point("prompts", prompts(rows), both[:2], 1 if self.on_cpu and rows > 8 else 2)
        yield point("unequal prompts", Workload.unequal(8, 2 * a.context, a.answer, prefilled=False), both[:2], 2)

    def point(self, name: str, workload: Workload, sides: list[Side], rounds: int) -> None:
        """Measure one, after a warm-up of each side that needs one."""
        for side in sides:
            self.warm_up(side, workload)
        limits = {"turn": TURN, "seconds": POINT} if self.on_cpu else {}
        point = sweep_point(sides, workload, rounds=rounds, costs=self.subject.costs, rates=self.rates, **limits)
        self.table.rows += [{"point": name, **row} for row in point.as_rows()]
        for recorded in (side.recorded for side in sides if isinstance(side, EngineSide) and side.recorded):
            self.table.rows.append({"name": f"recordings of {name}", **recorded})
            self.table.say(f"recorded: {recorded}")
        told = ", ".join(f"{side.name} {self._figures(point, side)}" for side in sides)
        ratios = ["{:.2f} ({:.2f}-{:.2f})".format(*point.ratio(sides[0].name, side.name)) for side in sides[1:]]
        floor = f"floor {point.floor:.0f} tok/s, load {point.load:.1f}"
        self.table.say(f"{name}: {told}; ratios {', '.join(ratios)}; {floor}")

    def warm_up(self, side: Side, workload: Workload) -> None:
        """Short runs before a side's first turn, which compile and load what is new. On a GPU every point has new
        kernels; on a CPU only a side's first point does, and its runs fill a turn, with caches and threads."""
        if self.on_cpu and side.name in self.warm:
            return
        self.warm.add(side.name)
        begin, short = time.perf_counter(), replace(workload, answer=6)
        side.run(short)
        while self.on_cpu and time.perf_counter() - begin < TURN:
            side.run(short)

    def _figures(self, point: Point, side: Side) -> str:
        median = lambda what: point.median(side.name, what)
        gaps = f"gap {median('gap_median') * 1e3:.2f} ms, worst {median('gap_worst') * 1e3:.2f}"
        rest = f"first {median('first_mean'):.3f} s, peak {median('peak_bytes') / 1e9:.2f} GB"
        return f"{median('throughput'):.0f} tok/s ({median('processor') * 1e3:.2f} ms of processor, {gaps}, {rest})"


def as_loaded(subject: Subject) -> LoadedModel:
    """A subject as an engine takes it. Random weights speak with tiny-hybrid's tokenizer: ids are valid, texts mean
    nothing."""
    named = subject.name if not subject.name.startswith("qwen") else "tiny-hybrid"
    tokenizer = labkit.load(named, graph="adapter").tokenizer
    return LoadedModel(
        subject.model, tokenizer, subject.config, Path(subject.name), subject.name, subject.weights_bytes
    )


if __name__ == "__main__":
    main()

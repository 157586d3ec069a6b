"""Whole engines on this machine's GPU at the full shape: labkit's graph against mlx-lm's, then ablations.

    python -m recipes.measured.end_to_end --out data/measured --commit $(git rev-parse --short HEAD) --seconds 600

Weights are random, of Qwen3.6-35B-A3B's shape, 4 bits in groups of 64. The points come in the order of their worth,
each is written as soon as it is measured, and none begins after `--seconds`. Run again with the same `--out`, it goes
on where it was. A part that fails is reported, and the next one begins.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.measure import floors
from labkit.measure.end_to_end import LENGTHS, LabkitSide, Plan, Point, ablations, measure, sides_for, table
from labkit.measure.end_to_end.commands import conditions as subject_conditions
from labkit.measure.end_to_end.filled import Filled
from labkit.measure.end_to_end.parts import Parts
from labkit.measure.end_to_end.sides import FAIR, RELEASED, Side
from labkit.measure.end_to_end.subject import Subject, open_subject
from labkit.measure.trace import StepTrace, capture
from labkit.measure.trace.cuda_graph import read_graphs
from labkit.measure.trace.step import as_record
from labkit.models.hybrid import Variants
from recipes.measured.table import Table, shown

FIRST = (4096, 32768, 131072)
CHUNKS = (2048, 4096, 8192)
SKEW = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the table; parts go into a folder beside it")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--shape", default="qwen3.6-35b-a3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to try the script")
    parser.add_argument("--graph", default="specialised")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--parts", default="ABCDEFG", help="which parts: see PARTS below")
    parser.add_argument("--released", action="store_true", help="mlx-lm as released too, in one point: 4K decode")
    parser.add_argument("--fair-prefill", type=int, default=32768, help="the fair line reads no longer prompts")
    parser.add_argument("--largest", type=int, default=LENGTHS[-1], help="no longer prompt or context than this")
    parser.add_argument("--name", default="h200", help="prefix of the file")
    arguments = parser.parse_args()
    Run(arguments).all()


class Run:
    """One run: what has been measured so far is in the table's file after every part."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        path, seconds = arguments.out / f"{arguments.name}_end_to_end.json", arguments.seconds
        about = {name: getattr(arguments, name) for name in ("shape", "layers", "graph")}
        self.table = Table(path, arguments.commit, seconds=seconds, **about, variants=vars(Variants()))
        self.chunk: int | None = None

    def all(self) -> None:
        """Every part that was asked for."""
        self.subject = self._open(0.0)
        self.machine = ablations.Machine.measured(floors.measure(quick=True))
        floors_here = {
            "read_bytes_a_second": self.machine.floors.read.value,
            "matmul_operations_a_second": self.machine.floors.matmul.value,
            "wait_seconds": self.machine.wait,
            "launch_seconds": self.machine.launch,
        }
        self.table.about["floors"] = floors_here
        self.table.rows.append({"table": "machine", "name": "machine"} | floors_here)
        self.table.say(f"floors: {floors_here}")
        if self.arguments.parts != "O":
            self._warm_up()
        for letter, part in PARTS.items():
            if letter not in self.arguments.parts:
                continue
            self.table.say(f"== part {letter}: {part.__doc__}")
            self.table.attempt(letter, partial(part, self))
        self.table.say(f"table: {self.table.path.name}, {len(self.table.rows)} rows")

    def _warm_up(self) -> None:
        """Compile what both sides need, so that no point is charged for it."""
        tokens = mx.random.randint(0, self.subject.model.vocab_size, (min(2048, self.arguments.largest),))
        filled = Filled(self.subject.model.layouts, 64)
        for side in self._sides(Point("prefill", 2)):
            begin = time.perf_counter()
            try:
                side.decode(filled, 2, 1)
                side.prefill(tokens[: side.warm_up_tokens or tokens.size])
            except Exception:
                traceback.print_exc()
            self.table.say(f"  {side.name}: first use took {time.perf_counter() - begin:.0f} s")

    # -- parts ---------------------------------------------------------------------------------------------------------

    def decode_first(self) -> None:
        """decode at 4K, 32K and 128K"""
        self._points([Point("decode", n) for n in FIRST])

    def prefill_first(self) -> None:
        """prefill of 4K, 32K and 128K, in the best of three chunk sizes"""
        self._choose_chunk()
        self._points([Point("prefill", n) for n in FIRST], rounds=3)

    def ablations_even(self) -> None:
        """one mechanism off at a time, even routing"""
        self._ablate(self.subject, 0.0)

    def rest(self) -> None:
        """the other lengths"""
        self._points([Point("decode", n) for n in LENGTHS if n not in FIRST])
        self._points([Point("prefill", n) for n in LENGTHS if n not in FIRST], rounds=3)

    def trace(self) -> None:
        """one decode step counted"""
        for context in (4096, 131072):
            captured = capture(self.subject.model, context=context)
            trace = StepTrace.of(captured, self.subject.costs, copies_updates=True)
            counted = as_record(trace, self.subject.costs, context)
            self.table.rows.append({"table": "trace", "name": f"step at {context}", "context": context} | counted)
            self.table.say(
                f"trace at {context}: " + ", ".join(f"{k}={v}" for k, v in counted.items() if type(v) is not list)
            )

    def cuda_graphs(self) -> None:
        """the CUDA graphs of decode steps of eight layers, as MLX recorded them, in a process of its own"""
        target = (self.arguments.out / f"{self.arguments.name}_graphs.dot").resolve()
        target.unlink(missing_ok=True)
        command = [sys.executable, "-m", "recipes.measured.end_to_end", "--parts", "O", "--layers", "8"]
        command += ["--out", str(self.arguments.out), "--commit", self.arguments.commit, "--name", "one_step"]
        command += ["--shape", self.arguments.shape, "--graph", self.arguments.graph]
        found = os.environ | {"MLX_SAVE_CUDA_GRAPHS_DOT_FILE": str(target)}
        subprocess.run(command, env=found, timeout=150, check=False)
        if not target.is_file():
            self.table.say("  MLX wrote no graph")
            return
        self.table.say("  the file begins: " + repr(target.read_text(errors="replace")[:600]))
        for number, graph in enumerate(read_graphs(target)):
            row = {"table": "cuda_graph", "name": f"graph {number}", "layers": 8, "graph": number}
            row["launches"] = graph.launches
            row |= {"stages": graph.stages, "by_name": graph.by_name()[:40]}
            self.table.rows.append(row)
            self.table.say(f"  graph {number}: {graph.launches} launches, {graph.stages} stages")

    def one_step(self) -> None:
        """a few decode steps, for whoever records what they launch"""
        side = LabkitSide(self.subject.model)
        self.table.say(f"  {side.decode(Filled(self.subject.model.layouts, 4096), 2, 2)[0]:.4f} s a token")

    def ablations_skewed(self) -> None:
        """the same with skewed routing, and the engine's own speed there"""
        self.subject = None
        mx.clear_cache()
        skewed = self._open(SKEW)
        self._ablate(skewed, SKEW)
        self.subject = skewed
        self._points([Point("decode", 4096), Point("prefill", 4096)], rounds=3, skew=SKEW)

    def _choose_chunk(self) -> None:
        """Two prompts of 16K for each chunk size, the second timed."""
        tokens = mx.random.randint(0, self.subject.model.vocab_size, (min(16384, self.arguments.largest),))
        mx.eval(tokens)
        speeds: dict[int, float] = {}
        for chunk in CHUNKS:
            side = LabkitSide(self.subject.model, chunk=chunk)
            side.prefill(tokens)
            mx.reset_peak_memory()
            speeds[chunk] = tokens.size / side.prefill(tokens)
            row = {
                "table": "chunk",
                "name": f"chunks of {chunk}",
                "chunk": chunk,
                "tokens": tokens.size,
                "peak_bytes": mx.get_peak_memory(),
            }
            self.table.rows.append(row | {"tokens_per_second": speeds[chunk]})
            self.table.say(f"  chunk {chunk}: {speeds[chunk]:,.0f} tok/s, peak {mx.get_peak_memory() / 1e9:.2f} GB")
        self.chunk = max(speeds, key=speeds.get)
        self.table.about["chunks"] = {"tokens": tokens.size, "tokens_per_second": speeds, "chosen": self.chunk}

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _open(self, skew: float) -> Subject:
        begin = time.perf_counter()
        name, layers, graph = self.arguments.shape, self.arguments.layers, self.arguments.graph
        subject = open_subject(name, graph=graph, layers=layers, skew=skew)
        mx.eval(mx.zeros(1))
        self.table.say(
            f"{subject.name}, {subject.graph} graph, skew {skew:g}: {subject.weights_bytes / 1e9:.2f} GB a copy, "
            f"built in {time.perf_counter() - begin:.0f} s, {mx.get_active_memory() / 1e9:.1f} GB in use, "
            f"{mx.get_peak_memory() / 1e9:.1f} GB at the peak"
        )
        return subject

    @property
    def _left(self) -> float:
        return max(1.0, self.table.left)

    def _sides(self, point: Point) -> list[Side]:
        """Who takes part in a point: mlx-lm as released in one alone, its fair line where it is not too slow."""
        name = f"labkit, {self.subject.graph}"
        sides = sides_for(self.subject.module, self.subject.model, ["mlx-lm"], name=name, chunk=self.chunk)
        fair = any(side.name == FAIR for side in sides)
        released = not fair or (self.arguments.released and point == Point("decode", 4096))
        late = point.kind == "prefill" and point.length > self.arguments.fair_prefill
        return [s for s in sides if not (s.name == RELEASED and not released) and not (s.name == FAIR and late)]

    def _points(self, points: list[Point], rounds: int = 5, skew: float = 0.0) -> None:
        """One point at a time, so that one that fails (a side out of memory) costs no other."""
        for point in points:
            if point.length > self.arguments.largest:
                continue
            plan = Plan((point,), rounds=rounds, steps=32, seconds=self._left, point_seconds=30.0, once_above=3.0)
            parts = self._parts(f"points-skew-{skew:g}", plan)
            try:
                records = measure(
                    self._sides(point), self.subject.model, plan,
                    costs=self.subject.costs, floors=self.machine.floors, parts=parts, progress=self.table.say,
                )  # fmt: skip
            except Exception:
                traceback.print_exc()
                continue
            for record in records:
                name = f"{record['kind']} {record['length']}"
                self.table.rows.append({"table": "point", "name": name, "skew": skew} | record)
                self._show(record)
            self.table.write()

    def _ablate(self, subject: Subject, skew: float) -> None:
        plan = Plan((Point("decode", 2),), rounds=3, steps=24, point_seconds=8.0)
        for ablation in ablations.ABLATIONS:
            if self._left <= 1.0:
                self.table.say("the time is over")
                return
            chosen = [ablation]
            parts = self._parts("ablations", plan, fingerprint=False)
            try:
                records = ablations.run(
                    subject, self.machine, plan, chosen=chosen, skew=skew, parts=parts, seconds=self._left,
                    progress=self.table.say,
                )  # fmt: skip
            except Exception:
                traceback.print_exc()
                continue
            for record in records:
                self.table.rows.append({"table": "ablation"} | record)
                told = {k: v for k, v in record.items() if k not in ("saves", "base", "published")}
                self.table.say("  " + shown(told))
            self.table.write()

    def _parts(self, name: str, plan: Plan, fingerprint: bool = True) -> Parts:
        found = subject_conditions(self.subject) if fingerprint and self.subject else {"shape": self.arguments.shape}
        return Parts(
            self.arguments.out / f"{self.table.path.stem}_parts" / name, found | {"commit": self.arguments.commit}
        )

    def _show(self, record: dict[str, Any]) -> None:
        columns, rows = table.rows([record], record["kind"])
        for row in rows:
            self.table.say("  " + "  ".join(f"{c}={v}" for c, v in zip(columns, row, strict=True) if v is not None))
        for name, reason in record["failed"].items():
            self.table.say(f"  {name} failed: {reason}")


PARTS = {
    "A": Run.decode_first,
    "B": Run.prefill_first,
    "C": Run.rest,
    "D": Run.ablations_even,
    "E": Run.trace,
    "F": Run.ablations_skewed,
    "G": Run.cuda_graphs,
    "O": Run.one_step,
}


if __name__ == "__main__":
    main()

"""Parks and pauses below a real ceiling, what they cost, and what a guard costs that sees no pressure.

    python -m recipes.measured.parking --out data/measured --commit $(git rev-parse --short HEAD)               # a CPU
    python -m recipes.measured.parking --out OUT --commit SHA --shape qwen3.6-35b-a3b --width 2048 --name h200  # a GPU

Without `--shape` it is tiny-hybrid. Three prompts in the ratio 130 : 115 : 100 arrive half a second apart, as long as
`--seconds` let them be for every policy, at the rate of an engine that has compiled everything; all may begin below the
ceiling, and do not fit once they are there. The table is written after every part.

For pauses alone, `--parts pause --rounds 21`. With glibc, `MALLOC_TRIM_THRESHOLD_=1073741824` and
`MALLOC_MMAP_THRESHOLD_=1073741824` keep freed memory in the process: else either the engine or the bytes alone pay for
pages that are touched anew, as the heap happens to lie.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

import labkit
from labkit.engine import Event, Policy
from labkit.engine.capacity import Budget
from labkit.engine.memory import Estimates
from labkit.measure import parking, pausing
from labkit.measure.footprint import raised
from labkit.measure.guard_cost import guard_cost
from labkit.models import LoadedModel, Rows, synthetic
from labkit.models.hybrid import Hybrid
from recipes.measured.table import Table

RATIO = (130, 115, 100)
PARTS = ("estimates", "pressure", "pause", "idle")
POLICIES = {
    "none": None,
    "park": Policy(reserve="nothing"),
    "park, prompts reserved": Policy(),
    "single-victim": Policy("single-victim", reserve="nothing"),
    "abort-all": Policy("abort-all", reserve="nothing"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--shape", help="a shape of data/configs, with random weights")
    parser.add_argument("--graph", default="specialised", choices=["specialised", "adapter"], help="with --shape")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, to try the script")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--longest", type=int, default=130_000, help="tokens of the longest prompt at most")
    parser.add_argument("--answer", type=int, default=200)
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--blocks", type=int, default=1000, help="of four steps with and without the guard, at most")
    parser.add_argument("--rounds", type=int, default=5, help="of each row's pause and resume")
    parser.add_argument("--seconds", type=float, default=100.0, help="of measuring, once all is compiled")
    parser.add_argument("--name", default="cpu", help="prefix of the file")
    arguments = parser.parse_args()
    Run(arguments).all()


class Run:
    """One run: what has been measured so far is in the table's file after every part."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.table = Table(
            arguments.out / f"{arguments.name}_parking.json",
            arguments.commit,
            model=arguments.shape or "tiny-hybrid",
            layers=arguments.layers,
            width=arguments.width,
        )
        self.loaded = _model(arguments)
        self.table.about["graph"] = graph = type(self.loaded.model).__name__
        self.table.say(f"{self.loaded.name}, {graph}")

    def all(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            self.warm()
            self.begin = time.perf_counter()
            for name in self.arguments.parts:
                self.table.attempt(name, getattr(self, name))

    def left(self) -> float:
        """Seconds of measuring that are left."""
        return self.arguments.seconds - (time.perf_counter() - self.begin)

    def add(self, part: str, row: dict[str, Any]) -> None:
        """One more row, kept and shown."""
        self.table.add({"part": part, **row})
        self.table.say(f"{part} {row}")

    def idle(self) -> None:
        """What a guard costs while nothing happens."""
        for count in (1, 4):
            cost = guard_cost(self.loaded, rows=count, blocks=self.arguments.blocks, seconds=self.arguments.seconds / 4)
            self.add("idle", cost.as_record())

    def estimates(self) -> None:
        """What a chunk is said to take against what it took: of MLX's arrays, and of the process."""
        known = Estimates(self.loaded, Budget(self.loaded))
        width, model = self.arguments.width, self.loaded.model
        caches, start = model.make_caches(), 0
        for context in (0, 2 * width, 8 * width):
            while start < context:
                self._chunk(caches, start, width)
                start += width
            mx.clear_cache()
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            begin = time.perf_counter()
            process = raised(lambda at=start: self._chunk(caches, at, width))
            seconds, start = time.perf_counter() - begin, start + width
            grown = known.caches(context, width, chunk=width) - (known.caches(context, 0, chunk=1) if context else 0)
            row = {"context": context, "chunk": width, "peak_bytes": mx.get_peak_memory() - before}
            row |= {"process_bytes": process, "estimated_bytes": known.transient(width, context) + grown}
            self.add("estimates", row | {"seconds": seconds})

    def warm(self) -> None:
        """Compile what will run: chunks, and decode steps of one row to three. A second time it tells the rate: prompt
        tokens a second, with all that an engine does besides computing them, until they are on the disk."""
        width = self.arguments.width
        prompts = [2 * width + 1, 2 * width + 1, width + 1]
        for _ in range(2):
            begin = time.perf_counter()
            self._under_pressure(prompts, 8, ceiling_bytes=None, gap_seconds=0)
            seconds = time.perf_counter() - begin
            self.table.say(f"warm: {sum(prompts)} tokens in {seconds:.2f} s")
        self.rate = sum(prompts) / seconds
        self.table.about["engine_tokens_per_second"] = round(self.rate)

    def _under_pressure(self, prompts: list[int], answer: int, **options: Any) -> tuple[parking.Pressure, list[Event]]:
        """`parking.under_pressure` over a store that goes with it."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return parking.under_pressure(
                self.loaded, Path(folder) / "store", prompts, answer, width=self.arguments.width, **options
            )

    def _chunk(self, caches: list, start: int, width: int) -> None:
        tokens = mx.zeros((1, width), mx.int32) + 5
        self.loaded.model(tokens, caches, Rows.single(start), logits=None)
        mx.eval([cache.state for cache in caches])

    def pause(self) -> None:
        """A pause and its resume against the bytes that they move."""
        for blocks in (2, 8, 16):
            tokens = blocks * self.arguments.width
            if 4 * tokens / self.rate > self.left():
                break
            cost = pausing.pause_cost(
                self.loaded,
                self.folder / f"pause{blocks}",
                tokens,
                width=self.arguments.width,
                rounds=self.arguments.rounds,
            )
            self.add("pause", cost.as_record())

    def pressure(self) -> None:
        """Three prompts below a ceiling, once for each policy."""
        width, answer = self.arguments.width, self.arguments.answer
        # Prefills of all policies together take half of what is left; parts that follow need little.
        total = 0.4 * self.left() * self.rate / len(POLICIES)
        longest = int(min(self.arguments.longest, total * max(RATIO) / sum(RATIO)))
        # Whole chunks, and the token that is fed last: other widths would compile other kernels on the way.
        prompts = [max(4, longest * part // max(RATIO) // width) * width + 1 for part in RATIO]
        # The first must still be answering when the last is computed.
        answer = max(answer, 2 * sum(prompt // width + 1 for prompt in prompts[1:]))
        budget = Budget(self.loaded)
        known = Estimates(self.loaded, budget)
        each = [budget.cache_bytes(prompt + answer) for prompt in prompts]
        # All three may begin, and once they are there they do not fit together; then another program takes some too.
        room = int(3 * min(each) + 1.1 * known.prompt_step(prompts[0], width))
        ballast = max(room // 10, int(1.02 * room) - 2 * max(each) - min(each) // 2)
        mx.clear_cache()
        used = parking.arrays_meter().read().live  # the weights
        ceiling = int((used + room) / 0.95)
        self.table.about |= {
            "prompts": prompts,
            "answer": answer,
            "cache_bytes": each,
            "ceiling_bytes": ceiling,
            "ballast_bytes": ballast,
            "used_bytes": used,
        }
        answers, longest_run = {}, 0.0
        for name in self.arguments.policies:
            policy, begin = POLICIES[name], time.perf_counter()
            if self.left() < 1.3 * longest_run:
                self.table.about.setdefault("left_out", []).append(name)
                continue
            result, events = self._under_pressure(
                prompts,
                answer,
                ceiling_bytes=None if policy is None else ceiling,
                policy=policy,
                ballast_bytes=ballast,
            )
            longest_run = max(longest_run, time.perf_counter() - begin)
            answers = answers or result.tokens
            same = {id: _agreement(tokens, answers[id]) for id, tokens in result.tokens.items()}
            row = {"run": name, **result.as_record(), "same_tokens_as_without_a_ceiling": same}
            story = [
                (round(event.time, 3), event.request, event.kind, event.done)
                for event in events
                if event.kind in ("parked", "paused", "resumed", "error", "finished")
            ]
            self.table.add({"part": "pressure", **row, "story": story})
            self.table.say(f"pressure {row}")


def _agreement(tokens: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Tokens until the two differ."""
    return next((place for place, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), len(tokens))


def _model(arguments: argparse.Namespace) -> LoadedModel:
    if not arguments.shape:
        return labkit.load("tiny-hybrid")
    made = synthetic(arguments.shape, layers=arguments.layers)
    if arguments.graph == "adapter":
        return made
    # Without mlx-lm's module, whose weights would lie beside the graph's own and count as used.
    return dataclasses.replace(made, model=Hybrid.from_module(made.module, made.config), module=None)


if __name__ == "__main__":
    main()

"""What a memory guard costs while nothing happens: one engine, its guard at work in every other step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from labkit.engine import Engine, MemoryGuard
from labkit.measure.parking import request
from labkit.models import LoadedModel

BLOCK = (True, False, False, True)  # the guard on or off: a drift within a block weighs on both sides alike
COUNTED = 200  # steps in which the guard's own part is timed


@dataclass(frozen=True)
class GuardCost:
    """Decode steps with a guard on the real meter against steps without, in processor time of all threads.

    Attributes:
        rows: that decode together.
        steps: that were timed, half of them with the guard.
        ratio: of each block of four steps the two with over the two without, median over the blocks.
        low, high: the interval that holds 95 % of this median when blocks are drawn anew.
        step_seconds: the median step without.
        boundary_seconds: the guard's own part of a step, timed where it stands (between two forwards, with caches that
            these have filled), its polls included, mean.
        counted: boundary_seconds over step_seconds.
    """

    rows: int
    steps: int
    ratio: float
    low: float
    high: float
    step_seconds: float
    boundary_seconds: float
    counted: float

    def as_record(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)


def guard_cost(
    loaded: LoadedModel, *, rows: int = 1, blocks: int = 500, chunk: int = 512, seconds: float = float("inf")
) -> GuardCost:
    """Time steps one by one, the guard switched from step to step within each block of four.

    Neighbouring steps share the machine's state, so what disturbs them disturbs both sides; processor time leaves out
    what other programs take.

    Args:
        rows: that decode together.
        blocks: of four steps, at most.
        seconds: after which no further block is begun, once there are ten.
    """
    engine = Engine(loaded, prefill_chunk=chunk, guard=MemoryGuard())
    for row in range(rows):
        engine.submit(request(loaded, f"row {row}", 16, len(BLOCK) * blocks + COUNTED + 128))
    decoding: set[str] = set()
    while len(decoding) < rows:
        decoding |= {event.request for event in engine.step() if event.kind == "token"}
    for _ in range(16):
        engine.step()
    guard, begin = engine._parking, time.perf_counter()
    times: list[list[int]] = []
    try:
        while len(times) < blocks and (len(times) < 10 or time.perf_counter() - begin < seconds):
            times.append([_step(engine, guard if on else None) for on in BLOCK])
        engine._parking = watch = _Watch(guard)
        for _ in range(COUNTED):
            engine.step()
        boundary = watch.nanoseconds / 1e9 / COUNTED
    finally:
        engine._parking = guard
        engine.close()
    ratio, low, high = _ratio(times)
    step = float(np.median(np.array(times)[:, ~np.array(BLOCK)])) / 1e9
    return GuardCost(rows, len(times) * len(BLOCK), ratio, low, high, step, boundary, boundary / step)


class _Watch:
    """A guard's two calls of a step, timed in the thread that makes them."""

    def __init__(self, guard: Any):
        self._guard, self.nanoseconds = guard, 0

    def boundary(self) -> None:
        self._timed(self._guard.boundary)

    def chunk(self) -> int | None:
        return self._timed(self._guard.chunk)

    def _timed(self, call: Callable[[], Any]) -> Any:
        begin = time.thread_time_ns()
        result = call()
        self.nanoseconds += time.thread_time_ns() - begin
        return result


def _step(engine: Engine, guard: Any) -> int:
    engine._parking = guard
    begin = time.process_time_ns()
    engine.step()
    return time.process_time_ns() - begin


def _ratio(times: Sequence[Sequence[int]], draws: int = 2000) -> tuple[float, float, float]:
    """The median of the blocks' ratios, and its interval by drawing blocks anew."""
    blocks, on, generator = np.array(times), np.array(BLOCK), np.random.default_rng(0)
    ratios = blocks[:, on].sum(axis=1) / blocks[:, ~on].sum(axis=1)
    drawn = np.median(ratios[generator.integers(0, len(ratios), (draws, len(ratios)))], axis=1)
    return float(np.median(ratios)), *map(float, np.quantile(drawn, (0.025, 0.975)))

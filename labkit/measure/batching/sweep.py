"""Both sides by turns at one point, with the floor beside them."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from labkit.measure.batching.sides import Run, Side
from labkit.measure.batching.workload import Workload
from labkit.measure.floors import Floors
from labkit.measure.model_costs import ModelCosts


@dataclass(frozen=True)
class Point:
    """What was measured for one workload.

    Attributes:
        workload: the requests.
        runs: side -> its rounds, in order; the sides took turns.
        floor: tokens a second at which the counted bytes and operations of a step would pass at the device's measured
            rates, whichever takes longer; or None.
        load: processes that wanted a core before the first round, on average over a minute.
    """

    workload: Workload
    runs: dict[str, tuple[Run, ...]]
    floor: float | None
    load: float

    def median(self, side: str, what: str) -> float:
        """The median over rounds of one of a run's figures."""
        return statistics.median(getattr(run, what) for run in self.runs[side])

    def ratio(self, side: str, other: str) -> tuple[float, float, float]:
        """Throughput of one side over another's: median, least and most over rounds."""
        pairs = zip(self.runs[side], self.runs[other], strict=True)
        ratios = sorted(mine.throughput / theirs.throughput for mine, theirs in pairs)
        return statistics.median(ratios), ratios[0], ratios[-1]

    def as_rows(self) -> list[dict[str, Any]]:
        """One record a side, JSON data."""
        sides = list(self.runs)
        rows = []
        for side in sides:
            row = {
                "name": "batched decode" if self.workload.prefilled else "prompts and answers",
                "side": side,
                "lengths": self.workload.name,
                "rows": self.workload.rows,
                "longest_context": max(self.workload.contexts),
                "mean_context": statistics.mean(self.workload.contexts),
                "answer": self.workload.answer,
                "rounds": len(self.runs[side]),
                "choice": "sampled" if self.workload.temperature else "greedy",
                "floor_tokens_a_second": self.floor,
                "load_before": self.load,
                "by_round": [asdict(run) for run in self.runs[side]],
            }
            row |= {name: self.median(side, name) for name in asdict(self.runs[side][0])}
            if side != sides[0]:
                median, least, most = self.ratio(sides[0], side)
                row |= {f"{sides[0]}_over_this": median, "ratio_least": least, "ratio_most": most}
            rows.append(row)
        return rows


def sweep_point(
    sides: Sequence[Side],
    workload: Workload,
    *,
    rounds: int = 3,
    turn: float = 0.0,
    seconds: float = math.inf,
    costs: ModelCosts | None = None,
    rates: Floors | None = None,
) -> Point:
    """Time every side in each round, in an order that alternates.

    Args:
        sides: the first one is compared with the others.
        workload: the requests.
        rounds: how often, at most.
        turn: seconds that a side's turn takes at least: a quick one runs again and again, and its median run counts.
        seconds: after which no round begins but the second.
        costs, rates: of the model and of this device, for the floor.

    Raises:
        ValueError: answers so short that no step had all rows.
    """
    runs: dict[str, list[Run]] = {side.name: [] for side in sides}
    load, begin = os.getloadavg()[0], time.perf_counter()
    for number in range(rounds):
        if number > 1 and time.perf_counter() - begin > seconds:
            break
        for side in sides if number % 2 == 0 else reversed(sides):
            run = _turn(side, workload, turn)
            if not run.throughput:
                raise ValueError(
                    f"{side.name} never decoded all {workload.rows} rows together: {workload.answer} tokens a row are "
                    "over before the last row begins; take a longer answer"
                )
            runs[side.name].append(run)
    floor = None
    if costs is not None and rates is not None:
        # Every row reads the whole of its own context; the weights are read once.
        context, rows = round(statistics.mean(workload.contexts)) + workload.answer // 2, workload.rows
        floor = rows / rates.seconds(costs.decode(context, rows).bytes, costs.decode_operations(context, rows))
    return Point(workload, {name: tuple(each) for name, each in runs.items()}, floor, load)


def _turn(side: Side, workload: Workload, seconds: float) -> Run:
    runs, end = [side.run(workload)], time.perf_counter() + seconds
    while sum(run.seconds for run in runs) < seconds and time.perf_counter() < end:
        runs.append(side.run(workload))
    return sorted(runs, key=lambda run: run.throughput)[len(runs) // 2]

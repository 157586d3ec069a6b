"""The specialised graph with one mechanism off at a time: what that should cost by count, and what it costs.

Each ablation is the same engine on the same weights, with one switch of `labkit.models.hybrid.Variants` set to its
control (`mechanisms`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from labkit.kernels.recording import machine_here
from labkit.measure.end_to_end.filled import Filled
from labkit.measure.end_to_end.mechanisms import ABLATIONS, Ablation, Machine
from labkit.measure.end_to_end.parts import Parts
from labkit.measure.end_to_end.plan import Plan, Point
from labkit.measure.end_to_end.run import measure_point
from labkit.measure.end_to_end.sides import LabkitSide
from labkit.measure.end_to_end.subject import Subject
from labkit.models.hybrid import Variants

ENGINE, CONTROL = "engine", "control"


def run(
    subject: Subject,
    machine: Machine,
    plan: Plan,
    *,
    chosen: Sequence[Ablation] = ABLATIONS,
    skew: float = 0.0,
    parts: Parts | None = None,
    seconds: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Every mechanism off in turn, against the engine with all of them.

    Args:
        subject: with the specialised graph.
        machine: for predictions.
        plan: rounds, steps and limits; its points are replaced by each mechanism's own.
        skew: of the subject's routing, for the records.
        parts: where each measurement is kept.
        seconds: after which no further measurement begins.
        progress: told what is being measured.

    Returns:
        one record a mechanism and point: name, saves, kind, length, skew, predicted_seconds and measured_seconds (what
        the control takes beyond the engine), gain (control's time over the engine's) with its interval, published (the
        figure's name), engine_seconds, replayed (whether both sides' decode steps were).

    Raises:
        LoadError: a subject whose graph has no switches.
    """
    parts, begin, records = parts or Parts(None, {}), time.perf_counter(), []
    for ablation in chosen:
        sides = _sides(subject, ablation)
        for point in ablation.points:
            key = "_".join([point.name, *(f"{k}-{v}" for k, v in ablation.control.items()), f"skew-{skew:g}"])
            record = parts.load(key)
            if record is None:
                if seconds is not None and time.perf_counter() - begin > seconds:
                    progress(f"left out by the time limit: {ablation.name}, {point.name}")
                    continue
                progress(f"{ablation.name}, {point.name}, skew {skew:g}")
                record = _compare(ablation, point, sides, subject, machine, plan) | {"skew": skew}
                parts.store(key, record)
            records.append(record)
    return records


def _sides(subject: Subject, ablation: Ablation) -> list[LabkitSide]:
    """Engine and control, both replayed or neither: a control that MLX must launch would pay for that besides."""
    models = {
        ENGINE: subject.with_variants(Variants(**ablation.base)),
        CONTROL: subject.with_variants(Variants(**ablation.base | ablation.control)),
    }
    sides = [LabkitSide(model, name) for name, model in models.items()]
    if any(point.kind == "decode" for point in ablation.points) and machine_here() is not None:
        for side in sides:
            side.decode(Filled(side.model.layouts, 2), 1, 4)
        if not all(side.replays for side in sides):
            return [LabkitSide(model, name, replay=False) for name, model in models.items()]
    return sides


def _compare(
    ablation: Ablation,
    point: Point,
    sides: Sequence[LabkitSide],
    subject: Subject,
    machine: Machine,
    plan: Plan,
) -> dict[str, Any]:
    record = {
        "name": ablation.name,
        "saves": ablation.saves,
        "base": ablation.base,
        "control": ablation.control,
        "kind": point.kind,
        "length": point.length,
        "published": ablation.published.get(point.name),
        "predicted_seconds": ablation.extra(subject.costs, machine, point.length),
    }
    measured = measure_point(point, sides, subject.model, plan)
    if CONTROL not in measured["sides"]:
        return record | {"failed": measured["failed"].get(CONTROL, "not measured")}
    medians = {name: statistics.median(side["seconds"]) for name, side in measured["sides"].items()}
    ratio = measured["ratios"][CONTROL]
    return record | {
        "engine_seconds": medians[ENGINE],
        "replayed": all(side.replays for side in sides),
        "measured_seconds": medians[CONTROL] - medians[ENGINE],
        "gain": ratio["ratio"],
        "gain_low": ratio["low"],
        "gain_high": ratio["high"],
        "rounds": ratio["rounds"],
    }


def rows(records: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of ablations, for people. A column holds one kind of figure."""
    from labkit.measure.end_to_end.table import size_name
    from labkit.measure.published import published

    printed = published("specialised-engine")
    columns = ["mechanism", "saves", "at", "routing", "predicted: ms", "measured: ms", "measured: gain"]
    columns.append("published: gain")
    result = []
    for r in records:
        figure = printed.get(r["published"]) if r["published"] else None
        spread = f" ({r['gain_low']:.3f}-{r['gain_high']:.3f})" if r.get("gain_low") else ""
        predicted = r["predicted_seconds"]
        result.append(
            [
                r["name"],
                r["saves"],
                f"{r['kind']} {size_name(r['length'])}",
                "even" if not r["skew"] else f"skew {r['skew']:g}",
                None if predicted is None else f"{1e3 * predicted:.3f}",
                f"{1e3 * r['measured_seconds']:+.3f}" if "gain" in r else r["failed"],
                f"{r['gain']:.3f}{spread}" if "gain" in r else None,
                f"{1 + figure.value / 100:.3f}" if figure else None,
            ]
        )
    return columns, result

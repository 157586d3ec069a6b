"""The points of a comparison, one after the other: every side by turns, within a time limit, each kept at once."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx

from labkit.measure.end_to_end.filled import Filled
from labkit.measure.end_to_end.parts import Parts
from labkit.measure.end_to_end.plan import Plan, Point
from labkit.measure.end_to_end.sides import FAIR, RELEASED, Side
from labkit.measure.floors import Floors
from labkit.measure.model_costs import ModelCosts
from labkit.measure.paired import compare
from labkit.models.contract import Model


def measure(
    sides: Sequence[Side],
    model: Model,
    plan: Plan,
    *,
    costs: ModelCosts | None = None,
    floors: Floors | None = None,
    parts: Parts | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Measure the plan's points, or take them from `parts` where they are there already.

    Args:
        sides: the side that is judged first, then its opponents.
        model: labkit's, for the arrays of its caches and its vocabulary.
        costs, floors: with both, each point gets its floor.
        parts: where points are kept.
        progress: told what is being measured.

    Returns:
        one record a point, in the plan's order, without those that the time limit left out: kind, length, `sides` (by
        name: seconds of each sample, tokens_per_second, peak_bytes, cache_bytes), `ratios` (by opponent: opponent's
        time over the first side's, with its interval), `floor_seconds`, `share_of_floor`.
    """
    begin, records = time.perf_counter(), []
    parts = parts or Parts(None, {})
    # What is there now stays there. The collections between samples then go through what samples leave, not through all
    # imported modules, which takes longer than a short sample.
    gc.collect()
    gc.freeze()
    try:
        for point in plan.points:
            record = parts.load(point.name)
            if record is None:
                elapsed = time.perf_counter() - begin
                if plan.seconds is not None and elapsed > plan.seconds:
                    progress(f"{point.name}: left out, {elapsed:.0f} s of {plan.seconds:.0f} s are over")
                    continue
                left = None if plan.seconds is None else plan.seconds - elapsed
                record = measure_point(point, _taking_part(sides, point, plan), model, plan, left, progress)
                record |= _against_floor(record, costs, floors, sides[0].name)
                parts.store(point.name, record)
            records.append(record)
    finally:
        gc.unfreeze()
    return records


def _taking_part(sides: Sequence[Side], point: Point, plan: Plan) -> list[Side]:
    names = {side.name for side in sides}
    late = point.length > plan.released_up_to and FAIR in names
    return [side for side in sides if not (late and side.name == RELEASED)]


def measure_point(
    point: Point,
    sides: Sequence[Side],
    model: Model,
    plan: Plan,
    left: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One point, every side by turns: the record that `measure` describes, without its floor.

    Args:
        left: seconds after which no further round begins; at least one round is measured.
    """
    begin = time.perf_counter()
    sample = _decoder(point, model, plan) if point.kind == "decode" else _reader(point, model, plan)
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    peaks, cached = dict.fromkeys(seconds, 0), dict.fromkeys(seconds, 0)
    failed: dict[str, str] = {}
    for number in range(plan.rounds):
        spent = time.perf_counter() - begin
        if number and (spent > plan.point_seconds or (left is not None and spent > left)):
            break
        for side in sides if number % 2 == 0 else list(reversed(sides)):
            if side.name in failed or (number and max(seconds[side.name]) * _units(point, plan) > plan.once_above):
                continue
            progress(f"{point.name}, round {number + 1} of {plan.rounds}: {side.name}")
            try:
                taken, peak, size = _alone(lambda side=side, number=number: sample(side, number == 0))
            except Exception as error:  # an opponent that cannot do a length must not end the comparison
                if side is sides[0]:
                    raise
                failed[side.name] = " ".join(str(error).split())[:300] or type(error).__name__
                continue
            seconds[side.name].append(taken)
            peaks[side.name] = max(peaks[side.name], peak)
            cached[side.name] = size
    record = asdict(point) | {"sides": {}, "ratios": {}, "failed": failed}
    for name, samples in seconds.items():
        if samples:
            rate = (point.length if point.kind == "prefill" else 1) / statistics.median(samples)
            record["sides"][name] = {
                "seconds": samples,
                "tokens_per_second": rate,
                "peak_bytes": peaks[name],
                "cache_bytes": cached[name],
            }
    first = seconds[sides[0].name]
    for name, samples in seconds.items():
        if name != sides[0].name and samples:
            # A side measured once is compared with the first side's median, and its interval says nothing.
            paired = min(len(samples), len(first))
            both = compare(samples[:paired], first[:paired] if paired > 1 else [statistics.median(first)])
            low, high = (both.ratio_low, both.ratio_high) if paired > 1 else (None, None)
            record["ratios"][name] = {"ratio": both.ratio, "low": low, "high": high, "rounds": paired}
    return record


def _units(point: Point, plan: Plan) -> int:
    return plan.steps + plan.warm_up if point.kind == "decode" else 1


def _reader(point: Point, model: Model, plan: Plan) -> Callable[[Side, bool], tuple[float, int]]:
    tokens = mx.random.randint(0, model.vocab_size, (point.length,), key=mx.random.key(plan.seed))
    mx.eval(tokens)

    def sample(side: Side, is_first: bool) -> tuple[float, int]:
        if is_first:
            side.prefill(tokens[: max(2, min(plan.warm_up_tokens, side.warm_up_tokens or point.length))])
        return side.prefill(tokens), 0

    return sample


def _decoder(point: Point, model: Model, plan: Plan) -> Callable[[Side, bool], tuple[float, int]]:
    filled = Filled(model.layouts, point.length, plan.seed)

    def sample(side: Side, is_first: bool) -> tuple[float, int]:
        return side.decode(filled, plan.steps, plan.warm_up)

    return sample


def _alone(call: Callable[[], tuple[float, int]]) -> tuple[float, int, int]:
    """(seconds, peak bytes, cache bytes) of a call that starts with no other buffers around."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    seconds, size = call()
    return seconds, mx.get_peak_memory(), size


def _against_floor(record: dict, costs: ModelCosts | None, floors: Floors | None, name: str) -> dict[str, Any]:
    if costs is None or floors is None:
        return {"floor_seconds": None, "share_of_floor": None}
    length = record["length"]
    if record["kind"] == "decode":
        floor = floors.seconds(costs.decode(length).bytes, costs.decode_operations(length))
    else:
        floor = floors.seconds(costs.weight_bytes, costs.prefill_operations(length))
    return {"floor_seconds": floor, "share_of_floor": floor / statistics.median(record["sides"][name]["seconds"])}

"""From the floor of a decode step to what it takes: each part named, none of them fitted."""

from __future__ import annotations

from labkit.measure.floors import Floors
from labkit.measure.model_costs import ModelCosts
from labkit.measure.trace.step import StepTrace

FLOOR = "floor: bytes at the read rate"
MOVED = "bytes beyond the floor, at that rate"
LAUNCHED = "launches, one after the other"
REST = "not explained by these"


def waterfall(
    costs: ModelCosts, trace: StepTrace, floors: Floors, launch: float, context: int, measured: float
) -> dict[str, float]:
    """The parts of a decode step's seconds, in order; they sum to `measured`.

    What launches cost is counted on the longest chain alone: those beside it can run meanwhile.

    Args:
        costs, trace: of the model and its step. floors: of the device. launch: seconds that one more launch takes.
        context: tokens in the caches. measured: seconds of the step.

    Raises:
        ValueError: a step faster than its floor: one of the two is wrong.
    """
    floor = floors.seconds(costs.decode(context).bytes, costs.decode_operations(context))
    if measured < floor:
        raise ValueError(f"a step of {measured:.3g} s is faster than its floor of {floor:.3g} s: measure both again")
    parts, left = {FLOOR: floor}, measured - floor
    beyond = max(0.0, trace.bytes - costs.decode(context).bytes) / floors.read.value
    for name, seconds in ((MOVED, beyond), (LAUNCHED, trace.stages * launch)):
        parts[name] = min(seconds, left)
        left -= parts[name]
    return parts | {REST: left}

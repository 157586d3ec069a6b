"""How much memory a captured step needs for a while: what is alive at once, from the graph alone."""

from __future__ import annotations

from labkit.measure.trace.capture import Captured
from labkit.measure.trace.step import VIEWS

ELEMENTWISE = frozenset(
    {
        *("Add", "Subtract", "Multiply", "Divide", "Negative", "Sigmoid", "Exp", "Log", "Sqrt", "Rsqrt", "Square"),
        *("Tanh", "Maximum", "Minimum", "Select", "Softmax", "SliceUpdate", "Cos", "Sin"),
    }
)
"""Operations that MLX lets write over an input of the same size that is not read afterwards."""


def temporary_bytes(captured: Captured) -> int:
    """The most bytes that intermediate arrays take at once, beyond weights, caches and what the step gives back.

    The operations run in the order in which they were captured, and an array is given back after its last reader: what
    MLX does on one stream. An allocator's rounding and its pool of free buffers come on top.
    """
    base: dict[str, str] = {}  # array -> the array whose memory it is
    size: dict[str, int] = {}
    last: dict[str, int] = {}
    for index, operation in enumerate(captured.operations):
        for value in operation.inputs:
            last[base.get(value.name, value.name)] = index
        for value in operation.outputs:
            if operation.name in VIEWS and operation.inputs:
                base[value.name] = base.get(operation.inputs[0].name, operation.inputs[0].name)
            else:
                size[value.name] = value.nbytes
    kept = {base.get(name, name) for name in captured.results}
    alive, now, peak = set(), 0, 0
    for index, operation in enumerate(captured.operations):
        if operation.name in VIEWS:
            continue
        ending = {base.get(v.name, v.name) for v in operation.inputs}
        ending = {name for name in ending if name in alive and last[name] == index}
        for value in operation.outputs:
            if value.name in kept:
                continue
            same = next((n for n in ending if size[n] == value.nbytes), None)
            if operation.name in ELEMENTWISE and same is not None:
                ending.discard(same)  # written over
                alive.discard(same)
                now -= size[same]
            alive.add(value.name)
            now += value.nbytes
        peak = max(peak, now)
        for name in ending | {v.name for v in operation.outputs if last.get(v.name, -1) <= index and v.name in alive}:
            alive.discard(name)
            now -= size[name]
    return peak

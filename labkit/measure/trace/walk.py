"""One layer's launches in words: a row each, for readers who follow a token through it."""

from __future__ import annotations

import re

from labkit.measure.trace.capture import Value
from labkit.measure.trace.step import Launch, StepTrace

COLUMNS = ("stage", "operation", "parameter", "reads", "makes", "bytes")


def walk(trace: StepTrace, layer: int | None) -> list[list[object]]:
    """(stage, operation, parameter, shapes read, shapes made, bytes) of each launch of a layer, by stage.

    Stages count from the layer's first one. `layer` None: what stands before, between and after the layers.
    """
    launches = sorted(trace.by_layer().get(layer, []), key=lambda launch: launch.stage)
    first = launches[0].stage - 1 if launches else 0
    return [_row(launch, first if layer is not None else 0) for launch in launches]


def _row(launch: Launch, before: int) -> list[object]:
    parameter = re.sub(r"^.*\blayers\.\d+\.", "", launch.label)
    shown, named = [], set()
    for value in launch.inputs:
        # Of a packed matrix only the codes are shown: scales and biases come along.
        matrix = re.sub(r"\.(weight|scales|biases)$", "", value.origin)
        is_parameter = matrix not in ("", "cache", "constant")
        if value.shape and not (is_parameter and matrix in named):
            shown.append(_shape(value))
        named.add(matrix)
    makes = ", ".join(map(_shape, launch.outputs))
    return [launch.stage - before, launch.name, parameter, ", ".join(shown), makes, f"{launch.bytes:,}"]


def _shape(value: Value) -> str:
    return "x".join(map(str, value.shape)) or "1"

"""Inputs of a mixer that lie side by side in one projection's rows, or each in an array of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx

from labkit.kernels.gated_delta.shapes import Shape
from labkit.kernels.signature import Launch

Part = mx.array | int
"""An array, or the column of qkv's rows from which the values stand."""


class Rows(NamedTuple):
    """Where a kernel finds one input: an array, the column of the first value, the distance between tokens."""

    array: mx.array
    at: int
    pitch: int


def locate(name: str, part: Part, qkv: mx.array, shape: Shape, width: int) -> Rows:
    """Where `width` values a token of an input stand.

    Raises:
        ValueError: an array of another size, or a column from which qkv's rows do not have that many values.
    """
    if isinstance(part, int):
        if not shape.channels <= part <= qkv.shape[-1] - width:
            raise ValueError(
                f"{name}: {width} values from column {part} on do not lie behind {shape.channels} channels in rows of "
                f"{qkv.shape[-1]}"
            )
        return Rows(qkv, part, qkv.shape[-1])
    if part.size != shape.batch * shape.length * width:
        raise ValueError(f"{name} needs {width} values for each token of {qkv.shape[:2]}, not shape {part.shape}")
    return Rows(part, 0, width)


def template(qkv: mx.array, a: Rows, b: Rows) -> list[tuple[str, int]]:
    """The template arguments that say where qkv, a and b stand.

    Raises:
        ValueError: rows that four-wide reads cannot follow, or a and b of different kinds.
    """
    if qkv.shape[-1] % 4:
        raise ValueError(f"rows of {qkv.shape[-1]} values: a multiple of four is needed to read four at a time")
    if a.pitch != b.pitch:
        raise ValueError("a and b both stand in qkv's rows, or neither")
    return [("PITCH", qkv.shape[-1]), ("GATE_PITCH", a.pitch), ("A_AT", a.at), ("B_AT", b.at)]


def apart(launch: Launch) -> Launch:
    """The launch with qkv, a, b and, where it has one, z as arrays of their own: what functions on a CPU read."""
    sizes = dict(launch.template)
    qkv, a, b, *others = launch.inputs
    heads, channels = sizes["HV"], 2 * sizes["HK"] * sizes["DK"] + sizes["HV"] * sizes["DV"]
    if "Z_AT" in sizes:
        z = _columns(others[0], qkv, sizes["Z_AT"], heads * sizes["DV"])
        others[0] = z.reshape(*qkv.shape[:2], heads, sizes["DV"])
    parts = (_columns(part, qkv, sizes[at], heads) for part, at in ((a, "A_AT"), (b, "B_AT")))
    return replace(launch, inputs=(qkv[..., :channels], *parts, *others))


def _columns(part: mx.array, qkv: mx.array, at: int, width: int) -> mx.array:
    if at == 0 and part.size == qkv.shape[0] * qkv.shape[1] * width:
        return part
    return part.reshape(*qkv.shape[:2], -1)[..., at : at + width]

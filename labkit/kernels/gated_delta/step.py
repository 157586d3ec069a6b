"""The decode step: everything between the input projections and the output projection, in one launch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.gated_delta import joined, native, reference
from labkit.kernels.gated_delta.conv import check_layer
from labkit.kernels.gated_delta.joined import Part
from labkit.kernels.gated_delta.recurrence import PACKED
from labkit.kernels.gated_delta.shapes import DELTA, check_spans, expect
from labkit.kernels.launch import Implementation, Kernel
from labkit.kernels.signature import Launch
from labkit.kernels.targets import threads_that_fit

STEP = Kernel.from_file(
    Path(__file__).parent / "step.metal",
    ["qkv", "a", "b_gate", "z", "tail", "state", "weight", "a_log", "dt_bias", "norm_weight", "spans", "eps"],
    ["out", "states", "tail_out"],
    name="gated_delta_step",
    header=DELTA,
    reference=lambda launch: _shaped(reference.step, launch),
    native=lambda launch: _shaped(native.step, launch),
    in_place={"state": "states"},  # not the tail: several heads read a key head's channels
)

MAX_TOKENS = 8
"""Tokens of one step: their keys, queries and values stay within 32 KB of threadgroup memory."""


@cache
def _simdgroups(dv: int, fit: int) -> int:
    # Sixteen hold 128 columns at once; a wider head takes rounds, with more registers a thread than so many have.
    per_simdgroup = 32 // PACKED.lanes * PACKED.columns
    most = min(16 if dv <= 16 * per_simdgroup else 8, fit)
    return max(n for n in range(1, most + 1) if dv % (n * per_simdgroup) == 0)


def step_call(
    qkv: mx.array,
    a: Part,
    b: Part,
    z: Part,
    tail: mx.array,
    state: mx.array,
    weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    eps: float,
    spans: mx.array | None = None,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    each: bool = False,
) -> dict:
    """The arguments of `STEP` for `decode_step`.

    Raises:
        ValueError: shapes or dtypes that do not fit, or more than eight tokens.
    """
    flat, batch = qkv.ndim == 2, tail.shape[0] if tail.ndim else 0
    if flat and (batch == 0 or qkv.shape[0] % batch):
        raise ValueError(f"qkv {qkv.shape} holds no tokens of as many rows as the tail {tail.shape}")
    if not flat and qkv.ndim != 3:
        raise ValueError(f"qkv is [B, T, C] or [B * T, C], not {qkv.shape}")
    rows = (batch, qkv.shape[0] // batch) if flat else qkv.shape[:2]
    shape, weight = check_layer(qkv, a, b, tail, weight, a_log, dt_bias, (*heads, *dims), rows)
    spanned, spans = spans is not None, check_spans(spans, shape.batch, shape.length)
    staged = shape.length * (2 * shape.dk + shape.dv + 2) * 4
    if shape.length > MAX_TOKENS or staged > 32 * 1024:
        raise ValueError(
            f"a decode step takes up to {MAX_TOKENS} tokens, not {shape.length}; take scan_inputs, scan and gated_norm"
        )
    outputs = (qkv.shape[0], shape.hv * shape.dv) if flat else (*rows, shape.hv, shape.dv)
    rows_a, rows_b = (joined.locate(name, part, qkv, shape, shape.hv) for name, part in (("a", a), ("b", b)))
    rows_z = joined.locate("z", z, qkv, shape, shape.hv * shape.dv)
    if rows_z.at % 4:
        raise ValueError(f"z stands from column {rows_z.at} on: a multiple of four is needed to read four at a time")
    expect("state", state, (shape.batch, shape.hv, shape.dv, shape.dk), mx.float32)
    expect("norm_weight", norm_weight, (shape.dv,))
    threads = 32 * _simdgroups(shape.dv, threads_that_fit(512) // 32)
    states = (shape.batch, shape.length, *state.shape[1:]) if each else state.shape
    return {
        "inputs": [
            *(qkv, rows_a.array, rows_b.array, rows_z.array, tail, state),
            *(weight, a_log, dt_bias, norm_weight, spans, float(eps)),
        ],
        "template": [
            ("T", qkv.dtype),
            *shape.template(),
            ("LANES", PACKED.lanes),
            ("COLS", PACKED.columns),
            ("SIMDGROUPS", threads // 32),
            ("TOKENS", shape.length),
            ("EACH", each),
            ("SPANNED", spanned),
            *joined.template(qkv, rows_a, rows_b),
            ("Z_PITCH", rows_z.pitch),
            ("Z_AT", rows_z.at),
        ],
        "grid": (shape.hv * threads, shape.batch, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [outputs, states, tail.shape],
        "output_dtypes": [qkv.dtype, mx.float32, tail.dtype],
    }


def _shaped(function: Implementation, launch: Launch) -> list[mx.array]:
    """What a function on a CPU makes of a launch, whose tokens may lie flat: it reads and returns them by rows."""
    batch, length = launch.inputs[4].shape[0], dict(launch.template)["TOKENS"]
    tokens = [part if part.ndim > 2 else part.reshape(batch, length, -1) for part in launch.inputs[:4]]
    out, *others = function(joined.apart(replace(launch, inputs=(*tokens, *launch.inputs[4:]))))
    return [out.reshape(launch.output_shapes[0]), *others]


@takes_arrays
def decode_step(
    qkv: mx.array,
    a: Part,
    b: Part,
    z: Part,
    tail: mx.array,
    state: mx.array,
    weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    eps: float,
    spans: mx.array | None = None,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    each: bool = False,
    target: str | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """One to eight tokens of B rows through a Gated DeltaNet mixer: `scan_inputs`, `scan` and `gated_norm` in one
    launch.

    On a device, the three launches' results bit for bit without their traffic: a row's state is read and written once,
    the rest stays on the chip.

    Args:
        qkv, a, b, tail, weight, a_log, dt_bias, spans, heads, dims: as for `scan_inputs`, T at most 8; qkv also as
            [B * T, ...], row by row.
        z: [B, T, Hv, Dv] or [B, T, Hv * Dv], the gate of the norm, or its column in qkv's rows. norm_weight: [Dv].
        eps: as for `gated_norm`.
        state: [B, Hv, Dv, Dk], float32.
        each: give the state after each token, so that a verification can keep the one behind its last accepted token.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        out [B, T, Hv, Dv] in qkv's dtype, or flat as qkv, [B * T, Hv * Dv], zero at pads; the new state
        [B, Hv, Dv, Dk], or [B, T, Hv, Dv, Dk] with `each`; the new tail. A row without valid tokens keeps state and
        tail bit for bit.

    Raises:
        ValueError: shapes or dtypes that do not fit, or too many tokens.
    """
    call = step_call(
        qkv, a, b, z, tail, state, weight, a_log, dt_bias, norm_weight, eps, spans, heads=heads, dims=dims, each=each
    )
    return tuple(STEP(**call, target=target))

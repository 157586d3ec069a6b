"""What stands before the scan: causal convolution with its tail, SiLU, norms of queries and keys, gates. One launch."""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.gated_delta import joined, reference
from labkit.kernels.gated_delta.joined import Part
from labkit.kernels.gated_delta.shapes import DELTA, Shape, check_activations, check_spans, expect
from labkit.kernels.launch import Kernel

CONV = Kernel.from_file(
    Path(__file__).parent / "conv.metal",
    ["qkv", "a", "b_gate", "tail", "weight", "a_log", "dt_bias", "spans", "length"],
    ["q", "k", "v", "log_decay", "beta", "tail_out"],
    name="gated_delta_conv",
    header=DELTA,
    reference=lambda launch: reference.conv(joined.apart(launch)),
)

TOKENS = 8
"""Tokens of a simdgroup: three more are read for each eight, from cache, and eleven rows fit in its registers."""


class ScanInputs(NamedTuple):
    """What a scan takes, with the conv tail for the next call."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_decay: mx.array
    beta: mx.array
    tail: mx.array


def check_layer(
    qkv: mx.array,
    a: Part,
    b: Part,
    tail: mx.array,
    weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    dims: tuple,
    rows: tuple[int, int] | None = None,
) -> tuple[Shape, mx.array]:
    """The sizes of a layer's call, and its conv weight as [C, 4]. Raises ValueError if something does not fit.

    Args:
        rows: (B, T) of a qkv whose tokens lie flat; by default its leading dimensions.
    """
    if rows is None:
        if qkv.ndim != 3:
            raise ValueError(f"qkv is [B, T, C], not {qkv.shape}")
        rows = qkv.shape[:2]
    hk, hv, dk, dv = dims
    shape = Shape(*rows, hk, hv, dk, dv)
    check_activations(qkv.dtype)
    if qkv.shape[-1] != shape.channels and not (isinstance(a, int) and isinstance(b, int)):
        raise ValueError(f"qkv needs {shape.channels} channels, not shape {qkv.shape}")
    expect("tail", tail, (shape.batch, reference.CONV_TAPS - 1, shape.channels), qkv.dtype)
    if weight.size != shape.channels * reference.CONV_TAPS or weight.shape[0] != shape.channels:
        raise ValueError(
            f"weight needs {shape.channels} channels of {reference.CONV_TAPS} taps, not shape {weight.shape}"
        )
    expect("a_log", a_log, (hv,))
    expect("dt_bias", dt_bias, (hv,))
    # As stored by mlx-lm it has a third dimension of one. A reshape is an operation of MLX's graph at each call.
    return shape, weight if weight.ndim == 2 else weight.reshape(shape.channels, reference.CONV_TAPS)


def conv_call(
    qkv: mx.array,
    a: Part,
    b: Part,
    tail: mx.array,
    weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    spans: mx.array | None = None,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> dict:
    """The arguments of `CONV` for `scan_inputs`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    shape, weight = check_layer(qkv, a, b, tail, weight, a_log, dt_bias, (*heads, *dims))
    spans = check_spans(spans, shape.batch, shape.length)
    rows_a, rows_b = (joined.locate(name, part, qkv, shape, shape.hv) for name, part in (("a", a), ("b", b)))
    slots = 2 * shape.hk + shape.hv
    simdgroups = gcd(slots, 4)
    queries, values = (shape.batch, shape.length, shape.hk, shape.dk), (shape.batch, shape.length, shape.hv, shape.dv)
    return {
        "inputs": [qkv, rows_a.array, rows_b.array, tail, weight, a_log, dt_bias, spans, shape.length],
        "template": [("T", qkv.dtype), *shape.template(), ("TOKENS", TOKENS), *joined.template(qkv, rows_a, rows_b)],
        "grid": (-(-shape.length // TOKENS) * 32 * simdgroups, slots // simdgroups, shape.batch),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": [queries, queries, values, values[:3], values[:3], tail.shape],
        "output_dtypes": [qkv.dtype] * 3 + [mx.float32] * 2 + [tail.dtype],
    }


@takes_arrays
def scan_inputs(
    qkv: mx.array,
    a: Part,
    b: Part,
    tail: mx.array,
    weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    spans: mx.array | None = None,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    target: str | None = None,
) -> ScanInputs:
    """From the input projections to what `scan` takes.

    A depthwise causal convolution over four tokens with SiLU; then q and k are divided by their length and q by
    sqrt(Dk); log_decay = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b). In fp32, rounded once. Pads do not
    exist: a row's first valid token follows its tail directly, and the new tail holds its last three valid tokens.

    Args:
        qkv: [B, T, C], float32, float16 or bfloat16, C = 2 Hk Dk + Hv Dv: all queries, all keys, all values.
        a, b: [B, T, Hv], any float dtype; or, where one projection gave them all, the columns of qkv's longer rows
            from which they stand.
        tail: [B, 3, C] in qkv's dtype: the last three tokens before this call, zeros at the start.
        weight: [C, 4] or [C, 4, 1]; the last tap is the token's own.
        a_log, dt_bias: [Hv].
        spans: [B, 2] int32, the tokens of each row that count (`row_spans`); all without it.
        heads: (Hk, Hv). dims: (Dk, Dv).
        target: where to run (`labkit.kernels.targets`).

    Returns:
        q, k [B, T, Hk, Dk] and v [B, T, Hv, Dv] in qkv's dtype, log_decay and beta [B, T, Hv] in float32, all zero at
        pads; and the new tail.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: the mixer of Qwen3-Next and Qwen3.5 (mlx-lm's models/qwen3_5.py, GatedDeltaNet).
    """
    call = conv_call(qkv, a, b, tail, weight, a_log, dt_bias, spans, heads=heads, dims=dims)
    return ScanInputs(*CONV(**call, target=target))


def tail_after(qkv: mx.array, tail: mx.array, kept: mx.array) -> mx.array:
    """The conv tail when only the first `kept` [B] tokens of qkv [B, T, C] stay, after a verification of drafted
    tokens."""
    positions = kept.astype(mx.int32)[:, None, None] + mx.arange(reference.CONV_TAPS - 1)[None, :, None]
    return mx.take_along_axis(mx.concatenate([tail, qkv], axis=1), positions, axis=1)

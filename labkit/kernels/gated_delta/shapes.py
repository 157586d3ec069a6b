"""The sizes of a Gated DeltaNet layer, and the checks that all its operations share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from labkit.kernels.gated_delta.spans import full_spans
from labkit.kernels.header import Header

_HERE = Path(__file__).parent
DELTA = Header.from_file(_HERE / "rows.h", _HERE / "delta.h", _HERE / "step.h")
"""The texts that the kernels of this folder share."""

ACTIVATIONS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Shape:
    """Sizes of a call: rows, tokens, key and value heads, key and value dimensions of a head."""

    batch: int
    length: int
    hk: int
    hv: int
    dk: int
    dv: int

    def __post_init__(self):
        if self.batch < 1 or self.length < 1:
            raise ValueError(f"at least one row and one token are needed, not {self.batch} rows of {self.length}")
        if self.hk < 1 or self.hv < 1 or self.hv % self.hk:
            raise ValueError(f"the value heads must be a multiple of the key heads, not {self.hv} and {self.hk}")
        for name, dim in (("keys", self.dk), ("values", self.dv)):
            if dim < 32 or dim % 32 or dim > 256:
                raise ValueError(f"{name} need 32 to 256 dimensions, a multiple of 32, not {dim}")

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, keys and values of a token."""
        return 2 * self.hk * self.dk + self.hv * self.dv

    def template(self) -> list[tuple[str, int]]:
        """The template arguments that every kernel of this folder takes."""
        return [("DK", self.dk), ("DV", self.dv), ("HK", self.hk), ("HV", self.hv)]


def expect(name: str, array: mx.array, shape: tuple[int, ...], dtype: mx.Dtype | None = None) -> None:
    """Raise a ValueError that says what `array` should be, if it is not."""
    if array.shape != shape or (dtype is not None and array.dtype != dtype):
        wanted = f"shape {shape}" + (f" and dtype {dtype}" if dtype is not None else "")
        raise ValueError(f"{name} needs {wanted}, not {array.shape} {array.dtype}")


def check_spans(spans: mx.array | None, batch: int, length: int) -> mx.array:
    """`spans`, or those of full rows. Raises ValueError unless they are [B, 2] int32."""
    if spans is None:
        return full_spans(batch, length)
    expect("spans", spans, (batch, 2), mx.int32)
    return spans


def check_activations(dtype: mx.Dtype) -> None:
    """Raise a ValueError unless kernels take activations of `dtype`."""
    if dtype not in ACTIVATIONS:
        raise ValueError(f"activations are float32, float16 or bfloat16, not {dtype}")


@dataclass(frozen=True)
class RuleInputs:
    """What the gated delta rule takes, checked: see `scan` for shapes and dtypes. `shape` holds the sizes."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_decay: mx.array
    beta: mx.array
    state: mx.array
    spans: mx.array
    shape: Shape

    @classmethod
    def checked(
        cls,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        log_decay: mx.array,
        beta: mx.array,
        state: mx.array,
        spans: mx.array | None = None,
    ) -> RuleInputs:
        """Inputs that fit together; without spans all tokens count. Raises ValueError for others."""
        if q.ndim != 4 or v.ndim != 4:
            raise ValueError(f"q and v are [B, T, heads, dimensions], not {q.shape} and {v.shape}")
        shape = Shape(q.shape[0], q.shape[1], q.shape[2], v.shape[2], q.shape[3], v.shape[3])
        check_activations(q.dtype)
        expect("k", k, q.shape, q.dtype)
        expect("v", v, (shape.batch, shape.length, shape.hv, shape.dv), q.dtype)
        expect("log_decay", log_decay, (shape.batch, shape.length, shape.hv), mx.float32)
        expect("beta", beta, (shape.batch, shape.length, shape.hv), mx.float32)
        expect("state", state, (shape.batch, shape.hv, shape.dv, shape.dk), mx.float32)
        return cls(q, k, v, log_decay, beta, state, check_spans(spans, shape.batch, shape.length), shape)

    @property
    def tokens(self) -> list[mx.array]:
        """[q, k, v, log_decay, beta]."""
        return [self.q, self.k, self.v, self.log_decay, self.beta]

    def results(self) -> dict:
        """The part of a launch's arguments that says what comes out: y like v, the state like the state."""
        return {"output_shapes": [self.v.shape, self.state.shape], "output_dtypes": [self.q.dtype, mx.float32]}

"""The scan: tokens in order, the state in registers all the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.gated_delta import native, reference
from labkit.kernels.gated_delta.shapes import DELTA, RuleInputs, Shape
from labkit.kernels.launch import Kernel

SCAN = Kernel.from_file(
    Path(__file__).parent / "scan.metal",
    ["q", "k", "v", "log_decay", "beta", "state", "spans", "length"],
    ["y", "state_out"],
    name="gated_delta_scan",
    header=DELTA,
    reference=reference.scan,
    native=native.scan,
)
SCAN_BLOCKED = Kernel.from_file(
    Path(__file__).parent / "scan_blocked.metal",
    ["q", "k", "v", "log_decay", "beta", "state", "spans", "length"],
    ["y", "state_out"],
    name="gated_delta_scan_blocked",
    reference=reference.scan,
)


@dataclass(frozen=True)
class Layout:
    """How a threadgroup of the scan holds its part of a head's state.

    Attributes:
        lanes: that share a column: 32 is the plain form (one column a simdgroup and step), fewer is packed.
        columns: that each group of lanes carries at once; their sums are independent, which hides latency.
        simdgroups: of a threadgroup. tokens: staged together.
    """

    lanes: int = 8
    columns: int = 2
    simdgroups: int = 4
    tokens: int = 16

    @property
    def width(self) -> int:
        """Columns of the state that a threadgroup holds."""
        return self.simdgroups * (32 // self.lanes) * self.columns

    def fits(self, shape: Shape) -> bool:
        """Whether it divides a head of this shape."""
        staged = self.tokens * (2 * shape.dk + self.width + 4) * 4
        return (
            shape.dk % self.lanes == 0
            and shape.dv % self.width == 0
            and self.tokens % self.simdgroups == 0
            and staged <= 32 * 1024
        )


PLAIN = Layout(lanes=32, columns=1, simdgroups=4)
PACKED = Layout(lanes=8, columns=2, simdgroups=4)
FAST = Layout(lanes=8, columns=1, simdgroups=4)


def scan_layout(shape: Shape) -> Layout:
    """Eight lanes a column, with fewer tokens staged where a wide head would exceed 32 KB of threadgroup memory.

    H200, 4,096 tokens, 32 heads of 128 x 128 (data/measured/h200_gated_delta.json), lanes x columns: 8x1 and 16x2 1.25
    ms, 4x1 1.27, 8x2 1.46, 16x4 1.53, 32x4 1.62, 32x1 2.56. Two columns a lane halve the reads of staged keys, but also
    the threadgroups, to one of four simdgroups on each multiprocessor: too few to hide a token's chain of sums.
    """
    return FAST if FAST.fits(shape) else Layout(lanes=8, columns=1, simdgroups=4, tokens=8)


def scan_call(rule: RuleInputs, layout: Layout | None = None) -> dict:
    """The arguments of `SCAN` for `scan`. Raises ValueError for a layout that does not divide the heads."""
    shape = rule.shape
    layout = layout or scan_layout(shape)
    if not layout.fits(shape):
        raise ValueError(f"{layout} does not divide heads of {shape.dk} x {shape.dv}")
    return {
        "inputs": [*rule.tokens, rule.state, rule.spans, shape.length],
        "template": [
            ("T", rule.q.dtype),
            *shape.template(),
            ("LANES", layout.lanes),
            ("COLS", layout.columns),
            ("SIMDGROUPS", layout.simdgroups),
            ("TOKENS", layout.tokens),
        ],
        "grid": (shape.dv // layout.width * 32 * layout.simdgroups, shape.batch * shape.hv, 1),
        "threadgroup": (32 * layout.simdgroups, 1, 1),
        **rule.results(),
    }


def scan_blocked_call(rule: RuleInputs, tokens: int = 32) -> dict:
    """The arguments of `SCAN_BLOCKED`: the state lies in device memory between blocks of `tokens`."""
    shape = rule.shape
    width = 32 if shape.dk <= 192 else 16  # columns whose state fits into threadgroup memory
    return {
        "inputs": [*rule.tokens, rule.state, rule.spans, shape.length],
        "template": [("T", rule.q.dtype), *shape.template(), ("WIDTH", width), ("THREADS", 128), ("TOKENS", tokens)],
        "grid": (shape.dv // width * 128, shape.batch * shape.hv, 1),
        "threadgroup": (128, 1, 1),
        **rule.results(),
    }


@takes_arrays
def scan_blocked(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    spans: mx.array | None = None,
    *,
    tokens: int = 32,
    target: str | None = None,
) -> tuple[mx.array, mx.array]:
    """`scan` with the state in device memory: the baseline of what registers save.

    It moves the state twice for each `tokens` tokens: at 2,048 tokens and 32 heads of 128 x 128, 256 MiB. Arguments,
    results and errors are those of `scan`.
    """
    rule = RuleInputs.checked(q, k, v, log_decay, beta, state, spans)
    return tuple(SCAN_BLOCKED(**scan_blocked_call(rule, tokens), target=target))


@takes_arrays
def scan(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    log_decay: mx.array,
    beta: mx.array,
    state: mx.array,
    spans: mx.array | None = None,
    *,
    layout: Layout | None = None,
    target: str | None = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule over the tokens of each row, in order.

    With g = exp(log_decay): S_t = g_t S_(t-1) + beta_t (v_t - g_t S_(t-1) k_t) k_t^T and y_t = S_t q_t. Tokens give the
    same bits however a sequence is cut into calls.

    Args:
        q, k: [B, T, Hk, Dk], float32, float16 or bfloat16; normalised, the factor Dk^-0.5 already in q.
        v: [B, T, Hv, Dv], same dtype; Hv is a multiple of Hk, and value head h reads key head h // (Hv / Hk).
        log_decay, beta: [B, T, Hv], float32; log_decay at most 0.
        state: [B, Hv, Dv, Dk], float32. Dk and Dv are multiples of 32, at most 256.
        spans: [B, 2] int32, the tokens of each row that count (`row_spans`); all without it.
        layout: how threadgroups hold the state; by default chosen by `scan_layout`.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        y [B, T, Hv, Dv] in q's dtype, zero where a token does not count, and the new state; a row without tokens keeps
        its state bit for bit.

    Raises:
        ValueError: shapes or dtypes that do not fit.

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (arXiv 2412.06464), section 3.
    """
    return run_scan(RuleInputs.checked(q, k, v, log_decay, beta, state, spans), layout, target)


def run_scan(rule: RuleInputs, layout: Layout | None = None, target: str | None = None) -> tuple[mx.array, mx.array]:
    """`scan` of inputs that were checked."""
    return tuple(SCAN(**scan_call(rule, layout), target=target))

"""What the kernels are held to on an H200: bounds, and each way to do the work, labkit's, MLX's and torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from labkit.kernels.attention import bench as attention
from labkit.kernels.attention import decode_rows, prefill_attention
from labkit.kernels.device_clock import Calls
from labkit.kernels.gated_delta import bench as delta
from labkit.kernels.gated_delta.chunks import Tensor, chunked
from labkit.kernels.gated_delta.recurrence import FAST, scan
from labkit.kernels.grouped_matmul import EXPERT_GATE_UP, choose_tile, expert_gate_up_call
from labkit.kernels.grouped_matmul import bench as grouped
from labkit.kernels.grouped_matmul.gates import grouped as sorted_rows
from labkit.kernels.quantized_matmul import Packed, quantized_matmul
from labkit.kernels.quantized_matmul import bench as product
from labkit.kernels.queued import copies_for

UNITS = {"TB/s": 1e6, "TFLOP/s": 1e6, "us": 1.0, "ms": 1e3}


@dataclass(frozen=True)
class Side:
    """One way to do a line's work.

    Attributes:
        calls: over buffers beyond the L2. work: bytes (TB/s) or operations (TFLOP/s) of a call.
        launches: of one timing. torch: whether the calls are torch's. recorded: whether the profiler may look on.
    """

    calls: Calls
    work: float = 1.0
    launches: int = 64
    torch: bool = False
    recorded: bool = True


@dataclass(frozen=True)
class Line:
    """A kernel and its bounds, in `unit`: rates from below, times from above.

    Attributes:
        predicted_us: before any run. sides: makes "labkit", "mlx" and, where there is one, "torch".
    """

    name: str
    unit: str
    at_least: float
    aim: float
    floor: float
    predicted_us: float
    sides: Callable[[], dict[str, Side]]

    def value(self, us: float, work: float) -> float:
        """Microseconds of a call in the line's unit."""
        return work / us / UNITS[self.unit] if "/" in self.unit else us / UNITS[self.unit]

    def verdict(self, value: float | None) -> str | None:
        """ "aim", "at least" or "missed"; None where nothing was measured."""
        if value is None:
            return None
        reached = (lambda bound: value >= bound) if "/" in self.unit else (lambda bound: value <= bound)
        return "aim" if reached(self.aim) else "at least" if reached(self.at_least) else "missed"


def _product(rows: int, outputs: int) -> dict[str, Side]:
    first = product.random_words(outputs, product.K)
    copies = copies_for(first.nbytes)
    packs = [first] + [Packed(*(a + mx.zeros_like(a) for a in first.arrays)) for _ in range(copies - 1)]
    x = mx.random.normal((rows, product.K)).astype(mx.bfloat16)
    mx.eval(x, *(pack.arrays for pack in packs))

    def mlx(pack: Packed) -> list[mx.array]:
        return [mx.quantized_matmul(x, *pack.arrays, transpose=True, group_size=64, bits=4)]

    side = partial(Side, work=first.nbytes, launches=32 if first.nbytes > 1e8 else 128)
    return {
        "labkit": side([lambda p=p: [quantized_matmul(x, p)] for p in packs]),
        "mlx": side([partial(mlx, p) for p in packs]),
        **_torch(side, partial(product.torch_int4_calls, rows, outputs, product.K, copies)),
    }


def _torch(side: Callable[..., Side], calls: Callable[[], Calls | None]) -> dict[str, Side]:
    made = product.attempt("torch", calls)
    return {"torch": side(made, torch=True)} if made else {}


def _experts(tokens: int, skew: float) -> dict[str, Side]:
    """Gate and up as one launch; MLX's and torch's are of one projection, on rows that are sorted already."""
    k, experts = grouped.TOPK, grouped.EXPERTS
    gate, up = (product.random_words(grouped.INNER, grouped.HIDDEN, experts) for _ in "gu")
    indices = grouped.choices(tokens, skew)
    tile = choose_tile(indices.size, experts)
    order, blocks = sorted_rows(indices, experts, tile)
    x = mx.random.normal((tokens, grouped.HIDDEN)).astype(mx.bfloat16)
    spread = x[order // k][:, None]
    which = mx.array(indices.reshape(-1))[order]
    mx.eval(gate.arrays, up.arrays, order, blocks, spread, which)
    call = expert_gate_up_call(x, gate, up, order, blocks, k, "tensor", tile=tile)
    options = {"transpose": True, "group_size": 64, "bits": 4, "sorted_indices": True}
    operations = 2 * indices.size * grouped.HIDDEN * grouped.INNER
    side = partial(Side, work=operations, launches=8)
    return {
        "labkit": side([partial(EXPERT_GATE_UP["tensor"], **call)], work=2 * operations),
        "mlx": side([lambda: [mx.gather_qmm(spread, *gate.arrays, rhs_indices=which, **options)]], launches=4),
        **_torch(side, lambda: grouped.torch_grouped_calls(np.bincount(indices.reshape(-1), minlength=experts))),
    }


def _decode(columns: int) -> dict[str, Side]:
    nbytes = 2 * 2 * attention.KV_HEADS * attention.WIDTH * columns
    sets = [(one[0], one[0][:, :, 0], *one[1:]) for one in attention.random_tensors(columns, 1, copies_for(nbytes))]
    first, last = mx.array([0], dtype=mx.int32), mx.array([columns], dtype=mx.int32)
    mx.eval(sets, first, last)
    scale = attention.SCALE

    def ours(_, queries: mx.array, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [decode_rows(queries, keys, values, first, last, scale=scale)]

    def mlx(queries: mx.array, _, keys: mx.array, values: mx.array) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale)]

    return {
        "labkit": Side([partial(ours, *one) for one in sets], nbytes),
        "mlx": Side([partial(mlx, *one) for one in sets], nbytes, 16),
        **_torch(partial(Side, work=nbytes), partial(attention.torch_calls, columns, 1)),
    }


def _prefill(length: int) -> dict[str, Side]:
    operations = 2 * 2 * attention.HEADS * attention.WIDTH * length * (length + 1) // 2
    sets, start = attention.random_tensors(length, length, 3), mx.array([0], dtype=mx.int32)
    scale = attention.SCALE

    def mlx(one: Sequence[mx.array]) -> list[mx.array]:
        return [mx.fast.scaled_dot_product_attention(*one, scale=scale, mask="causal")]

    side = partial(Side, work=operations, launches=4)
    return {
        "labkit": side([lambda one=one: [prefill_attention(*one, start, scale=scale)] for one in sets]),
        "mlx": side([partial(mlx, one) for one in sets]),
        **_torch(side, partial(attention.torch_calls, length, length)),
    }


def _delta(form: Callable, length: int) -> dict[str, Side]:
    """Chained through values and state, so that none overlaps the next. torch has no op of it."""
    q, k, v, log_decay, beta, state = delta.random_inputs(length)
    decay = mx.exp(log_decay)
    ours = delta.chain(lambda last: form(q, k, last[0], log_decay, beta, last[1]), (v, state))
    # A loop over tokens: tens of thousands of launches, which would fill the profiler's trace.
    mlx = [lambda: mx.fast.gated_delta_update(q, k, v, decay, beta, state)]
    return {"labkit": Side(ours, launches=4), "mlx": Side(mlx, launches=1, recorded=False)}


def _lines() -> tuple[Line, ...]:
    few = {(rows, outputs): predicted for rows, outputs, predicted in product.FEW_ROWS_SIZES}
    experts = 4 * 4096 * grouped.TOPK * grouped.HIDDEN * grouped.INNER / grouped.PREDICTED_TFLOPS[64] / 1e6
    tokens, columns = dict(attention.PREFILL_SIZES), dict(attention.DECODE_SIZES)
    split = Tensor(split=True)
    return (
        Line("GEMV, N=12288", "TB/s", 1.6, 2.4, 4.3, few[1, 12288], partial(_product, 1, 12288)),
        Line("GEMV, N=248320", "TB/s", 2.8, 3.6, 4.3, few[1, 248320], partial(_product, 1, 248320)),
        Line("4 rows, N=12288", "us", 25, 12, 4, few[4, 12288], partial(_product, 4, 12288)),
        Line("experts, 4096 tokens, even", "TFLOP/s", 100, 280, 700, experts, partial(_experts, 4096, 0.0)),
        Line("experts, 4096 tokens, skewed", "TFLOP/s", 100, 280, 700, experts, partial(_experts, 4096, 1.0)),
        Line("decode attention, 128K", "TB/s", 2.0, 3.2, 4.3, columns[131072], partial(_decode, 131072)),
        Line("DeltaNet scan, T=4096", "ms", 1.5, 0.6, 0.3, delta.LAYOUTS[FAST], partial(_delta, scan, 4096)),
        Line(
            *("DeltaNet chunked, T=4096", "ms", 1.5, 0.35, 0.3, delta.CHUNKS[split]),
            partial(_delta, partial(chunked, tensor=split), 4096),
        ),
        Line("prefill attention, 8192 causal", "TFLOP/s", 150, 300, 700, tokens[8192], partial(_prefill, 8192)),
    )


LINES = _lines()

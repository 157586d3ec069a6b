"""Gated DeltaNet at Qwen3.6-35B-A3B's shape, every layout that could win, beside its floors and what else computes it.

A row's `us` is that of many launches queued in one evaluation, divided by their number: launch cost is inside as far as
the device waits for it, `build_us` of Python to build the graph is not. `device_us`, where available, is the
device's alone, and the rates are its. Launches are chained through the state or the tail, as in a model, so that none
overlaps the next; `prepare` alone is not (its 2,048 threadgroups fill the device anyway).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial

import mlx.core as mx
import numpy as np

from labkit.kernels.device_clock import Calls, device_times, with_device_time
from labkit.kernels.gated_delta.chunks import PREPARE_MMA, Tensor, chunked, prepare_mma_call
from labkit.kernels.gated_delta.conv import scan_inputs
from labkit.kernels.gated_delta.float64 import in_float64, relative_error
from labkit.kernels.gated_delta.gates import layer_inputs
from labkit.kernels.gated_delta.gates import scan_inputs as random_scan_inputs
from labkit.kernels.gated_delta.norm import gated_norm
from labkit.kernels.gated_delta.recurrence import FAST, PACKED, PLAIN, Layout, scan, scan_blocked
from labkit.kernels.gated_delta.shapes import RuleInputs
from labkit.kernels.gated_delta.step import decode_step

HK, HV, DIM = 16, 32, 128
CHANNELS = 2 * HK * DIM + HV * DIM
COPY_RATE = 4.3e12
"""Bytes a second of a device-to-device copy on an H200, measured."""
FP32_RATE = 132 * 128 * 1.755e9
"""Fused multiply-adds a second on an H200's CUDA cores."""

LAYOUTS = {
    FAST: 800,
    PACKED: 550,
    Layout(16, 4, 4): 600,
    Layout(16, 2, 4): 650,
    Layout(4, 1, 4): 800,
    Layout(32, 4, 4): 900,
    PLAIN: 3000,
}
"""Layouts of the scan, and the predicted time of each at 4,096 tokens in microseconds. The floor is 293: four
instructions for each of the state's 524,288 values a token. Eight lanes a column balance it: reads of staged keys and
queries cost 1 / (32 columns) each, shuffles log2(lanes), and both share one pipe; four warps on a multiprocessor leave
latency of about 100 cycles a token."""

CHUNKS = {Tensor(64, 4, True): 330, Tensor(64, 2, True): 350, Tensor(64, 4): 150, Tensor(64, 2): 170}
"""Forms of the chunked kernels, and the predicted time of each: 24 GFLOP of bf16 products at about a tenth of the peak
in the scan over chunks (90), and 116 MB written by `prepare` (60); with remainders 2.4 times the products and 164
MB."""

TIME_LIMIT = 55.0
"""Seconds after which `rows` starts nothing new. What matters most stands first; most of the time is compiling."""


def rows(quick: bool = True) -> list[dict]:
    """Time everything; a variant that fails becomes a row that says why.

    Returns:
        Rows with name, shape, us (median), predicted_us, floor_us, GB/s where bytes bound it, and error against float64
        where one is taken.
    """
    found, begin = [], time.perf_counter()
    for name, shape, measure in _problems(quick):
        row = {"name": name, "shape": shape}
        if time.perf_counter() - begin > TIME_LIMIT:
            row["failed"] = "not started: time was up"
        else:
            try:
                row |= measure()
            except Exception as error:  # a variant that one machine refuses must not hide the others
                row["failed"] = f"{type(error).__name__}: {error}"[:300]
        found.append(row)
        print(row, flush=True)
    return found


def chained(run: Callable[[object], object], first: object, count: int, rounds: int) -> dict:
    """Median microseconds of `run`, which takes what it gave last."""

    def build() -> object:
        value = first
        for _ in range(count):
            value = run(value)
        return value

    return _alone(_queued(build, count, rounds), chain(run, first))


def chain(run: Callable[[object], object], first: object) -> Calls:
    """One call, which gives `run` what it gave last."""
    last = first

    def call() -> object:
        nonlocal last
        last = run(last)
        return last

    return [call]


def _alone(row: dict, calls: Calls, launches: int = 8) -> dict:
    """A row with the device's own time of one of the calls."""
    return with_device_time(row, device_times({"": calls}, launches=launches).get(""))


def _queued(build: Callable[[], object], count: int, rounds: int) -> dict:
    """Median microseconds that each of the `count` calls of which `build` makes a graph takes to evaluate, and to
    build."""

    def once() -> tuple[float, float]:
        begin = time.perf_counter()
        graph = build()
        built = time.perf_counter()
        mx.eval(graph)
        return (time.perf_counter() - built) / count * 1e6, (built - begin) / count * 1e6

    once(), once()
    times, builds = zip(*(once() for _ in range(rounds)), strict=True)
    row = {"us": round(statistics.median(times), 2), "spread": round(max(times) / min(times), 3)}
    return row | {"build_us": round(statistics.median(builds), 2)}


Problem = tuple[str, str, Callable[[], dict]]


def _problems(quick: bool) -> Iterator[Problem]:
    count, rounds = (4, 3) if quick else (8, 7)
    yield from _forms(4096, list(LAYOUTS)[:1], list(CHUNKS)[::2], count, rounds)
    shape = _shape(4096)
    yield "chunked: prepare alone", shape, partial(_prepare, 4096, 60, count, rounds)
    yield "conv, norms and gates", shape, partial(_conv, 4096, 45, count, rounds)
    yield "gated norm", shape, partial(_norm, 4096, 30, count, rounds)
    for batch, tokens, predicted in ((1, 1, 6), (8, 1, 10), (32, 1, 33), (1, 4, 9), (8, 4, 14)):
        yield (
            "decode step",
            f"B={batch} T={tokens} Hk{HK} Hv{HV} bf16",
            partial(_step, batch, tokens, predicted, rounds),
        )
    for length in (128, 256, 512, 1024):  # where the chunked form overtakes the scan
        yield from _forms(length, list(LAYOUTS)[:1], list(CHUNKS)[:1], count, rounds)
    yield "mx.fast.gated_delta_update", shape, partial(_mlx, 4096)
    yield "flash-linear-attention's Triton", shape, partial(_fla, 4096, rounds)
    yield from _forms(4096, list(LAYOUTS)[1:], list(CHUNKS)[1::2], count, rounds)
    yield "scan blocked (baseline)", shape, partial(_scan, 4096, scan_blocked, 5000, 1, 3)


def _forms(length: int, layouts: list[Layout], chunks: list[Tensor], count: int, rounds: int) -> Iterator[Problem]:
    share = length / 4096
    for layout in layouts:
        measure = partial(_scan, length, partial(scan, layout=layout), LAYOUTS[layout] * share, count, rounds)
        yield f"scan {layout}", _shape(length), measure
    for tensor in chunks:
        form = partial(chunked, tensor=tensor)
        yield (
            f"chunked {tensor}",
            _shape(length),
            partial(_scan, length, form, max(25, CHUNKS[tensor] * share), count, rounds),
        )


def _shape(length: int) -> str:
    return f"T={length} Hk{HK} Hv{HV} {DIM}x{DIM} bf16"


def random_inputs(length: int) -> list[mx.array]:
    """q, k, v, log_decay, beta and state of one row, evaluated."""
    mx.random.seed(0)
    inputs = random_scan_inputs(1, length, HK, HV, DIM, DIM, mx.bfloat16)
    mx.eval(inputs)
    return inputs


def _scan(length: int, form: Callable, predicted: float, count: int, rounds: int) -> dict:
    q, k, v, log_decay, beta, state = random_inputs(length)
    row = chained(lambda last: form(q, k, last[0], log_decay, beta, last[1]), (v, state), count, rounds)
    moved = 2 * length * (2 * HK + 2 * HV) * DIM + 8 * HV * DIM * DIM + 8 * length * HV
    floor = 4 * length * HV * DIM * DIM / FP32_RATE * 1e6
    row |= {"predicted_us": predicted, "floor_us": round(floor, 1), "bytes_floor_us": round(moved / COPY_RATE * 1e6, 1)}
    row["ns_per_token"] = round(row["us"] * 1e3 / length, 1)
    return row | _errors(form)


def _errors(form: Callable) -> dict:
    """Root-mean-square error against float64, as a share of the values' own; 1.7e-3 is bf16's rounding of y."""
    inputs, want_y, want_state = _exact()
    y, state = form(*inputs)
    return {"error_y": relative_error(y, want_y), "error_state": relative_error(state, want_state)}


@cache
def _exact() -> tuple[list[mx.array], np.ndarray, np.ndarray]:
    inputs = random_inputs(200)
    return inputs, *in_float64(*inputs)


def _prepare(length: int, predicted: float, count: int, rounds: int) -> dict:
    call = prepare_mma_call(RuleInputs.checked(*random_inputs(length)), Tensor())
    row = chained(lambda last: [*last, PREPARE_MMA(**call)[3]], [], count, rounds)
    moved = length * (2 * HK + HV) * DIM * 2 + -(-length // 64) * HV * 57856
    return row | {"predicted_us": predicted, "floor_us": round(moved / COPY_RATE * 1e6, 1), "GB/s": _rate(moved, row)}


def _rate(moved: int, row: dict) -> float:
    return round(moved / row.get("device_us", row["us"]) / 1e3, 1)


def _layer(batch: int, length: int) -> dict[str, mx.array]:
    mx.random.seed(0)
    given = layer_inputs(batch, length, HK, HV, DIM, DIM, mx.bfloat16)
    mx.eval(given)
    return given


def _conv(length: int, predicted: float, count: int, rounds: int) -> dict:
    given = _layer(1, length)
    rest = [given[name] for name in ("weight", "a_log", "dt_bias")]
    tokens = [given[name] for name in ("qkv", "a", "b")]
    run = lambda last: scan_inputs(*tokens, last[5], *rest, heads=(HK, HV), dims=(DIM, DIM))
    row = chained(run, [*[None] * 5, given["tail"]], count, rounds)
    moved = 2 * length * CHANNELS * 2 + length * HV * 12
    return row | {"predicted_us": predicted, "floor_us": round(moved / COPY_RATE * 1e6, 1), "GB/s": _rate(moved, row)}


def _norm(length: int, predicted: float, count: int, rounds: int) -> dict:
    given = _layer(1, length)
    run = lambda y: gated_norm(y, given["z"], given["norm_weight"], 1e-6)
    row = chained(run, given["z"] + 1, count, rounds)
    moved = 3 * length * HV * DIM * 2
    return row | {"predicted_us": predicted, "floor_us": round(moved / COPY_RATE * 1e6, 1), "GB/s": _rate(moved, row)}


def _step(batch: int, tokens: int, predicted: float, rounds: int) -> dict:
    given = _layer(batch, tokens)
    fixed = {name: given[name] for name in given if name not in ("state", "tail")}
    # Forty layers' states in turn: more than the L2 holds.
    states = [given["state"] + 0 for _ in range(40)]
    mx.eval(states)

    def run(last):
        at, tail, out = last
        out, states[at % 40], tail = decode_step(
            **fixed, state=states[at % 40], tail=tail, eps=1e-6, heads=(HK, HV), dims=(DIM, DIM)
        )
        return at + 1, tail, out

    def build() -> list:
        last = (0, given["tail"], None)
        for _ in range(120):
            last = run(last)
        return [states, last[1:]]

    row = _alone(_queued(build, 120, rounds), chain(run, (0, given["tail"], None)), launches=80)
    moved = batch * (8 * HV * DIM * DIM + tokens * (CHANNELS + 2 * HV * DIM) * 2 + 12 * CHANNELS)
    return row | {"predicted_us": predicted, "floor_us": round(moved / COPY_RATE * 1e6, 1), "GB/s": _rate(moved, row)}


def _mlx(length: int) -> dict:
    q, k, v, log_decay, beta, state = random_inputs(length)
    decay = mx.exp(log_decay)
    step = lambda last: mx.fast.gated_delta_update(q, k, last[0], decay, beta, last[1])
    return _queued(lambda: step((v, state)), 1, 1)  # its launches would fill the profiler's trace: no `device_us`


def _fla(length: int, rounds: int) -> dict:
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, log_decay, beta, _ = (torch.tensor(np.array(x.astype(mx.float32))).cuda() for x in random_inputs(length))
    q, k = (x.repeat_interleave(HV // HK, dim=2) for x in (q, k))
    q, k, v, beta = (x.bfloat16() for x in (q * DIM**0.5, k, v, beta))
    run = lambda: chunk_gated_delta_rule(q, k, v, log_decay, beta, output_final_state=True)
    for _ in range(5):
        run()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 10 * 1e6)
    row = {"us": round(statistics.median(times), 2), "spread": round(max(times) / min(times), 3)}
    return _alone(row, [run])


if __name__ == "__main__":
    rows()

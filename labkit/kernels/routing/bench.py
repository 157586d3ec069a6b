"""Routing's forms against each other, MLX's operations, torch's, and the host that reads the counts back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import numpy as np

from labkit.kernels.device_clock import Calls, add_device_times
from labkit.kernels.quantized_matmul.bench import COPY_RATE, attempt, print_rows, torch_us
from labkit.kernels.queued import queued
from labkit.kernels.routing import reference, route
from labkit.kernels.routing.launches import (
    CHOOSE_EXPERTS,
    GROUP_ROWS,
    ROUTE_FEW,
    choose_experts_call,
    group_rows_call,
    max_blocks,
    route_few_call,
)

EXPERTS, K, TILE = 256, 8, 32

# (tokens, skew, tokens a block, threads to choose, threads to group); None is what `route` takes.
MANY = (
    (512, 0.0, None, 512, 1024),
    (4096, 0.0, None, 512, 1024),
    (4096, 1.0, None, 512, 1024),
    (4096, 0.0, 32, 256, 512),
    (4096, 0.0, 32, 1024, 1024),
    (4096, 0.0, 64, 512, 1024),
    (8192, 0.0, None, 512, 1024),
    (8192, 0.0, 32, 256, 1024),
    (65536, 0.0, None, 512, 1024),
)

# Predicted before any run, in microseconds, 3.5 us of launch inside where that is more: 700 instructions of a simdgroup
# for each token chosen; grouping reads all counts in each threadgroup and compares each assignment with its block.
PREDICTED = {
    "route_few": {1: 4, 8: 4, 32: 5},
    "choose_experts": {512: 4, 4096: 5, 8192: 8, 65536: 50},
    "group_rows": {512: 4, 4096: 7, 8192: 9, 65536: 110},
}


def logits_of(tokens: int, skew: float = 0.0) -> mx.array:
    """[tokens, EXPERTS] bf16 whose top-k loads fall as 1 / rank^skew."""
    rng = np.random.default_rng(tokens)
    load = -skew * np.log(np.arange(1, EXPERTS + 1))
    return mx.array((load + rng.gumbel(size=(tokens, EXPERTS))).astype(np.float32)).astype(mx.bfloat16)


def rows(quick: bool = True) -> list[dict]:
    """One row a kernel, size and configuration. `us` has the host's cost of a launch (about 3.5 us) inside;
    `device_us`, where it can be had, has not, and the rates are its. What fails is printed and left out."""
    rounds = 3 if quick else 9
    found = []
    for tokens in PREDICTED["route_few"]:
        found += attempt(f"route_few {tokens}", lambda: _few(tokens, rounds)) or []  # noqa: B023
    for configuration in MANY:
        found += attempt(f"routing {configuration}", lambda: _many(*configuration, rounds)) or []  # noqa: B023
    for tokens in (1, 512, 4096):
        found += attempt(f"whole routing {tokens}", lambda: _whole(tokens, rounds)) or []  # noqa: B023
    return found


def _few(tokens: int, rounds: int) -> list[dict]:
    logits = logits_of(tokens)
    calls = [route_few_call(logits + 0, K, None, "softmax", None, True, 1.0, TILE) for _ in range(8)]
    wrong = _differences(ROUTE_FEW(**calls[0]), reference.route_few(ROUTE_FEW.launch(**calls[0])))
    work = [partial(ROUTE_FEW, **c) for c in calls]
    seconds = queued(work, launches=128, rounds=rounds)
    nbytes = tokens * (2 * EXPERTS + 16 * K) + 4 * EXPERTS + 16 * max_blocks(tokens * K, EXPERTS, TILE)
    row = _row("route_few", f"{tokens} tokens", "", seconds, nbytes, PREDICTED["route_few"][tokens], wrong)
    return add_device_times([(row, work)])


def _many(tokens, skew, block, choose_threads, group_threads, rounds) -> list[dict]:
    first = logits_of(tokens, skew)
    logits = [first + 0 for _ in range(4)]
    mx.eval(logits)
    chosen = [choose_experts_call(x, K, threads=choose_threads, block=block) for x in logits]
    indices, _, counts = CHOOSE_EXPERTS(**chosen[0])
    mx.eval(indices, counts)
    grouped = group_rows_call(indices, counts, EXPERTS, TILE, threads=group_threads, block=block)
    launches = 64 if tokens < 10_000 else 16
    found = []
    for kernel, calls, nbytes, configuration in (
        (CHOOSE_EXPERTS, chosen, tokens * (2 * EXPERTS + 8 * K) + 4 * counts.size, f"threads {choose_threads}"),
        (GROUP_ROWS, [grouped], 12 * tokens * K + 4 * counts.size, f"threads {group_threads}"),
    ):
        wrong = _differences(kernel(**calls[0]), kernel.reference(kernel.launch(**calls[0])))
        work = [partial(kernel, **c) for c in calls]
        seconds = queued(work, launches=launches, rounds=rounds)
        shape = f"{tokens} tokens, skew {skew:g}"
        configuration += f", block {block or 'chosen'}"
        row = _row(kernel.name, shape, configuration, seconds, nbytes, PREDICTED[kernel.name][tokens], wrong)
        found.append((row, work))
    return add_device_times(found)


def _whole(tokens: int, rounds: int) -> list[dict]:
    """Logits to groups by four ways; per call, everything inside."""
    logits = logits_of(tokens)
    launches = 32

    def mlx() -> list[mx.array]:
        gates = mx.softmax(logits, axis=-1, precise=True)
        indices = mx.argpartition(gates, kth=-K, axis=-1)[..., -K:]
        scores = mx.take_along_axis(gates, indices, axis=-1)
        order = mx.argsort(indices.reshape(-1))
        return [scores / scores.sum(axis=-1, keepdims=True), order, mx.argsort(order)]

    def ours() -> list[mx.array]:
        routed = route(logits, K, TILE)
        return [routed.weights, routed.groups.order, routed.groups.inverse, routed.groups.block_map]

    def host() -> list[mx.array]:
        # The baseline: the device waits while the host learns the counts and lays out the blocks.
        indices, weights, counts = CHOOSE_EXPERTS(**choose_experts_call(logits, K))
        per_expert = np.array(counts).sum(axis=0)
        blocks = [(e, TILE * b) for e in range(EXPERTS) for b in range(-(-int(per_expert[e]) // TILE))]
        order = mx.argsort(indices.reshape(-1))
        outputs = [weights, order, mx.argsort(order), mx.array(blocks)]
        mx.eval(outputs)
        return outputs

    found = []
    for name, work in (("route", ours), ("mlx softmax, argpartition, argsorts", mlx), ("host reads counts", host)):
        seconds = attempt(name, lambda: _with_building(work, launches, rounds))  # noqa: B023
        if seconds:
            found.append((_row(name, f"{tokens} tokens", "graph building inside", seconds, 0), [work]))
    calls = attempt("torch", lambda: _torch_calls(tokens))
    us = attempt("torch", lambda: torch_us(calls)) if calls else None
    if us:
        found.append((_row("torch topk, sort, bincount", f"{tokens} tokens", "", us / 1e6, 0), calls))
    return add_device_times(found)


def _with_building(work: Callable[[], list[mx.array]], launches: int, rounds: int) -> float:
    import time

    mx.eval(work())
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        mx.eval([work() for _ in range(launches)])
        times.append((time.perf_counter() - begin) / launches)
    return sorted(times)[len(times) // 2]


def _torch_calls(tokens: int) -> Calls | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    logits = torch.randn(tokens, EXPERTS, dtype=torch.bfloat16, device="cuda")

    def work() -> None:
        weights, indices = torch.topk(torch.softmax(logits.float(), dim=-1), K, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        order = torch.sort(indices.flatten(), stable=True).indices
        torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device="cuda"))
        torch.cumsum(torch.bincount(indices.flatten(), minlength=EXPERTS), dim=0)

    return [work]


def _differences(got: list[mx.array], want: list[mx.array]) -> float:
    """Largest difference over all outputs, integers and weights alike."""
    return max(mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item() for a, b in zip(got, want, strict=True))


def _row(name, shape, configuration, seconds, nbytes, predicted=None, error=None) -> dict:
    return {
        "name": name,
        "shape": shape,
        "configuration": configuration,
        "us": 1e6 * seconds,
        "GB/s": nbytes / seconds / 1e9 if nbytes else None,
        "floor_us": 1e6 * nbytes / COPY_RATE if nbytes else None,
        "predicted_us": predicted,
        "error": error,
    }


if __name__ == "__main__":
    print_rows(rows(quick=True))

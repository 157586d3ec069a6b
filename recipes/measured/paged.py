"""Paged caches on this machine: attention through the block table, what growing a pool costs, engines with and without.

    python -m recipes.measured.paged --out data/measured --commit $(git rev-parse --short HEAD) --seconds 150
    python -m recipes.measured.paged --out data/measured --commit $(git rev-parse --short HEAD) --parts D --name cpu

Parts: A attention, paged beside one buffer a row and beside gathering first; B one decode step of a cache (append and
attend) for each way to grow; C appending alone: whole buffer, tail, flush, by sizes; D labkit's engine on mlx-lm's
graph of tiny-hybrid with rectangles and with pages, by turns. A to C want a GPU. The file is written after each part
and problem; a part that fails is reported, and the next one begins.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx

import labkit
from labkit.caches import BatchedContiguous, BatchedPaged, Contiguous, Pages
from labkit.kernels.attention import paged_bench
from labkit.kernels.attention.paged_bench import HEADS, KV_HEADS, SCALE, WIDTH
from labkit.kernels.targets import device_target
from labkit.measure.batching import EngineSide, Workload, sweep_point
from labkit.measure.batching.sides import Contexts
from recipes.measured.table import Table, shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--parts", default="ABC")
    parser.add_argument("--full", action="store_true", help="every problem of part A")
    parser.add_argument("--context", type=int, default=16384, help="tokens a row in part B")
    parser.add_argument("--name", default="h200", help="prefix of the file")
    arguments = parser.parse_args()
    table = Table(arguments.out / f"{arguments.name}_paged.json", arguments.commit, family="paged")
    deadline = time.perf_counter() + arguments.seconds
    parts = {
        "A": lambda: paged_bench.rows(quick=not arguments.full, deadline=deadline),
        "B": lambda: decode_steps(arguments.context, deadline),
        "C": lambda: appends(deadline),
        "D": lambda: engines(deadline),
    }

    def measure(part: str) -> None:
        table.say(f"== part {part}")
        for row in parts[part]():
            table.add({"part": part} | row)
            print("  " + shown(row), flush=True)

    for part in (part for part in parts if part in arguments.parts):
        table.attempt(part, partial(measure, part))
    table.say(f"{len(table.rows)} rows: {table.path.name}")


def _token(rows: int) -> tuple[mx.array, mx.array]:
    return tuple(mx.random.normal((rows, KV_HEADS, 1, WIDTH), dtype=mx.bfloat16) for _ in "kv")


def _filled(kind: str, rows: int, context: int) -> BatchedContiguous | BatchedPaged:
    """A cache of rows of `context` tokens each; "paged T" has tails of T tokens and blocks of 16."""
    prompt = tuple(mx.random.normal((1, KV_HEADS, context, WIDTH), dtype=mx.bfloat16) for _ in "kv")
    if kind == "contiguous":
        serial = [Contiguous() for _ in range(rows)]
        for cache in serial:
            cache.update_and_fetch(*prompt)
        return Contiguous.merge(serial)
    tail = int(kind.split()[1])
    pages = Pages(rows * (context // 16 + 40), 16, tail_tokens=tail)
    batch = BatchedPaged(pages, [0] * rows)
    batch.update_and_fetch(*(mx.repeat(x, rows, axis=0) for x in prompt))
    return batch


KINDS = ("paged 16", "paged 64", "paged 256", "contiguous")
STEPS, CONTIGUOUS_STEPS, WARMING = 300, 32, 8


def decode_steps(context: int, deadline: float) -> Iterator[dict]:
    """One decode step of one layer's cache, append and attend, by turns: tails of up to 256 tokens are flushed on the
    way. Contiguous ones have fewer steps, each of which copies the buffer where a back end writes nothing in place.

    `peak_bytes` is what the cache holds before a step and the most that the step takes on top.

    Predicted before any run: attention as in part A; for "contiguous" two copies of the buffer a token at 0.19 TB/s;
    for pages two small operations, and the pool's copies over tail_tokens - 16 tokens.
    """
    for rows in (1, 8):
        if time.perf_counter() > deadline:
            return
        caches = {kind: _filled(kind, rows, context) for kind in KINDS}
        queries = mx.random.normal((rows, HEADS, 1, WIDTH), dtype=mx.bfloat16)
        token = _token(rows)
        mx.eval(queries, token, [cache.state[:4] for cache in caches.values()])
        times, peaks = {kind: [] for kind in KINDS}, dict.fromkeys(KINDS, 0)
        for step in range(WARMING + STEPS):
            if time.perf_counter() > deadline:
                break
            for kind, cache in caches.items():
                if kind == "contiguous" and step >= WARMING + CONTIGUOUS_STEPS:
                    continue
                seconds, peak = _decode_step(cache, queries, token)
                if step >= WARMING:
                    times[kind].append(seconds)
                    peaks[kind] = max(peaks[kind], peak)
        for kind, measured in times.items():
            if not measured:
                continue
            yield {
                "name": f"decode step, {kind}",
                "rows": rows,
                "context": context,
                "steps": len(measured),
                "mean_us": statistics.mean(measured) * 1e6,
                "median_us": statistics.median(measured) * 1e6,
                "most_us": max(measured) * 1e6,
                "held_bytes": _held(caches[kind]),
                "peak_bytes": peaks[kind],
                "target": device_target(),
            }


def _held(cache: BatchedContiguous | BatchedPaged) -> int:
    return cache.nbytes if isinstance(cache, BatchedContiguous) else cache.rows.nbytes + cache.pages.nbytes


def _decode_step(
    cache: BatchedContiguous | BatchedPaged, queries: mx.array, token: tuple[mx.array, ...]
) -> tuple[float, int]:
    """Seconds of a step, and the bytes at its peak, other caches not counted."""
    held, active = _held(cache), mx.get_active_memory()
    mx.reset_peak_memory()
    begin = time.perf_counter()
    cache.append(*token)
    if isinstance(cache, BatchedContiguous):
        mask = cache.left_padding[:, None, None, None] <= 0
        out = mx.fast.scaled_dot_product_attention(queries, *cache.keys_and_values(), scale=SCALE, mask=mask)
    else:
        out = cache.attend(queries, scale=SCALE)
    mx.eval(out, cache.state[:4])
    seconds = time.perf_counter() - begin
    return seconds, held + max(0, mx.get_peak_memory() - active)


def appends(deadline: float) -> Iterator[dict]:
    """What it costs to write one token, a block of each of 8 rows, or a whole prompt, into buffers of several sizes."""
    for megabytes in (16, 134, 512):
        if time.perf_counter() > deadline:
            return
        blocks = (megabytes << 20) // (KV_HEADS * 16 * WIDTH * 2)
        index = mx.array(list(range(1, 9)), dtype=mx.int32)
        block = mx.random.normal((8, KV_HEADS, 16, WIDTH), dtype=mx.bfloat16)
        row = mx.random.normal((1, KV_HEADS, 1, WIDTH), dtype=mx.bfloat16)

        def scatter(pool: mx.array, index: mx.array = index, block: mx.array = block) -> mx.array:
            pool[index] = block
            return pool

        def update(pool: mx.array, row: mx.array = row) -> mx.array:
            return mx.slice_update(pool, row, mx.array([5, 3]), axes=(0, 2))

        tail = mx.random.normal((8, KV_HEADS, 256, WIDTH), dtype=mx.bfloat16)
        here = (mx.arange(256) == mx.arange(8)[:, None])[:, None, :, None]
        news = mx.random.normal((8, KV_HEADS, 1, WIDTH), dtype=mx.bfloat16)
        ways: dict[str, tuple[Callable[[mx.array], mx.array], mx.array]] = {
            "scatter 8 blocks into the pool": (scatter, mx.zeros((blocks, KV_HEADS, 16, WIDTH), mx.bfloat16)),
            "slice_update of one token in the pool": (update, mx.zeros((blocks, KV_HEADS, 16, WIDTH), mx.bfloat16)),
            "where: one token a row into tails of 256": (lambda x, h=here, n=news: mx.where(h, n, x), tail),
        }
        for name, (way, state) in ways.items():
            mx.eval(state)
            times = []
            for _ in range(12):
                begin = time.perf_counter()
                state = way(state)
                mx.eval(state)
                mx.synchronize()
                times.append(time.perf_counter() - begin)
            yield {
                "name": name,
                "megabytes": megabytes if "pool" in name else state.nbytes / 2**20,
                "us": statistics.median(times[2:]) * 1e6,
                "target": device_target(),
            }


def engines(deadline: float) -> Iterator[dict]:
    """Eight rows that decode, in one rectangle and in pages of 16: equal lengths, then very unequal ones.

    Predicted for a CPU, where pages are gathered before attention: equal tokens a second within a tenth, since
    attention is a small part of a short context; memory as the tokens, plus one layer's rectangle while it is read.
    """
    loaded = labkit.load("tiny-hybrid", graph="adapter")
    contexts = Contexts(loaded.model.layouts)
    sides = [
        EngineSide(loaded, contexts, "pages of 16", kv="paged", block_tokens=16, pool_bytes=1 << 30),
        EngineSide(loaded, contexts, "rectangle"),
    ]
    for workload in (Workload.equal(8, 256, 8), Workload.unequal(8, 2048, 8, spread=64)):
        if time.perf_counter() > deadline:
            return
        for side in sides:
            side.run(replace(workload, answer=2))
        yield from sweep_point(sides, workload, rounds=3).as_rows()


if __name__ == "__main__":
    main()

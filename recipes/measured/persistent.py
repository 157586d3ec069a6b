"""Layers as one launch each on this machine's GPU: the barrier alone, values, a layer's time, tokens a second.

    timeout 300 python -m recipes.measured.persistent --out data/measured/h200_persistent.json --commit SHA

In that order, so that what goes wrong shows at its smallest. A barrier that not everybody reaches is an error after
some ten seconds, and ends the part it is in. The table is written after each row. `--rehearse` goes the same way with
small sizes on this machine's simulator: its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

from labkit.kernels import Kernel, use_target
from labkit.kernels.headers import SHARED
from labkit.kernels.persistent import (
    Attention,
    Cached,
    Delta,
    Sparse,
    full_layer,
    groups_for,
    linear_layer,
    plain,
    sparse_half,
)
from labkit.kernels.quantized_matmul import Packed
from labkit.kernels.registry import Tolerance
from labkit.kernels.targets import target_in_use
from labkit.models.hybrid.packing import held
from recipes.measured.table import Table

EPS = 1e-6
MEETINGS = 1000
PARTS = ("barrier", "values", "layers", "decode")

BARRIER = Kernel(
    "meet_many_times",
    ["x", "N"],
    ["words"],
    """
    Grid grid;
    grid.open(words, threadgroups_per_grid.x, threadgroup_position_in_grid.x, thread_position_in_threadgroup.x,
              thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
    for (int i = 0; i < N; i++) grid.sync();
    if (grid.group == 0 && grid.thread_ == 0) words[2048] = uint(x[0]);
    """,
    header=SHARED,
    resident=True,
)


class Sizes:
    """Of one layer: the full model's, or small ones for a rehearsal."""

    def __init__(self, small: bool):
        self.dim, self.experts, self.top_k, self.inner = (128, 6, 2, 64) if small else (2048, 256, 8, 512)
        self.delta_heads, self.delta_dims = ((1, 2), (32, 64)) if small else ((16, 32), (128, 128))
        self.heads, self.width, self.rotary = ((4, 2), 64, 16) if small else ((16, 2), 256, 64)
        self.columns, self.tail = (64, 8) if small else (4096, 256)
        self.dtype = mx.float32 if small else mx.bfloat16


def packed(n: int, k: int, dtype: mx.Dtype, bits: int = 4, experts: int = 0) -> Packed:
    """Random weights of about 1 / sqrt(k)."""
    lead = (experts,) if experts else ()
    w = mx.random.randint(0, 1 << 31, (*lead, n, k * bits // 32)).astype(mx.uint32)
    scales = (mx.random.uniform(0.5, 1.5, (*lead, n, k // 64)) * k**-0.5 / (1 << bits) * 3).astype(dtype)
    return Packed(w, scales, (scales * -(1 << (bits - 1))).astype(dtype), 64, bits)


def operands(sizes: Sizes, rows: int) -> dict[str, tuple]:
    """The arguments of each operation, but for eps."""
    dim, dtype = sizes.dim, sizes.dtype
    normal = lambda *shape: mx.random.normal(shape).astype(dtype)
    ones = lambda size: mx.random.uniform(0.5, 1.5, (size,)).astype(dtype)
    banks = [packed(n, k, dtype, experts=sizes.experts + 1) for n, k in [(sizes.inner, dim)] * 2 + [(dim, sizes.inner)]]
    router = packed(sizes.experts + 1, dim, dtype, 8)
    sparse = Sparse(ones(dim), router, *banks, sizes.experts, sizes.top_k, 1, True)
    (hk, hv), (dk, dv) = sizes.delta_heads, sizes.delta_dims
    channels, width = 2 * hk * dk + hv * dv, hv * dv
    delta = Delta(
        ones(dim), packed(channels + width + 2 * hv, dim, dtype), normal(channels, 4), mx.random.uniform(0.1, 1, (hv,)),
        mx.random.normal((hv,)), ones(dv), packed(dim, width, dtype), sizes.delta_heads, sizes.delta_dims,
    )  # fmt: skip
    (hq, hkv), head = sizes.heads, sizes.width
    attention = Attention(
        ones(dim), packed(2 * (hq + hkv) * head, dim, dtype), ones(head), ones(head), packed(dim, hq * head, dtype),
        sizes.heads, sizes.rotary, 1e7,
    )  # fmt: skip
    numbers = lambda value, count: mx.array([value] * count, dtype=mx.int32)
    held = sizes.columns - 2
    cached = Cached(
        *(normal(rows, hkv, sizes.columns, head) for _ in range(2)),
        *(normal(rows, hkv, sizes.tail, head) for _ in range(2)),
        numbers(0, rows), numbers(held + 4, rows), numbers(held, 8), numbers(3, 8), numbers(held + 3, rows),
    )  # fmt: skip
    x = normal(rows, dim), normal(rows, dim)
    state = mx.random.normal((rows, hv, dv, dk)) * 0.3
    return {
        "sparse_half": (*x, sparse),
        "linear_layer": (*x, delta, normal(rows, 3, channels), state, sparse),
        "full_layer": (*x, attention, cached, sparse),
    }


OPERATIONS: dict[str, tuple[Callable, Callable]] = {
    "sparse_half": (sparse_half, plain.sparse_half),
    "linear_layer": (linear_layer, plain.linear_layer),
    "full_layer": (full_layer, plain.full_layer),
}


def barrier(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Microseconds of a grid-wide barrier."""
    groups = groups_for(target_in_use())
    meetings = MEETINGS if sizes.columns > 1000 else 5

    def meet(times: int) -> list[mx.array]:
        return BARRIER(
            inputs=[mx.ones((8,)), times], grid=(groups * 128, 1, 1), threadgroup=(128, 1, 1),
            output_shapes=[(4096,)], output_dtypes=[mx.uint32], init_value=0,
        )  # fmt: skip

    none, many = (seconds(partial(meet, times), repeats=1) for times in (0, meetings))
    arrived = meet(meetings)[0][0].item()
    yield {
        "part": "barrier",
        "threadgroups": groups,
        "us": (many - none) / meetings * 1e6,
        "right": arrived == groups * meetings,
    }


def values(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Each operation against its plain form on the same device."""
    bound = Tolerance(5e-5, 5e-5) if sizes.dtype == mx.float32 else Tolerance(6e-2, 4e-2)
    for rows in (1, 2, 8):
        for name, arguments in operands(sizes, rows).items():
            ours, control = (form(*arguments, EPS) for form in OPERATIONS[name])
            off = []
            for got, want in zip(ours, control, strict=True):
                got, want = got.astype(mx.float32), want.astype(mx.float32)
                over = mx.abs(got - want) > bound.absolute + bound.relative * mx.abs(want)
                off.append((mx.abs(got - want).max().item(), over.mean().item()))
            yield {
                "part": "values",
                "operation": name,
                "rows": rows,
                "largest": [largest for largest, _ in off],
                "over": [share for _, share in off],
                # A choice of experts that rounding turns moves one row's y by a lot: a share, not a maximum, is judged.
                "right": all(share < 0.02 for _, share in off),
            }


def layers(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Microseconds of one layer in a chain of them, both forms by turns; each link has weights of its own."""
    links = 12 if sizes.columns > 1000 else 2
    for name, (ours, control) in OPERATIONS.items():
        sets = [operands(sizes, 1)[name] for _ in range(links)]
        mx.eval([a for arguments in sets for a in held(arguments)])

        def chain(form: Callable, sets=sets) -> list[mx.array]:
            update, stream, *_ = sets[0]
            kept = []
            for _, _, *rest in sets:
                stream, update, *left = form(update, stream, *rest, EPS)
                kept += left
            return [stream, update, *kept]

        forms = {label: mx.compile(partial(chain, form)) for label, form in (("one", ours), ("plain", control))}
        if target_in_use() == "simulator":
            forms = {label: partial(chain, form) for label, form in (("one", ours), ("plain", control))}
        taken = {label: [] for label in forms}
        for _ in range(5 if sizes.columns > 1000 else 1):
            for label, form in forms.items():
                taken[label].append(seconds(form, repeats=1) / links * 1e6)
        row = {label: median(times) for label, times in taken.items()}
        yield {"part": "layers", "operation": name, "us": row["one"], "plain_us": row["plain"]}


def decode(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Tokens a second of the full shape with the switch off and on, alternating; None in a rehearsal."""
    if sizes.columns < 1000:
        return
    from labkit.measure.end_to_end import LabkitSide
    from labkit.measure.end_to_end.filled import Filled
    from labkit.measure.end_to_end.subject import open_subject
    from labkit.models.hybrid import Variants

    subject = open_subject("qwen3.6-35b-a3b", graph="specialised")
    models = {switch: subject.with_variants(Variants(persistent=switch)) for switch in ("off", "experts", "layers")}
    for context in (4096, 32768):
        taken: dict[str, list[float]] = {switch: [] for switch in models}
        for turn in range(3):
            for switch, model in models.items():
                filled = Filled(model.layouts, context)
                seconds_a_token, _ = LabkitSide(model).decode(filled, 48, 16 if turn == 0 else 4)
                taken[switch].append(seconds_a_token)
        for switch, times in taken.items():
            yield {
                "part": "decode",
                "context": context,
                "persistent": switch,
                "tokens_a_second": 1 / median(times),
                "turns": [1 / t for t in times],
            }


def seconds(function: Callable[[], list[mx.array]], repeats: int) -> float:
    """The quickest of some runs, after one to warm up."""
    mx.eval(function())
    found = []
    for _ in range(3):
        mx.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            mx.eval(function())
        mx.synchronize()
        found.append((time.perf_counter() - begin) / repeats)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--seconds", type=float, default=240, help="no part begins after so many")
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    table = Table(arguments.out, arguments.commit, seconds=arguments.seconds, rehearsal=arguments.rehearse)
    sizes = Sizes(small=arguments.rehearse)
    mx.random.seed(0)

    def measure(part: str) -> None:
        for row in {"barrier": barrier, "values": values, "layers": layers, "decode": decode}[part](sizes):
            table.add(row)
            table.say(str(row))
            if row.get("right") is False:
                table.say("== wrong: what follows is of no use until this is mended")

    with use_target("simulator") if arguments.rehearse else contextlib.nullcontext():
        for part in arguments.parts or PARTS:
            if table.left < 0:
                table.say(f"== {part}: no time left")
                break
            table.attempt(part, partial(measure, part))


if __name__ == "__main__":
    main()

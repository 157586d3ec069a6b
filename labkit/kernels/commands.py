"""`labkit kernels list | check | trace | bench`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import typer

from labkit.console import JsonOption, fail, show, stderr, table
from labkit.kernels.bench import bench_kernel
from labkit.kernels.check import check_kernel
from labkit.kernels.registry import Entry, dtype_name, find_entries
from labkit.kernels.simulator import CompileError, CompilerMissing
from labkit.kernels.targets import TARGETS, default_target, targets_for
from labkit.kernels.traffic import over_budget, store_budgets, trace

app = typer.Typer(
    help="Device kernels: what exists, whether it passes its gates, what it moves, how fast it is.",
    no_args_is_help=True,
    add_completion=False,
)

Names = Annotated[list[str] | None, typer.Argument(help="Kernels or mechanisms; all by default.")]


@app.command("list")
def list_kernels(names: Names = None, as_json: JsonOption = False) -> None:
    """The kernels, where each can run on this machine, and where it runs by default."""
    rows = [
        {
            "kernel": entry.name,
            "mechanism": entry.mechanism,
            "summary": entry.summary,
            "targets": targets_for(entry.kernel),
            "default": default_target(entry.kernel),
        }
        for entry in _entries(names)
    ]
    shown = table(
        "Kernels",
        ["kernel", "mechanism", "runs here on", "by default", "what it does"],
        [(r["kernel"], r["mechanism"], ", ".join(r["targets"]), r["default"], r["summary"]) for r in rows],
    )
    show({"kernels": rows}, as_json=as_json, render=shown)


@app.command()
def check(
    names: Names = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random inputs; new ones by default.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run every gate of each kernel; exit code 1 if one fails."""
    results = []
    for entry in _entries(names):
        results += check_kernel(entry, seed, progress=lambda what: stderr.print(f"checking {what}", highlight=False))
    failed = [result for result in results if not result.passed]
    rows = [(r.kernel, r.dtype, r.gate, "ok" if r.passed else "FAILED", f"{r.seconds:.2f}", r.detail) for r in results]
    show(
        {"passed": not failed, "gates": [asdict(result) for result in results]},
        as_json=as_json,
        render=table("Gates", ["kernel", "dtype", "gate", "result", "seconds", "detail"], rows),
    )
    if failed:
        fail(f"{len(failed)} of {len(results)} gates failed")


@app.command("trace")
def trace_kernels(
    names: Names = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, float16 or bfloat16; the kernel's first by default.")
    ] = None,
    by_line: Annotated[bool, typer.Option("--by-line", help="Also count by line of the Metal text.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Folder for a picture (SVG) of each kernel's traffic.")] = None,
    store: Annotated[bool, typer.Option("--store", help="Store these counts as the budgets.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Count what each kernel's first case moves, beside its budget."""
    records, shown = [], []
    if picture:
        picture.mkdir(parents=True, exist_ok=True)
    for entry in _entries(names):
        stderr.print(f"tracing {entry.name}", highlight=False)
        chosen = _dtype(entry, dtype)
        try:
            if store:
                store_budgets(entry)
            traffic = trace(entry, chosen)
        except (CompilerMissing, CompileError) as error:
            fail(str(error))
        counts, budget = traffic.summary(), entry.budget(chosen)
        records.append(
            {
                "kernel": entry.name,
                "case": entry.cases[0].label,
                "dtype": dtype_name(chosen),
                "counts": counts,
                "budget": budget,
                "over_budget": over_budget(counts, budget, entry.traffic_slack) if budget else None,
                "buffers": [asdict(flow) for flow in traffic.buffers],
                "by_line": [asdict(flow) for flow in traffic.by_line],
            }
        )
        shown.append(f"\n{entry.name}, {entry.cases[0].label}, {dtype_name(chosen)}\n{traffic}")
        shown.append(table("", ["count", "now", "budget"], [(k, v, (budget or {}).get(k)) for k, v in counts.items()]))
        if by_line:
            lines = [
                (f.line, f.memory, f.direction, f.bytes, f.requests, f"{f.lines_per_request:.2f}", f.text.strip())
                for f in traffic.by_line
            ]
            columns = ["line", "buffer", "", "bytes", "requests", "lines/request", "text"]
            shown.append(table("By line of the Metal text", columns, lines))
        if picture:
            traffic.picture().savefig(picture / f"{entry.name}.svg")
    show({"kernels": records}, as_json=as_json, render=shown)
    if any(record["over_budget"] for record in records):
        fail("a kernel moves more than its budget")


@app.command()
def bench(
    names: Names = None,
    target: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(TARGETS)}; the machine's best by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which kernel and baseline alternate.")] = 7,
    as_json: JsonOption = False,
) -> None:
    """Time each kernel's real sizes against MLX's own operations, by turns in one run.

    On an NVIDIA GPU that torch sees too, the device's own time stands beside that with launches; rates are then its.
    """
    if target is not None and target not in TARGETS:
        fail(f"no kernel target {target!r}; there are {', '.join(TARGETS)}", code=2)
    results = []
    for entry in _entries(names):
        try:
            progress = lambda what: stderr.print(f"timing {what}", highlight=False)
            with contextlib.redirect_stdout(sys.stderr):  # what has no device's time is told there
                results += bench_kernel(entry, target=target, rounds=rounds, progress=progress)
        except RuntimeError as error:
            fail(str(error), code=2)

    def cells(r) -> tuple:
        times = (r.seconds, r.baseline_seconds, *([r.device_seconds, r.baseline_device_seconds] if alone else ()))
        ratios = (r.ratio, *([r.device_ratio] if alone else ()))
        microseconds = [f"{1e6 * t:.1f}" if t else None for t in times]
        rates = [f"{v:.1f}" if v else None for v in (*ratios, r.gigabytes_per_second, r.gigaflops)]
        return (r.kernel, r.problem, r.dtype, r.target, *microseconds, *rates, f"{r.spread:.2f}")

    alone = any(r.device_seconds for r in results)
    columns = ["kernel", "problem", "dtype", "target", "us", "MLX us"]
    columns += ["us alone", "MLX us alone", "times faster", "alone"] if alone else ["times faster"]
    columns += ["GB/s", "GFLOP/s", "spread"]
    records = [asdict(r) | {"ratio": r.ratio, "device_ratio": r.device_ratio} for r in results]
    device = str(mx.default_device())
    rendered = table(f"Measured here ({device}), medians", columns, [cells(r) for r in results])
    show({"device": device, "results": records}, as_json=as_json, render=rendered)


def _entries(names: list[str] | None) -> list[Entry]:
    try:
        return find_entries(names or [])
    except ValueError as error:
        fail(str(error), code=2)


def _dtype(entry: Entry, name: str | None) -> mx.Dtype:
    known = {dtype_name(dtype): dtype for dtype in entry.dtypes}
    if name is None:
        return entry.dtypes[0]
    if name not in known:
        fail(f"kernel {entry.name} has no dtype {name!r}; it has {', '.join(known)}", code=2)
    return known[name]


if __name__ == "__main__":
    app()

"""Registers, spills, shared memory and occupancy of the kernels on an H100 or H200, compiled without one.

    uv sync --inexact --group cuda-compile
    python -m recipes.measured.resources --out data/measured/resources_sm90.json --commit SHA

The launches are those of one decode step and one chunk of a prompt at the full shape, recorded as the CUDA target gets
them, and the benches of every kernel that is in neither. NVIDIA's run-time compiler compiles them as it would for MLX;
`--mlx FOLDER` takes MLX's own headers, out of an unpacked wheel of its CUDA build (slow: they bring CUDA's standard
library), instead of the stand-ins.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from math import prod
from pathlib import Path
from unittest import mock

import mlx.core as mx

from labkit.kernels.cuda_build import compile_cuda, compiler, translation_unit, usage
from labkit.kernels.cuda_build.headers import Headers, mlx_headers
from labkit.kernels.launch import Kernel
from labkit.kernels.registry import all_entries
from labkit.kernels.signature import Launch, threadgroup_size
from labkit.kernels.targets import cuda, use_target
from labkit.measure.end_to_end.filled import Filled
from labkit.measure.end_to_end.subject import open_subject
from labkit.models.hybrid import Variants
from labkit.models.rows import Rows
from recipes.measured.table import Table, shown

SHAPE, LAYERS, CONTEXT, CHUNK = "qwen3.6-35b-a3b", 4, 4096, 2048
MULTIPROCESSORS = 132

Launches = list[tuple[str, Kernel, Launch]]
"""(where it was seen, kernel, launch)"""


@contextlib.contextmanager
def recorded(found: Launches, where: str) -> Iterator[None]:
    """Every launch for CUDA goes into `found`, and gives zeros."""

    def run(kernel: Kernel, launch: Launch) -> list[mx.array]:
        found.append((where, kernel, launch))
        return [mx.zeros(s, d) for s, d in zip(launch.output_shapes, launch.output_dtypes, strict=True)]

    with (
        mock.patch.object(cuda, "run", run),
        mock.patch.object(cuda, "unavailable", return_value=""),
        use_target("cuda"),
    ):
        yield


def launches_of_a_model() -> Launches:
    """Of one decode step, four rows to verify, and one chunk of a prompt, of the first layers of the full shape; and of
    a decode step whose layers are one launch each."""
    found: Launches = []
    subject = open_subject(SHAPE, graph="specialised", layers=LAYERS, dtype=mx.bfloat16)
    model = subject.model
    for where, length in (("decode", 1), ("verify 4", 4), ("prefill", CHUNK)):
        with recorded(found, where):
            caches = Filled(model.layouts, CONTEXT, None).into(model.make_caches())
            model(mx.zeros((1, length), mx.int32), caches, Rows.single(CONTEXT))
    persistent = subject.with_variants(Variants(persistent="layers"))
    with (
        mock.patch("labkit.kernels.persistent.multiprocessors", return_value=MULTIPROCESSORS),
        recorded(found, "decode, a launch a layer"),
    ):
        caches = Filled(persistent.layouts, CONTEXT, None).into(persistent.make_caches())
        persistent(mx.zeros((1, 1), mx.int32), caches, Rows.single(CONTEXT))
    return found


def launches_of_benches(seen: set[str]) -> Launches:
    """The benches of kernels that are not among `seen`; the first case of those without any."""
    found: Launches = []
    for entry in all_entries():
        if entry.name not in seen:
            made = [(b.label, b.make) for b in entry.benches] or [(c.label, c.make) for c in entry.cases[:1]]
            found += [(label, entry.kernel, make(entry.dtypes[-1])) for label, make in made]
    return found


def row(where: str, kernel: Kernel, launch: Launch, headers: Headers | None) -> dict:
    """One launch: what its code takes, and how many of its threadgroups live at once."""
    log = compile_cuda(translation_unit(kernel.text, launch, kernel.cuda), headers).log
    used, group = usage(log), threadgroup_size(launch)
    threads, groups = prod(group), prod(-(-n // t) for n, t in zip(launch.grid, group, strict=True))
    resident = used.groups(threads)
    return {
        "kernel": kernel.name,
        "where": where,
        "template": " ".join(f"{name}={str(value).removeprefix('mlx.core.')}" for name, value in launch.template),
        "threads": threads,
        "threadgroups": groups,
        "registers": used.registers,
        "stack": used.stack,
        "spill_stores": used.spill_stores,
        "spill_loads": used.spill_loads,
        "shared": used.shared,
        "groups_per_multiprocessor": resident,
        "occupancy": round(used.occupancy(threads), 3),
        "rounds": round(groups / (resident * MULTIPROCESSORS), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--mlx", type=Path, help="folder `mlx` of MLX's CUDA build, for its own headers")
    arguments = parser.parse_args()
    headers = mlx_headers(arguments.mlx) if arguments.mlx else None
    launches = launches_of_a_model()
    launches += launches_of_benches({kernel.name for _, kernel, _ in launches})
    table = Table(arguments.out, arguments.commit, shape=SHAPE, context=CONTEXT)
    table.about["device"] = "none: compiled for sm_90a"
    table.about["nvrtc"] = ".".join(map(str, compiler.version()))
    table.about["headers"] = "MLX's own" if headers else "stand-ins"
    seen = set()
    for where, kernel, launch in launches:
        form = (kernel.name, launch.template, launch.output_dtypes, launch.grid, tuple(a.dtype for a in launch.inputs))
        if form in seen:
            continue
        seen.add(form)
        try:
            table.add(row(where, kernel, launch, headers))
        except Exception as error:
            table.add({"kernel": kernel.name, "where": where, "failed": str(error)[:2000]})
        table.say(shown({name: value for name, value in table.rows[-1].items() if name != "template"}))
    table.say(f"{len(table.rows)} launches, {sum(r.get('spill_loads', 0) > 0 for r in table.rows)} with spills")


if __name__ == "__main__":
    main()

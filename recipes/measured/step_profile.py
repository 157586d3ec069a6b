"""The device's time of every kernel in one decode step, from NVIDIA's profiler, with its launch and what it moved.

    python -m recipes.measured.step_profile --out data/measured/h200_step_profile.json --commit SHA

Runs itself under `ncu`, which times each kernel alone: what stands between kernels, and what they overlap, is not in
the sum. The model is the full shape with fewer layers (four are one period of it).
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import glob
import io
import math
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import mlx.core as mx

from recipes.measured.table import Table

SHAPE, LAYERS, CONTEXT = "qwen3.6-35b-a3b", 4, 4096
WARM_UP = 6  # steps before the one that counts: kernels compiled, graphs built
TIME = "gpu__time_duration.sum"
MORE = {
    "dram__bytes_read.sum": "read_bytes",
    "dram__bytes_write.sum": "written_bytes",
    "launch__registers_per_thread": "registers",
    # Reads that cross the bus: of arrays that stand in the host's memory.
    "lts__t_sectors_aperture_sysmem_op_read.sum": "host_sectors",
}
"""Further metrics, by the name of a row's column. A profiler that lacks one gives no table: then the times alone."""
UNITS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3, "Kbyte": 1e3, "Mbyte": 1e6}


def step(layers: int, context: int) -> None:
    """The step under the profiler: everything before it runs with the profiler off."""
    from labkit.measure.end_to_end import LabkitSide
    from labkit.measure.end_to_end.filled import Filled
    from labkit.measure.end_to_end.subject import open_subject

    model = open_subject(SHAPE, graph="specialised", layers=layers).model
    filled = Filled(model.layouts, context)
    tokens = LabkitSide(model)._tokens(filled.into(model.make_caches()), mx.array([1], dtype=mx.int32), context)
    for _ in range(WARM_UP):
        next(tokens)
    mx.synchronize()
    cuda = ctypes.CDLL(_runtime())
    cuda.cudaProfilerStart()
    next(tokens)
    mx.synchronize()
    cuda.cudaProfilerStop()


def _runtime() -> str:
    """The CUDA runtime's library that MLX itself loaded."""
    loaded = re.findall(r"\S*libcudart\S*", Path("/proc/self/maps").read_text())
    return loaded[0] if loaded else glob.glob("/usr/local/cuda/lib64/libcudart.so*")[0]


def read(text: str) -> list[dict]:
    """`ncu --csv` -> one row a kernel name: launches, threads of a launch, microseconds and whatever else, in all."""
    found: dict[str, dict] = defaultdict(lambda: defaultdict(float))
    body = text[text.index('"ID"') :]
    for row in csv.DictReader(io.StringIO(body)):
        metric, unit = row["Metric Name"], row["Metric Unit"]
        if metric != TIME and metric not in MORE:
            continue
        value = float(row["Metric Value"].replace(",", "")) * UNITS.get(unit, 1.0)
        kernel = found[short(row["Kernel Name"])]
        if metric == TIME:
            kernel["launches"] += 1
            kernel["us"] += value
            kernel["threadgroups"], kernel["threads"] = (
                _product(row.get(key, "")) for key in ("Grid Size", "Block Size")
            )
        elif metric == "launch__registers_per_thread":
            kernel["registers"] = value
        else:
            kernel[MORE[metric]] += value
    rows = [{"kernel": name, **{k: _number(v) for k, v in kernel.items()}} for name, kernel in found.items()]
    return sorted(rows, key=lambda row: -row["us"])


def _product(sizes: str) -> int:
    """ "(32, 1, 1)" -> 32; 0 where the profiler does not say."""
    return math.prod(map(int, re.findall(r"\d+", sizes))) if sizes else 0


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 2)


def short(name: str) -> str:
    """A kernel's name without namespaces, templates and the numbers that its build added."""
    bare = re.sub(r"<.*", "", name.split("(")[0]).split("::")[-1].removeprefix("custom_kernel_")
    return re.split(r"_\d", bare)[0]


def profile(arguments: argparse.Namespace, metrics: list[str]) -> subprocess.CompletedProcess:
    """The step under the profiler."""
    command = [
        *("ncu", "--csv", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none"),
        *("--metrics", ",".join(metrics), sys.executable, "-m", "recipes.measured.step_profile", "--step"),
        *("--layers", str(arguments.layers), "--context", str(arguments.context)),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=arguments.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--seconds", type=float, default=120.0, help="stop the profiler after this")
    parser.add_argument("--step", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        return step(arguments.layers, arguments.context)
    if arguments.out is None:
        parser.error("--out says where the table goes")
    ran = profile(arguments, [TIME, *MORE])
    if ran.returncode or '"ID"' not in ran.stdout:
        print(f"without further metrics: {(ran.stdout + ran.stderr)[-300:]}")
        ran = profile(arguments, [TIME])
    if ran.returncode or '"ID"' not in ran.stdout:
        sys.exit(f"the profiler gave no table ({ran.returncode}):\n{ran.stdout[-1500:]}\n{ran.stderr[-1500:]}")
    about = {"shape": SHAPE, "layers": arguments.layers, "context": arguments.context}
    table = Table(arguments.out, arguments.commit, **about)
    table.rows = rows = read(ran.stdout)
    table.write()
    for row in rows:
        launch = f"{row['threadgroups']:5d} of {row['threads']:4d}"
        moved = f"{(row.get('read_bytes', 0) + row.get('written_bytes', 0)) / 1e6:8.2f} MB"
        rest = f"{row.get('registers', 0):3d} registers, {row.get('host_sectors', 0)} sectors of the host's"
        print(f"{row['us']:9.2f} us  {row['launches']:4d} x  {row['kernel']:<28} {launch}  {moved}  {rest}")
    print(f"{sum(row['us'] for row in rows):9.2f} us  {sum(row['launches'] for row in rows):4d} in all")


if __name__ == "__main__":
    main()

"""Registers, stack (spills), shared memory and occupancy of the kernels that a run on an NVIDIA GPU has compiled.

    MLX_PTX_CACHE_DIR=/tmp/ptx python -m pytest -m cuda tests/kernels
    python -m recipes.measured.resources --cache /tmp/ptx --out data/measured/h200_resources.json --commit SHA

MLX keeps what it compiles in that folder. `cuobjdump`, of the CUDA toolkit, reads it; the size of a threadgroup comes
from the kernel's own cases, the limits of a multiprocessor from the chip's compute capability (9.0).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from labkit.kernels.registry import Entry, all_entries
from labkit.kernels.signature import threadgroup_size
from recipes.measured.kernels import conditions

REGISTERS, THREADS, GROUPS, SHARED = 65536, 2048, 32, 233472
"""Of one multiprocessor of compute capability 9.0: registers, threads, threadgroups, bytes of shared memory."""

_USAGE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def usages(text: str) -> Iterator[dict]:
    """What `cuobjdump -res-usage` says of labkit's kernels: function, registers, bytes of stack, shared and local."""
    for name, *numbers in _USAGE.findall(text):
        if "custom_kernel_" in name:
            yield dict(
                zip(("function", "registers", "stack", "shared", "local"), (name, *map(int, numbers)), strict=True)
            )


def kernel_of(function: str, names: list[str]) -> str | None:
    """The registered kernel that a compiled function belongs to: the longest name that it begins with."""
    bare = function.partition("custom_kernel_")[2]
    found = [name for name in names if re.match(rf"{re.escape(name)}(_|$)", bare)]
    return max(found, key=len, default=None)


def occupancy(registers: int, shared: int, threads: int) -> float:
    """Share of a multiprocessor's threads that can live at once; a warp's registers go out in steps of 256."""
    warps = -(-threads // 32)
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    by_shared = SHARED // (shared + 1024) if shared else GROUPS
    return min(by_registers, by_shared, THREADS // (32 * warps), GROUPS) * 32 * warps / THREADS


def rows(cache: Path) -> list[dict]:
    """One row for each compiled function."""
    entries = {entry.name: entry for entry in all_entries()}
    result = {}
    for path in sorted(cache.glob("*custom_kernel_*.ptx")):
        ran = subprocess.run(["cuobjdump", "-res-usage", str(path)], capture_output=True, text=True)
        for usage in usages(ran.stdout):
            name = kernel_of(usage["function"], list(entries))
            if name is None:
                continue
            threads = _threads(entries[name])
            result[usage["function"]] = {
                "kernel": name,
                **usage,
                "threads": threads,
                "occupancy": round(occupancy(usage["registers"], usage["shared"], threads), 3),
            }
    return list(result.values())


def _threads(entry: Entry) -> int:
    group = threadgroup_size(entry.cases[0].make(entry.dtypes[0]))
    return group[0] * group[1] * group[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    arguments = parser.parse_args()
    found = rows(arguments.cache)
    arguments.out.write_text(json.dumps({**conditions(arguments.commit), "rows": found}, indent=1) + "\n")
    for row in found:
        print(
            "  ".join(
                f"{name}={row[name]}" for name in ("kernel", "registers", "stack", "shared", "threads", "occupancy")
            )
        )
    print(f"{len(found)} functions; with a stack: {sum(row['stack'] > 0 for row in found)}")


if __name__ == "__main__":
    main()

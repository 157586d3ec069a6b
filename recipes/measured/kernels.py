"""Run every kernel family's bench on this machine's GPU and keep the tables with what they depend on.

    python -m recipes.measured.kernels --out data/measured --commit $(git rev-parse --short HEAD) [FAMILY ...]

`--commit` is the commit of the tree that runs, taken before the run; say "with uncommitted changes" where there are
some.
A family that fails is reported and skipped; each family's table is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import importlib
import time
import traceback
from pathlib import Path

from recipes.measured.table import Table, shown

FAMILIES = (
    "quantized_matmul",
    "grouped_matmul",
    "attention",
    "gated_delta",
    "routing",
    "sampling",
    "fused",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--full", action="store_true", help="every configuration, not only the quick ones")
    parser.add_argument("--name", default="h200", help="prefix of the files")
    arguments = parser.parse_args()
    for family in arguments.families or FAMILIES:
        begin = time.perf_counter()
        try:
            rows = importlib.import_module(f"labkit.kernels.{family}.bench").rows(quick=not arguments.full)
        except Exception:
            traceback.print_exc()
            continue
        table = Table(arguments.out / f"{arguments.name}_{family}.json", arguments.commit, family=family)
        table.rows = rows
        table.write()
        print(f"== {family}: {len(rows)} rows in {time.perf_counter() - begin:.0f} s", flush=True)
        for row in rows:
            print("  " + shown(row), flush=True)


if __name__ == "__main__":
    main()

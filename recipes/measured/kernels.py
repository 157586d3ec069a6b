"""Run every kernel family's bench on this machine's GPU and keep the tables with what they depend on.

    python -m recipes.measured.kernels --out data/measured --commit $(git rev-parse --short HEAD) [FAMILY ...]

`--commit` is the commit of the tree that runs, taken before the run; say "with uncommitted changes" where there are
some.
A family that fails is reported and skipped; each family's table is written as soon as it is there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import time
import traceback
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

FAMILIES = (
    "quantized_matmul",
    "grouped_matmul",
    "attention",
    "gated_delta",
    "routing",
    "sampling",
    "fused",
)


def conditions(commit: str) -> dict:
    """Device, versions and commit: what a figure must carry."""
    info = mx.device_info()
    found = {"device": info.get("device_name", "unknown"), "commit": commit, "python": platform.python_version()}
    for name in ("mlx", "mlx-lm", "torch", "triton"):
        try:
            found[name] = version(name)
        except Exception:
            found[name] = None
    return found | {"date": time.strftime("%Y-%m-%d")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--full", action="store_true", help="every configuration, not only the quick ones")
    parser.add_argument("--name", default="h200", help="prefix of the files")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for family in arguments.families or FAMILIES:
        begin = time.perf_counter()
        try:
            rows = importlib.import_module(f"labkit.kernels.{family}.bench").rows(quick=not arguments.full)
        except Exception:
            traceback.print_exc()
            continue
        table = {"family": family, **conditions(arguments.commit), "rows": rows}
        path = arguments.out / f"{arguments.name}_{family}.json"
        path.write_text(json.dumps(table, indent=1, default=str) + "\n")
        print(f"== {family}: {len(rows)} rows in {time.perf_counter() - begin:.0f} s", flush=True)
        for row in rows:
            print("  " + "  ".join(f"{k}={_short(v)}" for k, v in row.items()), flush=True)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

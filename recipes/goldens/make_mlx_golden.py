"""Keep what mlx-lm says about the prepared windows in the checkpoint's own bfloat16.

Run in labkit's environment: python -m recipes.goldens.make_mlx_golden JOB TARGET (see README.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import labkit
from labkit.devices import this_device
from labkit.parity.fingerprints import trunk_fingerprint
from labkit.parity.goldens import write_golden
from labkit.parity.sides import MlxLmSide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, help="folder that recipes.goldens.prepare wrote")
    parser.add_argument("target", type=Path, help="the golden to write")
    parser.add_argument("--best", type=int, default=16, help="logits kept a position")
    arguments = parser.parse_args()
    job = json.loads((arguments.job / "job.json").read_text())
    loaded = labkit.load(job["model"])
    if trunk_fingerprint(loaded.path) != job["fingerprint"]:
        sys.exit(f"{arguments.job} was prepared from other weights; prepare it again")
    side = MlxLmSide.open(loaded.path, dtype="bfloat16")
    side.name = f"mlx-lm {version('mlx-lm')} on {this_device().kind}"
    path = write_golden(
        arguments.target,
        side,
        [np.array(window, dtype=np.int32) for window in job["windows"]],
        fingerprint=job["fingerprint"],
        model=job["model"],
        versions={name: version(name) for name in ("mlx", "mlx-lm")},
        best=arguments.best,
        progress=lambda done, total: print(f"\r{done} of {total}", end="", file=sys.stderr),
    )
    print(f"\n{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

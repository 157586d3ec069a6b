"""Keep what mlx-lm says about the prepared windows in the checkpoint's own bfloat16.

Run in labkit's environment: python -m recipes.goldens.make_mlx_golden JOB TARGET (see README.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import dequantize_model

import labkit
from labkit.devices import this_device
from labkit.parity.fingerprints import trunk_fingerprint
from labkit.parity.goldens import write_golden
from labkit.parity.sides import MlxLmSide


class Experts(SwitchLinear):
    """Products that round what goes in and what comes out; MLX's CPU multiplies chosen experts in float32 alone."""

    def __call__(self, x: mx.array, *options: Any, **named: Any) -> mx.array:
        return super().__call__(x.astype(mx.float32), *options, **named).astype(x.dtype)


def add_up_in_float32(model: Any) -> None:
    """Let a CPU add up as a GPU does.

    MLX's CPU products over packed weights add up in bfloat16. A GPU's write the weights as bfloat16 and add up in
    float32; so do products of plain weights on both.
    """
    dequantize_model(model)
    for _, module in model.named_modules():
        if isinstance(module, SwitchLinear):
            module.weight = module.weight.astype(mx.float32)
            module.__class__ = Experts


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
    if mx.default_device().type == mx.cpu:
        add_up_in_float32(side.model)
        side.name += ", weights dequantised"
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

"""Let transformers on torch read the prepared windows in both forms, and keep what it says as goldens.

Run where torch and transformers are: python -m recipes.goldens.make_torch_goldens JOB TARGET (see README.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

from labkit.parity.forms import FORMS, Form
from labkit.parity.goldens import write_golden
from labkit.parity.torch_side import TorchSide

# Single steps are slow in torch, and every one is alike: a part of the text is enough.
INCREMENTAL_WINDOWS, INCREMENTAL_LENGTH = 2, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, help="folder that recipes.goldens.prepare wrote")
    parser.add_argument(
        "target", type=Path, help="folder for torch-whole.safetensors and torch-incremental.safetensors"
    )
    parser.add_argument("--best", type=int, default=16, help="logits kept a position")
    parser.add_argument("--every", type=int, default=64, help="positions of which one keeps all its logits")
    parser.add_argument("--prefill", type=int, default=64, help="tokens before single steps")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS, help="which goldens to make")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads; 1 on a busy machine")
    arguments = parser.parse_args()
    job = json.loads((arguments.job / "job.json").read_text())
    windows = [np.array(window, dtype=np.int32) for window in job["windows"]]
    side = TorchSide.open(arguments.job, threads=arguments.threads)
    if side.source != job["fingerprint"]:
        sys.exit(f"{arguments.job}: the weights and job.json come from different models; prepare them again")
    side.name = f"torch {version('torch')}, transformers {version('transformers')}"
    shorter = [window[: INCREMENTAL_LENGTH + 1] for window in windows[:INCREMENTAL_WINDOWS]]
    for form, part in ((Form(), windows), (Form.incremental(arguments.prefill), shorter)):
        if form.kind not in arguments.forms:
            continue
        side.form = form
        path = write_golden(
            arguments.target / f"torch-{form.kind}.safetensors",
            side,
            part,
            fingerprint=job["fingerprint"],
            model=job["model"],
            versions={name: version(name) for name in ("torch", "transformers")},
            best=arguments.best,
            # Single steps cover fewer positions: keep a larger share of them whole
            full_every=arguments.every * (2 if form.kind == "whole" else 1),
            progress=lambda done, total: print(f"\r{done} of {total}", end="", file=sys.stderr),
        )
        print(f"\n{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()

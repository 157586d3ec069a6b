"""What each of bfloat16's roundings costs the embedded model, in KL, flips, and experts chosen otherwise.

    OPENBLAS_NUM_THREADS=1 python -m recipes.measured.roundings --commit $(git rev-parse --short HEAD)

Counted in arithmetic, not timed: a busy machine changes nothing. Some 9 s of one core a case of 4,096 positions.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import numpy as np

import labkit
from labkit.parity.goldens import open_golden
from labkit.parity.rounded_graph import RoundedGraph
from labkit.parity.roundings import CASES, Remembered, RoundedSide, cost, predicted_kl_of_rounded_logits
from labkit.parity.teacher_forcing import teacher_forced
from recipes.measured.table import Table, shown

MODEL = "tiny-hybrid"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/measured"))
    parser.add_argument("--commit", required=True)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    table = Table(arguments.out / "cpu_bf16_roundings.json", arguments.commit, model=MODEL)
    golden = open_golden(f"{MODEL}/torch-whole")
    windows = golden.first(arguments.positions)
    model = labkit.load(MODEL, graph="specialised", dtype=mx.float32).model
    exact = Remembered(RoundedSide(RoundedGraph(model), (), "exact"))
    against = teacher_forced(golden, exact, windows)
    logits = np.concatenate([part.logits for window in windows for part in exact.predict(window)])
    table.about |= {
        "reference": golden.name,
        "difference_of_the_exact_graph": against.max_logit_difference,
    }
    predicted = {"logits": {"predicted_kl": predicted_kl_of_rounded_logits(logits)}}
    for case in arguments.cases:
        row = cost(exact, case, windows) | predicted.get(case, {})
        table.add(row)
        table.say(shown({key: value for key, value in row.items() if key not in ("rounded", "beyond")}))


if __name__ == "__main__":
    main()

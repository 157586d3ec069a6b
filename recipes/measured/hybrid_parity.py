"""How far the specialised graph in bf16 on this machine's GPU is from fp32, beside how far mlx-lm's bf16 is.

    python -m recipes.measured.hybrid_parity --out data/measured --commit $(git rev-parse --short HEAD) --seconds 240

Teacher-forced over held-out text on tiny-hybrid. For whole sequences the oracle is torch in fp32, and the neighbour
mlx-lm in bf16 on an H200, both as stored: 4,096 positions of the same text. For single steps the oracle is mlx-lm's
module in fp32 on this machine's CPU. A part that fails is reported and the next begins; the table is written after
each. None begins after `--seconds`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import labkit
from labkit.models.hybrid import Hybrid, Variants
from labkit.parity.forms import Form
from labkit.parity.goldens import open_golden
from labkit.parity.predictions import Prediction
from labkit.parity.report import ParityReport
from labkit.parity.sides import LabkitSide, MlxLmSide
from labkit.parity.teacher_forcing import teacher_forced
from labkit.parity.windows import heldout_texts, windows_across
from recipes.measured.table import Table, shown

DTYPE = mx.bfloat16


class OnCpu:
    """A side that computes on the CPU, whatever the default device is."""

    def __init__(self, side: MlxLmSide):
        self._side = side
        self.name, self.arithmetic = f"{side.name} on the CPU", "float32"
        self.form, self.vocab_size = side.form, side.vocab_size

    def predict(self, window: np.ndarray) -> Iterator[Prediction]:
        steps = self._side.predict(window)
        while True:
            device = mx.default_device()
            mx.set_default_device(mx.cpu)
            try:
                prediction = next(steps, None)
            finally:
                mx.set_default_device(device)
            if prediction is None:
                return
            yield prediction


def row(part: str, report: ParityReport) -> dict[str, Any]:
    """What the table keeps of a report."""
    change = report.perplexity_change
    return {
        "part": part,
        "candidate": report.candidate.name,
        "arithmetic": report.candidate.arithmetic,
        "reference": report.reference.name,
        "form": report.candidate.form,
        "positions": report.positions,
        "perplexity_reference": report.reference.perplexity,
        "perplexity_change": change.value,
        "perplexity_change_low": change.low,
        "perplexity_change_high": change.high,
        "within_0.04_percent_or_interval": bool(abs(change.value) <= 4e-4 or change.low <= 0 <= change.high),
        "same_top1": report.top1_agreement.value,
        "near_ties": report.near_ties,
        "flips_beyond_a_near_tie": report.defects,
        "mean_kl": report.mean_kl,
        "max_kl": report.max_kl,
        "max_logit_difference": report.max_logit_difference,
        "verdict": report.verdict,
        "reasons": list(report.reasons),
    }


class Run:
    """One run: what has been found so far is in the table's file after every part."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        path = arguments.out / f"{arguments.name}_hybrid_parity.json"
        self.table = Table(path, arguments.commit, seconds=arguments.seconds, family="hybrid_parity")

    def all(self) -> None:
        """Every part, in the order of its worth."""
        self.ours = labkit.load("tiny-hybrid", graph="specialised", dtype=DTYPE)
        weights, config = self.ours.model.weights, self.ours.config
        invariant = Hybrid(weights, config, DTYPE, invariant=True)
        wide = Hybrid(weights, config, DTYPE, variants=Variants(stream="float32"))
        golden = open_golden("tiny-hybrid/torch-whole")
        steps = Form.incremental(64)
        parts = {
            "specialised, whole": lambda: self.against(golden, LabkitSide(self.ours.model, golden.form)),
            "mlx-lm, whole": lambda: self.against(golden, open_golden("tiny-hybrid/mlx-bf16")),
            "specialised, single steps": lambda: self.steps(LabkitSide(self.ours.model, steps)),
            "stream in float32, whole": lambda: self.against(golden, LabkitSide(wide, golden.form)),
            "stream in float32, single steps": lambda: self.steps(LabkitSide(wide, steps)),
            "specialised and invariant, whole": lambda: self.against(golden, LabkitSide(invariant, golden.form)),
        }
        for name, part in parts.items():
            if self.table.left < 0:
                self.table.say(f"-- no time left for {name}")
                continue
            self.table.attempt(name, lambda name=name, part=part: self.keep(row(name, part())))
        self.judge()

    def keep(self, found: dict[str, Any]) -> None:
        """A row into the table, and on the screen."""
        self.table.add(found)
        self.table.say(f"== {shown(found)}")

    def against(self, golden: Any, side: Any) -> ParityReport:
        """Over the golden's own windows, as many positions as were asked for."""
        held = sum(len(window) - 1 for window in golden.windows)
        return teacher_forced(golden, side, golden.first(min(self.arguments.positions, held)), model="tiny-hybrid")

    def steps(self, side: Any) -> ParityReport:
        """A prefill of 64 tokens, then one token at a time, against fp32 on the CPU."""
        reference = OnCpu(MlxLmSide.open(self.ours.path, Form("whole"), dtype="float32"))
        encode = self.ours.tokenizer.encode
        windows = windows_across(heldout_texts(), encode, self.arguments.positions, length=512)
        return teacher_forced(reference, side, windows, model="tiny-hybrid")

    def judge(self) -> None:
        """Whether the specialised graph is no farther from fp32 than mlx-lm is."""
        found = {r["part"]: r for r in self.table.rows}
        ours, theirs = found.get("specialised, whole"), found.get("mlx-lm, whole")
        if ours and theirs:
            ratio = ours["mean_kl"] / theirs["mean_kl"]
            self.keep({"part": "judgement", "mean_kl_over_mlx_lm": ratio, "no_farther": ratio <= 1.05})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--positions", type=int, default=2560)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--name", default="h200", help="prefix of the file")
    arguments = parser.parse_args()
    Run(arguments).all()


if __name__ == "__main__":
    main()

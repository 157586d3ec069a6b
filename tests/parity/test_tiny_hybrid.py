"""The trained model against torch, from stored goldens, in float32 on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

import labkit
from labkit.parity.fingerprints import trunk_fingerprint
from labkit.parity.forms import Form
from labkit.parity.goldens import open_golden, stored_goldens
from labkit.parity.mutations import mutation
from labkit.parity.sides import LabkitSide, MlxLmSide
from labkit.parity.statistics import perplexity_change
from labkit.parity.teacher_forcing import teacher_forced

WHOLE, INCREMENTAL = Form(), Form.incremental(64)


@pytest.fixture(scope="module")
def loaded():
    return labkit.load("tiny-hybrid")


@pytest.mark.parametrize("name", [name for name in stored_goldens() if name.startswith("tiny-hybrid/")])
def test_the_goldens_belong_to_the_shipped_weights(loaded, name):
    """Whoever trains or quantises anew makes the goldens anew (recipes/goldens/README.md)."""
    open_golden(name).require(trunk_fingerprint(loaded.path))


@pytest.mark.parametrize(
    ("golden", "form", "positions", "whole"),
    [("torch-whole", WHOLE, 128, 1), ("torch-incremental", INCREMENTAL, 112, 1)],
)
def test_labkit_agrees_with_torch(loaded, golden, form, positions, whole):
    oracle = open_golden(f"tiny-hybrid/{golden}")
    report = teacher_forced(oracle, LabkitSide(loaded.model, form), oracle.first(positions))
    assert report.agrees, report.reasons
    assert report.whole_vocabulary_positions == whole
    assert report.max_logit_difference <= 5e-4
    assert report.max_kl <= 1e-6
    assert report.top1_agreement.value == 1.0
    assert report.reference.perplexity < 100


def test_mlx_lm_agrees_with_torch(loaded):
    oracle = open_golden("tiny-hybrid/torch-whole")
    report = teacher_forced(oracle, MlxLmSide.open(loaded.path, WHOLE, dtype="float32"), oracle.first(32))
    assert report.agrees, report.reasons


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["whole", "incremental"])
def test_every_stored_position_agrees(loaded, kind):
    oracle = open_golden(f"tiny-hybrid/torch-{kind}")
    report = teacher_forced(oracle, LabkitSide(loaded.model, oracle.form), oracle.windows)
    assert report.agrees, report.reasons
    assert report.positions == {"whole": 4096, "incremental": 512}[kind]


def test_perplexity_does_not_see_what_the_logits_see(loaded):
    """Keys one position off: a change of perplexity within the noise, and most tokens kept; the logits tell."""
    oracle = open_golden("tiny-hybrid/torch-whole")
    side = MlxLmSide.open(loaded.path, WHOLE, dtype="float32")
    with mutation("late keys")(side.model):
        report = teacher_forced(oracle, side, oracle.first(80))
    assert 0.0 in report.perplexity_change
    assert report.top1_agreement.value > 0.9
    assert report.max_logit_difference > 0.1
    assert report.verdict == "defect"


def test_why_192_positions_are_within_the_noise():
    """bfloat16 against float32, each stretch of 192 of the stored 4096: the figure to report has either sign."""
    exact, rounded = open_golden("tiny-hybrid/torch-whole"), open_golden("tiny-hybrid/mlx-bf16")
    report = teacher_forced(exact, rounded, exact.windows)
    difference = report.comparison
    reported, widths = [], []
    for start in range(0, 4096 - 191, 192):
        cut = slice(start, start + 192)
        change = perplexity_change(difference.nll_reference[cut], difference.nll_candidate[cut])
        reported.append(change.value)
        widths.append(change.half_width)
    assert min(reported) < -0.0004 < 0.0004 < max(reported)
    assert np.median(widths) > 0.0004
    assert report.perplexity_change.half_width < np.median(widths) / 2
    assert report.near_ties > report.defects

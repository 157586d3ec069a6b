"""The comparison as a whole: figures, verdict, every disagreement in words, bounded memory."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from labkit import console
from labkit.parity.forms import Form
from labkit.parity.predictions import FullLogits
from labkit.parity.report import ParityReport
from labkit.parity.teacher_forcing import teacher_forced
from labkit.parity.tolerances import FLOAT32, REDUCED, Tolerance, tolerance_for

VOCABULARY = 50


class Table:
    """A side whose logits are a function of window and position."""

    form = Form()

    def __init__(
        self, change=lambda logits, position: logits, name="table", vocabulary=VOCABULARY, arithmetic="float32"
    ):
        self.change, self.name, self.vocab_size, self.arithmetic = change, name, vocabulary, arithmetic

    def predict(self, window):
        for start in range(0, len(window) - 1, 16):
            rows = []
            for position in range(start, min(start + 16, len(window) - 1)):
                logits = np.random.default_rng(position).normal(0, 2, self.vocab_size).astype(np.float32)
                logits[int(window[position]) % self.vocab_size] = 9.0
                rows.append(self.change(logits, position))
            yield FullLogits(np.stack(rows))


def _windows(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCABULARY, length + 1).astype(np.int32) for length in lengths]


def _flip(at, margin):
    def change(logits, position):
        logits = logits.copy()
        if position == at:
            logits[int(np.argsort(logits)[-2])] = logits.max() + margin
        return logits

    return change


def test_a_side_agrees_with_itself_exactly():
    report = teacher_forced(Table(), Table(), _windows(40, 33))
    assert report.agrees
    assert report.positions == 73
    assert (report.max_logit_difference, report.max_kl, report.near_ties, report.defects) == (0, 0, 0, 0)
    assert report.perplexity_change.value == 0
    assert report.top1_agreement.value == 1
    assert report.reference.perplexity == report.candidate.perplexity


def test_a_disagreement_is_shown_in_words():
    windows = _windows(40)
    decode = lambda tokens: "".join(chr(65 + token) for token in tokens)
    report = teacher_forced(Table(), Table(_flip(7, 3.0)), windows, decode=decode)
    (found,) = report.disagreements
    assert (found.window, found.position, found.verdict) == (0, 7, "defect")
    assert found.context == decode(windows[0][:8].tolist())
    assert found.label_text == decode([int(windows[0][8])])
    assert found.reference_text == chr(65 + found.reference_token) == chr(65 + int(windows[0][7]))
    assert found.candidate_text != found.reference_text
    assert found.margin_candidate == pytest.approx(3.0, abs=1e-5)
    assert not report.agrees
    assert any("1 disagreement beyond a near tie" in reason for reason in report.reasons)


def test_a_flip_within_rounding_is_a_near_tie_and_passes():
    """Both sides hold the two best within 0.02: less than bfloat16's step at 9, which is 0.0625."""

    def nearly(delta):
        def change(logits, position):
            logits = logits.copy()
            if position == 7:
                logits[int(np.argsort(logits)[-2])] = logits.max() + np.float32(delta)
            return logits

        return change

    sides = Table(nearly(-0.01)), Table(nearly(0.01), arithmetic="bfloat16")
    report = teacher_forced(*sides, _windows(40))
    assert (report.near_ties, report.defects) == (1, 0)
    assert report.agrees
    assert report.top1_agreement.value == pytest.approx(39 / 40)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda logits, position: logits + np.float32(1e-3) * (np.arange(VOCABULARY) == 3), "max logit difference"),
        (lambda logits, position: logits * np.float32(1.2), "max kl"),
        (lambda logits, position: np.where(np.arange(VOCABULARY) == 3, np.nan, logits), "max logit difference is nan"),
    ],
)
def test_what_lies_beyond_the_tolerance_is_named(change, reason):
    report = teacher_forced(Table(), Table(change), _windows(40))
    assert report.verdict == "defect"
    assert any(reason in text for text in report.reasons)


def test_the_coarser_arithmetic_sets_the_tolerance():
    assert tolerance_for("float32", "float32") == FLOAT32 == Tolerance(5e-4, 1e-6, None)
    for coarse in ("tf32", "bfloat16", "float16"):
        assert tolerance_for("float32", coarse) == tolerance_for(coarse, "float32") == REDUCED


def test_a_coarse_engine_that_is_worse_everywhere_fails_by_its_perplexity():
    """Two hundredths of a nat off the text's own token, everywhere: hardly any divergence, no flip, and no accident."""

    def worse(logits, position):
        return logits - np.float32(0.02) * (logits == logits.max())

    report = teacher_forced(Table(), Table(worse, arithmetic="bfloat16"), _windows(400))
    assert report.mean_kl < REDUCED.mean_kl
    assert report.defects == 0
    assert [reason.split(" ")[0] for reason in report.reasons] == ["perplexity"]


def test_a_coarse_engine_may_change_perplexity_by_chance():
    def noisy(logits, position):
        return logits + np.random.default_rng(1000 + position).normal(0, 0.05, len(logits)).astype(np.float32)

    report = teacher_forced(Table(), Table(noisy, arithmetic="bfloat16"), _windows(400))
    change = report.perplexity_change
    assert change.low < 0 < change.high
    assert report.agrees


def test_the_record_is_json_and_the_tables_print(capsys):
    report = teacher_forced(Table(), Table(_flip(7, 3.0)), _windows(40), model="toy")
    console.show(report.record(), as_json=True, render=report.tables())
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "defect"
    assert record["disagreements"][0]["position"] == 7
    assert {"value", "low", "high", "confidence"} == set(record["perplexity_change"])
    assert "comparison" not in record
    console.show(report.record(), as_json=False, render=report.tables())
    shown = capsys.readouterr().out
    assert "same top-1 token" in shown
    assert "defect" in shown
    assert isinstance(report, ParityReport)


def test_progress_reaches_the_end():
    seen = []
    teacher_forced(Table(), Table(), _windows(40, 33), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (73, 73)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([], "no windows"),
        ([np.array([3])], "at least two tokens"),
        ([np.zeros((2, 2), dtype=int)], "at least two tokens"),
        ([np.array([1, VOCABULARY])], "outside 0..49"),
        ([np.array([-1, 2])], "outside 0..49"),
    ],
)
def test_windows_that_cannot_be_are_refused(windows, message):
    with pytest.raises(ValueError, match=message):
        teacher_forced(Table(), Table(), windows)


def test_different_vocabularies_are_different_models():
    with pytest.raises(ValueError, match="table predicts 50 tokens and other 51"):
        teacher_forced(Table(), Table(name="other", vocabulary=51), _windows(8))


def test_memory_does_not_grow_with_the_text():
    """A large vocabulary over a long text: the peak is that of one piece, not of the whole."""

    def peak(length):
        big = lambda: Table(vocabulary=20_000)
        tracemalloc.start()
        teacher_forced(big(), big(), [np.zeros(length + 1, dtype=np.int32)])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(160) < 1.3 * peak(32) + 1e6

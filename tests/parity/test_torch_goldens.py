"""mlx-lm and labkit against transformers' torch: independent code, the same numbers in float32 on a CPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from labkit.models.adapter import Adapter
from labkit.parity.fingerprints import trunk_fingerprint
from labkit.parity.forms import Form
from labkit.parity.probe import probe_config, write_probe
from labkit.parity.sides import LabkitSide, MlxLmSide
from labkit.parity.teacher_forcing import teacher_forced
from labkit.parity.tolerances import FLOAT32

WHOLE, CHUNKED, INCREMENTAL = Form(), Form(chunk=50), Form.incremental(64)


def _agrees(golden, side):
    # Single steps cost time: one window of them
    windows = golden.windows[:1] if side.form == INCREMENTAL else golden.windows
    report = teacher_forced(golden, side, windows, model="probe")
    assert report.tolerance == FLOAT32
    assert report.agrees, report.reasons
    assert report.whole_vocabulary_positions == sum((len(window) - 1) // golden.full_every for window in windows)
    assert report.max_logit_difference <= 5e-4
    assert report.max_kl <= 1e-6
    assert report.top1_agreement.value == 1.0
    # An agreement of two constants would prove nothing
    assert 100 < report.reference.perplexity < 1e5
    return report


def test_the_goldens_belong_to_the_probe(goldens, probe_folder):
    for golden in goldens.values():
        golden.require(trunk_fingerprint(probe_folder))
        assert golden.name.startswith("torch ")


@pytest.mark.parametrize(("form", "golden"), [(WHOLE, "whole"), (CHUNKED, "whole"), (INCREMENTAL, "incremental")])
def test_mlx_lm_agrees_with_torch(goldens, probe_model, form, golden):
    _agrees(goldens[golden], MlxLmSide(probe_model, form))


@pytest.mark.parametrize(("form", "golden"), [(CHUNKED, "whole"), (INCREMENTAL, "incremental")])
def test_labkit_agrees_with_torch(goldens, probe_folder, form, golden):
    module = MlxLmSide.open(probe_folder, dtype="float32").model
    _agrees(goldens[golden], LabkitSide(Adapter(module, probe_config()), form))


def test_packed_and_dequantised_weights_are_the_same_model(goldens, tmp_path):
    dense = MlxLmSide.open(write_probe(tmp_path, quantised=False), dtype="float32")
    _agrees(goldens["whole"], dense)


def test_labkit_is_bit_for_bit_mlx_lm_on_a_cpu(probe_folder, goldens):
    window = goldens["whole"].windows[0][:61]
    model = MlxLmSide.open(probe_folder, dtype="float32").model
    sides = MlxLmSide(model, Form.incremental(40)), LabkitSide(Adapter(model, probe_config()), Form.incremental(40))
    left, right = (np.concatenate([part.logits for part in side.predict(window)]) for side in sides)
    np.testing.assert_array_equal(left, right)


def test_arithmetic_is_what_the_weights_are_cast_to(probe_folder):
    assert MlxLmSide.open(probe_folder, dtype="float32").arithmetic == "float32"
    rounded = MlxLmSide.open(probe_folder, dtype="bfloat16")
    assert rounded.arithmetic == "bfloat16"
    decay_rates = [layer.linear_attn.A_log.dtype for layer in rounded.model.layers if layer.is_linear]
    assert set(decay_rates) == {mx.float32}  # as mlx-lm's own conversion keeps them

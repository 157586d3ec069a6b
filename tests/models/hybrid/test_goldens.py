"""Both of labkit's own graphs against torch, as stored."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.models.hybrid import Hybrid
from labkit.models.hybrid.native import NativeHybrid
from labkit.parity.goldens import open_golden
from labkit.parity.probe import probe_config, write_probe
from labkit.parity.sides import LabkitSide
from labkit.parity.teacher_forcing import teacher_forced


@pytest.mark.parametrize("graph", [Hybrid, NativeHybrid] if mx.default_device() == mx.cpu else [Hybrid])
@pytest.mark.parametrize("form", ["whole", "incremental"])
def test_the_probe_is_torchs(form, graph, tmp_path):
    from mlx_lm.utils import load_model

    module, _ = load_model(write_probe(tmp_path / "probe"), lazy=True)
    golden = open_golden(f"probe/torch-{form}")
    side = LabkitSide(graph.from_module(module, probe_config()), golden.form)
    report = teacher_forced(golden, side, golden.first(200 if form == "whole" else 90))
    assert report.agrees, report.reasons
    assert report.top1_agreement.value == 1

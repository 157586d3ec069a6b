"""The probe tells a GPU that computes from one that does not."""

from dataclasses import replace

import mlx.core as mx
import pytest

from labkit.kernels import address_spaces, metal_rules, probe, simulator

CALL = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(128,)], "output_dtypes": [mx.float32]}


def test_it_passes_where_kernels_run():
    assert probe.wrong("simulator") == ""
    launch = probe.PROBE.launch(inputs=[mx.arange(64, dtype=mx.float32)], **CALL)
    assert simulator.run(probe.PROBE.text, launch, check=True).faults == []
    assert address_spaces.check(probe.PROBE.text, launch) + metal_rules.broken(probe.PROBE.text, launch) == []


@pytest.mark.parametrize(
    ("text", "instead", "named"),
    [
        ("simd_sum(x[lane])", "x[lane]", "sums over a simdgroup"),
        ("simd_shuffle_xor(x[lane], 1)", "0.0f", "shuffles in a simdgroup"),
        ("simdgroup_multiply_accumulate", "// ", "products of 8 x 8 matrices"),
        ("uint lane", "uint nothing", "lane"),  # the compiler's own words
    ],
)
def test_it_names_what_is_wrong(monkeypatch, text, instead, named):
    source = probe.PROBE.text.source.replace(text, instead)
    monkeypatch.setattr(probe.PROBE, "text", replace(probe.PROBE.text, source=source))
    assert named in probe.wrong("simulator")


@pytest.mark.metal
def test_this_gpu(metal_device):
    assert probe.wrong("metal") == ""

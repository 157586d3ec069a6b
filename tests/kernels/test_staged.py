"""Reads that travel through threadgroup memory, as on CUDA: the same bits as through registers, and no fault."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from labkit.kernels import simulator
from labkit.kernels.quantized_matmul.launches import STAGED_STEPS, staged_split_for
from labkit.kernels.registry import find_entries

ENTRIES = find_entries(["few_rows_tensor", "decode_gate_up_tensor", "decode_down_tensor"])


EVERY_DAY = "few_rows_tensor"
"""The others' reads are its own, of two matrices or of several experts' in turn."""


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.name, marks=[] if entry.name == EVERY_DAY else [pytest.mark.nightly])
        for entry in ENTRIES
    ],
)
def test_staged_reads_give_the_same_bits(entry):
    text = entry.kernel.text
    staged = replace(text, header="#define LABKIT_STAGED 1\n" + text.header)
    for case in entry.cases:
        launch = case.make(mx.bfloat16)
        run = simulator.run(staged, launch, check=True)
        assert not run.faults, f"{case.label}: {run}"
        for got, want in zip(run.outputs, simulator.run(text, launch).outputs, strict=True):
            assert mx.array_equal(got, want), case.label


def test_a_read_that_was_not_waited_for_is_found():
    entry = ENTRIES[0]
    text = entry.kernel.text
    hasty = text.header.replace("reads.template arrived<0>();", "").replace("reads.template arrived<1>();", "")
    assert hasty != text.header
    launch = entry.cases[0].make(mx.bfloat16)
    want = simulator.run(text, launch).outputs[0]
    run = simulator.run(replace(text, header="#define LABKIT_STAGED 1\n" + hasty), launch)
    assert not mx.array_equal(run.outputs[0], want)


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_in_flight_fits(parts):
    for steps in range(1, 200):
        simds, unroll = staged_split_for(steps, parts)
        batches = 2 if -(-steps // simds) > unroll else 1
        assert simds * unroll * parts * batches <= STAGED_STEPS + 3 * parts  # the last step of a simdgroup may be empty
        assert 1 <= simds <= 8

"""The counts of decode attention against what the simulator sees the kernel do."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import simulator
from labkit.kernels.attention import DECODE, decode_call
from labkit.kernels.attention.counts import DecodeCounts, part_columns


def _traffic(pack: int, parts: int, columns: int) -> simulator.Traffic:
    kv = (1, 2, columns, 64)
    call = decode_call(
        mx.random.normal((1, 8, 64)),
        mx.random.normal(kv),
        mx.random.normal(kv),
        mx.array([0], dtype=mx.int32),
        mx.array([columns], dtype=mx.int32),
        scale=0.125,
        parts=parts,
        pack=pack,
        simds=2,
    )
    kernel = DECODE["lanes"]
    return simulator.run(kernel.text, kernel.launch(**call), check=True).raise_for_faults().traffic


@pytest.mark.parametrize(("pack", "parts"), [(4, 2), (2, 2), (1, 4)])
def test_counts_are_what_the_simulator_counts(pack: int, parts: int) -> None:
    columns = 32  # each part a multiple of what its simdgroups take at a time
    counted = DecodeCounts(columns, parts, pack, heads=8, kv_heads=2, width=64, itemsize=4)
    traffic = _traffic(pack, parts, columns)
    flows = {(flow.memory, flow.direction): flow for flow in traffic.buffers}
    cached = [flows[name, "read"] for name in ("keys", "values")]
    assert sum(flow.bytes for flow in cached) == counted.asked_bytes
    assert sum(flow.footprint for flow in cached) == counted.kv_bytes
    written = flows["partial", "write"].bytes + flows["stats", "write"].bytes
    assert 2 * written == counted.partial_bytes
    assert traffic.threadgroups == counted.threadgroups


def test_prediction_has_a_best_number_of_parts() -> None:
    def seconds(parts: int) -> float:
        return DecodeCounts(32768, parts).seconds(4e12)

    times = {parts: seconds(parts) for parts in (1, 4, 32, 132, 1024, 8192)}
    assert min(times, key=times.get) == 132
    # One threadgroup in 132 of the places: the whole read at that share of the rate.
    assert DecodeCounts(32768, 1).seconds(4e12, launch=0) > 100 * DecodeCounts(32768, 132).kv_bytes / 4e12


@pytest.mark.parametrize(("parts", "block"), [(4, 0), (7, 0), (4, 16)])
def test_parts_hold_the_columns_that_the_kernel_reads(parts: int, block: int) -> None:
    rows = [(0, 50), (13, 40), (5, 5), (60, 64), (0, 64)]
    kv = (len(rows), 1, 64, 64)
    first, last = (mx.array(column, dtype=mx.int32) for column in zip(*rows, strict=True))
    call = decode_call(
        mx.zeros((len(rows), 1, 64)), mx.zeros(kv), mx.zeros(kv), first, last, scale=1.0, parts=parts, block=block
    )
    # All scores are 0, so that a part's sum of weights is its number of columns.
    sums = DECODE["lanes"](**call, target="simulator")[1][:, 0, :, 1]
    cuts = [part_columns(*row, parts, block) for row in rows]
    assert sums.tolist() == [[end - begin for begin, end in cut] for cut in cuts]
    for (begin, end), cut in zip(rows, cuts, strict=True):
        assert [column for part in cut for column in range(*part)] == list(range(begin, end))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the KV heads"):
        DecodeCounts(10, 1, heads=7, kv_heads=2)
    with pytest.raises(ValueError, match="at least 1"):
        DecodeCounts(0, 1)

"""The counts of the experts' products against what the simulator sees their tiles do."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from labkit.kernels import simulator
from labkit.kernels.grouped_matmul.counts import GroupedCounts, choose_at_random, expert_loads
from labkit.kernels.grouped_matmul.gates import grouped, packed_experts
from labkit.kernels.grouped_matmul.launches import EXPERT_GATE_UP, expert_gate_up_call


@pytest.mark.parametrize("tile", [16, 32])
def test_counts_are_what_the_simulator_counts(tile: int) -> None:
    experts, topk, n, k = 6, 2, 32, 128
    indices = choose_at_random(30, topk, experts, skew=1.5)
    order, blocks = grouped(indices, experts, tile)
    gate, up = (packed_experts(experts, n, k, mx.float32) for _ in range(2))
    x = mx.random.normal((30, k))
    kernel = EXPERT_GATE_UP["plain"]
    launch = kernel.launch(**expert_gate_up_call(x, gate, up, order, blocks, topk, tile=tile))
    flows = {
        flow.memory: flow
        for flow in simulator.run(kernel.text, launch, check=True).raise_for_faults().traffic.buffers
        if flow.direction == "read"
    }
    counts = GroupedCounts(expert_loads(indices, experts), n, k, tile, itemsize=4)
    words = 8 / (4 + 2 * 32 / 64) * 4 / 8  # the share of an expert's bytes that are packed words
    assert flows["gate"].bytes + flows["up"].bytes == pytest.approx(counts.weights_asked * words)
    weights = [name for name in flows if name.startswith(("gate", "up"))]
    assert sum(flows[name].footprint for name in weights) == counts.weight_bytes
    assert counts.blocks == int((np.array(blocks)[:, 2] > 0).sum())


def test_padding_is_what_a_block_map_says() -> None:
    counts = GroupedCounts([0, 1, 16, 17, 70], 64, 64, tile=32)
    assert counts.rows == 104
    assert counts.blocks == 0 + 1 + 1 + 1 + 3
    assert counts.filled == 104 / (6 * 32)
    assert counts.multiplied_rows == 16 + 16 + 32 + (32 + 32 + 16)
    assert counts.weights_asked == 6 * counts.expert_bytes
    assert counts.weight_bytes == 4 * counts.expert_bytes


def test_a_wider_tile_dequantises_less_and_pads_more() -> None:
    loads = expert_loads(choose_at_random(512, 8, 256), 256)
    low, high = (GroupedCounts(loads, 512, 2048, tile) for tile in (16, 64))
    assert low.weights_asked > high.weights_asked
    assert low.filled > high.filled


def test_time_is_that_of_bytes_or_of_rows_and_blocks() -> None:
    counts = GroupedCounts([16, 64], 64, 64, tile=32, matrices=1)
    assert counts.seconds(byte_rate=1.0, row_rate=1e30) == counts.weight_bytes + 80 * 128 * 2
    alone = counts.seconds(byte_rate=1e30, row_rate=1.0)
    assert alone == 2 * 80 * 64 * 64
    assert counts.seconds(1e30, 1.0, block_rows=10) == alone * (80 + 3 * 10) / 80


def test_choices_are_distinct_and_skew_is_seen() -> None:
    even, skewed = (choose_at_random(400, 4, 32, skew) for skew in (0.0, 1.0))
    assert all(len(set(row)) == 4 for row in even.tolist())
    assert expert_loads(skewed, 32).max() > 2 * expert_loads(even, 32).max()

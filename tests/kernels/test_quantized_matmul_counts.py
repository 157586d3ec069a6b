"""The counts of the quantised product against what the simulator sees its tiles do."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import simulator
from labkit.kernels.quantized_matmul import MANY_ROWS, Packed, many_rows_call
from labkit.kernels.quantized_matmul.counts import ProductCounts


@pytest.mark.parametrize("rows", [32, 70])
def test_counts_are_what_the_simulator_counts(rows: int) -> None:
    n, k, tile = 128, 128, 32
    weights = Packed.quantize(mx.random.normal((n, k)))
    call = many_rows_call(mx.random.normal((rows, k)), weights, tile=tile)
    kernel = MANY_ROWS["plain"]
    traffic = simulator.run(kernel.text, kernel.launch(**call), check=True).raise_for_faults().traffic
    flows = {flow.memory: flow for flow in traffic.buffers}
    counts = ProductCounts(rows, n, k, itemsize=4, tile=tile)
    assert flows["w"].bytes == counts.words_asked
    assert sum(flows[name].footprint for name in ("w", "scales", "biases")) == counts.packed_bytes
    assert flows["x"].footprint + flows["y"].footprint == counts.activation_bytes


def test_dequantising_to_memory_moves_the_dense_matrix_twice_more() -> None:
    counts = ProductCounts(64, 12288, 2048)
    assert counts.to_memory_bytes - counts.in_tile_bytes == 2 * 12288 * 2048 * 2
    assert counts.packed_bytes == 12288 * 2048 * 9 // 16


def test_the_faster_way_changes_with_the_number_of_rows() -> None:
    rates = {"byte_rate": 4e12}
    few, many = ProductCounts(16, 12288, 2048), ProductCounts(8192, 12288, 2048)
    assert few.in_tile_seconds(tile_rate=2e14, **rates) < few.to_memory_seconds(matmul_rate=7e14, **rates)
    assert many.in_tile_seconds(tile_rate=2e14, **rates) > many.to_memory_seconds(matmul_rate=7e14, **rates)
    assert few.to_memory_seconds(matmul_rate=7e14, pass_rate=1e12, **rates) > few.to_memory_seconds(
        matmul_rate=7e14, **rates
    )


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the group"):
        ProductCounts(1, 16, 100)

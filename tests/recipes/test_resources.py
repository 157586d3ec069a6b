"""The table of registers and occupancy: which launches are in it, and what a row says."""

import mlx.core as mx
import pytest

from labkit.kernels import cuda_build
from labkit.kernels.quantized_matmul import quantized_matmul
from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.registry import all_entries
from recipes.measured import resources

WEIGHTS = Packed(mx.zeros((64, 64), mx.uint32), mx.ones((64, 8), mx.bfloat16), mx.zeros((64, 8), mx.bfloat16), 64, 4)


def recorded_product() -> resources.Launches:
    found: resources.Launches = []
    with resources.recorded(found, "here"):
        y = quantized_matmul(mx.zeros((1, 512), mx.bfloat16), WEIGHTS, variant="few_rows")
    assert y.shape == (1, 64)
    return found


def test_a_launch_is_recorded_in_the_form_for_cuda():
    ((where, kernel, launch),) = recorded_product()
    assert (where, kernel.name) == ("here", "one_row")
    assert launch.output_shapes == ((1, 64),)


def test_kernels_without_a_launch_are_taken_from_their_benches():
    names = {entry.name for entry in all_entries()}
    found = resources.launches_of_benches(names - {"argmax_rows", "count_experts"})
    assert {kernel.name for _, kernel, _ in found} == {"argmax_rows", "count_experts"}


@pytest.mark.skipif(bool(cuda_build.unavailable()), reason=cuda_build.unavailable())
def test_a_row_says_how_many_threadgroups_live_at_once():
    ((where, kernel, launch),) = recorded_product()
    row = resources.row(where, kernel, launch, None)
    assert (row["threads"], row["threadgroups"]) == (32, 4)
    assert row["spill_loads"] == 0
    assert 0 < row["occupancy"] <= 1
    assert row["rounds"] == pytest.approx(4 / (row["groups_per_multiprocessor"] * 132), abs=0.01)

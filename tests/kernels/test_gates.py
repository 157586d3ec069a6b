"""Every registered kernel through every gate. A new kernel is found here by its folder's gates.py."""

import time

import pytest

from labkit.kernels.check import check_on_cpu, check_on_device
from labkit.kernels.registry import all_entries, dtype_name

COMBINATIONS = [
    pytest.param(entry, dtype, id=f"{entry.name}-{dtype_name(dtype)}")
    for entry in all_entries()
    for dtype in entry.dtypes
]


def fresh_seed() -> int:
    """Other inputs at each run; a failure's message names the seed."""
    return time.time_ns() % (1 << 31)


@pytest.mark.parametrize(("entry", "dtype"), COMBINATIONS)
def test_gates(entry, dtype):
    failed = [result for result in check_on_cpu(entry, dtype, fresh_seed()) if not result.passed]
    assert not failed, "\n".join(f"{result.gate}: {result.detail}" for result in failed)


@pytest.mark.cuda
@pytest.mark.parametrize(("entry", "dtype"), COMBINATIONS)
def test_cuda(entry, dtype, cuda_device):
    result = check_on_device(entry, dtype, fresh_seed(), target="cuda")
    assert result.passed, result.detail


@pytest.mark.metal
@pytest.mark.parametrize(("entry", "dtype"), COMBINATIONS)
def test_metal(entry, dtype, metal_device):
    result = check_on_device(entry, dtype, fresh_seed(), target="metal")
    assert result.passed, result.detail

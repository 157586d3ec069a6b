"""Every registered kernel through every gate. A new kernel is found here by its folder's gates.py."""

import random
from dataclasses import replace

import pytest

from labkit.kernels import cuda_build
from labkit.kernels.check import check_cuda_text, check_on_cpu, check_on_device
from labkit.kernels.registry import all_entries, dtype_name

COMBINATIONS = [
    pytest.param(entry, dtype, id=f"{entry.name}-{dtype_name(dtype)}")
    for entry in all_entries()
    for dtype in entry.dtypes
]


def fresh_seed() -> int:
    """Other inputs for each test, and in `make test-nightly` at each run; a failure's message names the seed."""
    return random.getrandbits(31)


def every_day() -> list:
    """(kernel, dtype, whether all of it): every kernel and dtype with the first case, and one dtype, the next kernel's
    next, with all cases and the plain build. Of kernels that are long to build, the first case in one dtype."""
    short = [entry for entry in all_entries() if not entry.nightly and not entry.resident]
    chosen = [
        pytest.param(entry, dtype, index % len(entry.dtypes) == place, id=f"{entry.name}-{dtype_name(dtype)}")
        for index, entry in enumerate(short)
        for place, dtype in enumerate(entry.dtypes)
    ]
    long = [entry for entry in all_entries() if entry.resident and not entry.nightly]
    return chosen + [pytest.param(entry, entry.dtypes[-1], False, id=f"{entry.name}-first") for entry in long]


def report(results) -> str:
    return "\n".join(f"{result.gate}: {result.detail}" for result in results if not result.passed)


@pytest.mark.parametrize(("entry", "dtype", "whole"), every_day())
def test_gates(entry, dtype, whole):
    chosen = entry if whole else replace(entry, cases=entry.cases[:1])
    assert not report(check_on_cpu(chosen, dtype, fresh_seed(), plain=whole))


@pytest.mark.nightly
@pytest.mark.parametrize(("entry", "dtype"), COMBINATIONS)
def test_every_case_in_every_dtype(entry, dtype):
    assert not report(check_on_cpu(entry, dtype, fresh_seed()))


needs_nvrtc = pytest.mark.skipif(bool(cuda_build.unavailable()), reason=cuda_build.unavailable())


@needs_nvrtc
@pytest.mark.parametrize("entry", [e for e in all_entries() if not e.nightly], ids=lambda entry: entry.name)
def test_cuda_text_compiles(entry):
    # The small floats bring the most of the vocabulary, bfloat16 is what runs on a GPU.
    assert not report([check_cuda_text(entry, entry.dtypes[-1], fresh_seed())])


@needs_nvrtc
@pytest.mark.nightly
@pytest.mark.parametrize(("entry", "dtype"), COMBINATIONS)
def test_cuda_text_compiles_in_every_dtype(entry, dtype):
    assert not report([check_cuda_text(entry, dtype, fresh_seed())])


@pytest.mark.cuda
@pytest.mark.parametrize(("entry", "dtype"), COMBINATIONS)
def test_cuda(entry, dtype, cuda_device):
    result = check_on_device(entry, dtype, fresh_seed(), target="cuda")
    assert result.passed, result.detail


@pytest.mark.metal
@pytest.mark.parametrize(("entry", "dtype"), [c for c in COMBINATIONS if not c.values[0].resident])
def test_metal(entry, dtype, metal_device):
    result = check_on_device(entry, dtype, fresh_seed(), target="metal")
    assert result.passed, result.detail

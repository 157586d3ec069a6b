"""The measured floors: plausible and named."""

from __future__ import annotations

import pytest

from labkit.measure import floors


@pytest.fixture(scope="module")
def measured() -> floors.Floors:
    return floors.measure(quick=True)


def test_rates_are_the_best_of_several_programs(measured: floors.Floors) -> None:
    for rate in (measured.read, measured.matmul):
        assert len(rate.programs) >= 2
        assert rate.value == max(rate.programs.values()) == rate.programs[rate.program]


def test_rates_are_physical(measured: floors.Floors) -> None:
    assert 5e8 < measured.read.value < 2e13
    assert 1e9 < measured.matmul.value < 1e16


def test_the_floor_is_the_longer_of_memory_and_arithmetic(measured: floors.Floors) -> None:
    bytes, operations = measured.read.value, measured.matmul.value
    assert measured.seconds(bytes=2 * bytes, operations=operations) == pytest.approx(2)
    assert measured.seconds(bytes=bytes, operations=3 * operations) == pytest.approx(3)

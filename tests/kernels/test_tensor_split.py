"""How the form of few rows by tensor cores is cut: simdgroups, and steps that each has in flight."""

from __future__ import annotations

import pytest

from labkit.kernels.quantized_matmul.launches import TENSOR_STEPS, tensor_split_for


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_in_flight_fits(parts):
    for steps in range(1, 200):
        simds, unroll = tensor_split_for(steps, parts)
        batches = 2 if -(-steps // simds) > unroll else 1
        assert simds * unroll * parts * batches <= TENSOR_STEPS + 3 * parts  # the last step of a simdgroup may be empty
        assert 1 <= simds <= 8

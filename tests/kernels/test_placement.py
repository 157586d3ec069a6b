"""Small arrays in the GPU's memory: the values of what was given, behind an operation that takes no buffer over."""

import mlx.core as mx
import pytest

from labkit.kernels import placement


@pytest.mark.parametrize("target", ["cuda", "metal", None])
@pytest.mark.parametrize(
    "array",
    [
        mx.array([[0, 3], [1, 2]], dtype=mx.int32),
        mx.array([2**40 + 5, 7], dtype=mx.uint64),
        mx.array(0.5),
        mx.arange(9000, dtype=mx.float32),
        mx.zeros((0, 2)),
    ],
    ids=["pairs", "wide", "scalar", "large", "empty"],
)
def test_values_shape_and_dtype_stay(array, target, monkeypatch):
    monkeypatch.setattr(placement, "device_target", lambda: target)
    placed = placement.on_device(array)
    assert placed.shape == array.shape
    assert placed.dtype == array.dtype
    assert mx.array_equal(placed, array)

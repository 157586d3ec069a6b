"""Devices that tests may need."""

import mlx.core as mx
import pytest


@pytest.fixture
def cuda_device():
    """Skips where MLX has no CUDA device."""
    if mx.default_device().type != mx.gpu or mx.metal.is_available():
        pytest.skip("no CUDA device that MLX can use")

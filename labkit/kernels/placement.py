"""Where small arrays lie: what every simdgroup of a launch reads must not stand in the host's memory.

MLX on CUDA makes arrays of Python's numbers in memory that host and device share, and any array of up to 8 bytes in a
pool that stays with the host: each read crosses the bus. Nor does an operation on such an array move it: the result may
take its operand's buffer over, or one like it that was let go of before.
"""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.targets import device_target

APART = 20 * 1024
"""Bytes of a buffer that no array of a few numbers has had before: MLX hands buffers on by their size."""


def on_device(array: mx.array) -> mx.array:
    """A small array's values, in the GPU's own memory; computed, so that no compiled graph computes them again."""
    if device_target() == "cuda" and array.size:
        rest = max(APART // array.itemsize - array.size, 1)
        # Joining never takes a buffer over, and a part of the result costs no copy.
        whole = mx.concatenate([array.reshape(-1), mx.zeros((rest,), array.dtype)])
        array = whole[: array.size].reshape(array.shape)
    mx.async_eval(array)
    return array

"""The quantised product in plain MLX ops: the oracle of every form of it."""

from __future__ import annotations

import mlx.core as mx

from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.signature import Launch


def packed_of(launch: Launch, first: int) -> Packed:
    """The weights in three consecutive inputs of a launch."""
    template = dict(launch.template)
    return Packed(*launch.inputs[first : first + 3], template["GROUP"], template["BITS"])


def quantized_matmul(launch: Launch) -> list[mx.array]:
    """y = x W^T in fp32, from exactly dequantised weights."""
    return [launch.inputs[0].astype(mx.float32) @ packed_of(launch, 1).dequantize().T]

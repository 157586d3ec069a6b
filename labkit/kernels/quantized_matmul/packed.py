"""Weights in MLX's affine quantisation: the layout that every matrix kernel here reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

GROUP_SIZES = (32, 64, 128)
BITS = (4, 8)
CONSTANT_BELOW = 8
"""MLX passes smaller arrays in Metal's `constant` space, which kernels that hand pointers on do not take."""


@dataclass(frozen=True)
class Packed:
    """A matrix of N rows of K weights, or one for each of E experts: weight = scale * q + bias.

    Attributes:
        w: [N, K * bits / 32] or [E, N, ...] uint32, q of the first weight in the lowest bits.
        scales, biases: [N, K / group_size] or [E, N, ...], one of each for a group of weights; one float dtype.
        group_size: 32, 64 or 128. bits: 4 or 8.

    Raises:
        ValueError: arrays that do not fit each other, or a group size or width that no kernel here reads.
    """

    w: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int = 64
    bits: int = 4

    def __post_init__(self):
        if self.group_size not in GROUP_SIZES or self.bits not in BITS:
            raise ValueError(
                f"groups of {', '.join(map(str, GROUP_SIZES))} and {' or '.join(map(str, BITS))} bits, "
                f"not groups of {self.group_size} and {self.bits} bits; requantise with mx.quantize"
            )
        if self.w.dtype != mx.uint32 or self.w.ndim not in (2, 3):
            raise ValueError(f"w is [N, words] or [E, N, words] uint32, not {self.w.shape} {self.w.dtype}")
        groups = (*self.w.shape[:-1], self.w.shape[-1] * 32 // self.bits // self.group_size)
        if self.scales.shape != groups or self.biases.shape != groups or self.scales.dtype != self.biases.dtype:
            raise ValueError(
                f"w of {self.w.shape}, {self.bits} bits, groups of {self.group_size}: scales and biases are {groups}, "
                f"not {self.scales.shape} {self.scales.dtype} and {self.biases.shape} {self.biases.dtype}"
            )
        if not mx.issubdtype(self.scales.dtype, mx.floating):
            raise ValueError(f"scales are floats, not {self.scales.dtype}")

    @classmethod
    def quantize(cls, weights: mx.array, group_size: int = 64, bits: int = 4) -> Packed:
        """Pack float weights [N, K] or [E, N, K] with `mx.quantize`."""
        return cls(*mx.quantize(weights, group_size, bits), group_size, bits)

    # Asked for at each product, so kept.
    @cached_property
    def n(self) -> int:
        """Rows: outputs of the product."""
        return self.w.shape[-2]

    @cached_property
    def k(self) -> int:
        """Columns: inputs of the product."""
        return self.w.shape[-1] * 32 // self.bits

    @property
    def experts(self) -> int:
        """Matrices that lie behind each other."""
        return self.w.shape[0] if self.w.ndim == 3 else 1

    @cached_property
    def arrays(self) -> list[mx.array]:
        """[w, scales, biases], as kernels take them."""
        return [self.w, self.scales, self.biases]

    @property
    def nbytes(self) -> int:
        """Of all three arrays."""
        return sum(array.nbytes for array in self.arrays)

    @cached_property
    def template(self) -> list[tuple[str, mx.Dtype | int]]:
        """The template arguments that describe it."""
        return [("S", self.scales.dtype), ("BITS", self.bits), ("GROUP", self.group_size), ("K", self.k), ("N", self.n)]

    @cached_property
    def fits_kernels(self) -> bool:
        """Whether all arrays are large enough for kernels to take."""
        return min(array.size for array in self.arrays) >= CONSTANT_BELOW

    @cached_property
    def host_arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """w as bytes, the first weight in the lowest bits of the first; scales and biases in float32.

        Where a CPU computes these are the arrays' own memory, but for 16-bit scales and biases, which are copied.
        """
        w = np.ascontiguousarray(np.array(self.w, copy=False)).view(np.uint8)  # little-endian
        factors = (np.array(array.astype(mx.float32), copy=False) for array in (self.scales, self.biases))
        return w, *(np.ascontiguousarray(array) for array in factors)

    @cached_property
    def host_addresses(self) -> tuple[int, int, int]:
        """Where `host_arrays` begin: asked for at each product, and numpy takes microseconds to say it."""
        return tuple(array.ctypes.data for array in self.host_arrays)

    def dequantize(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The weights, computed in fp32 and rounded once."""
        scales, biases = (array.astype(mx.float32) for array in (self.scales, self.biases))
        return mx.dequantize(self.w, scales, biases, self.group_size, self.bits).astype(dtype)


def forms(x: mx.array, *weights: Packed) -> tuple[str, ...]:
    """The forms of tiles that can multiply x by these weights: by plain lanes and simdgroup matrices always, by CUDA's
    tensor core where everything is of one 16-bit float dtype."""
    dtype = x.dtype
    sixteen = dtype in (mx.float16, mx.bfloat16) and all(p.scales.dtype == dtype for p in weights)
    return ("plain", "tensor") if sixteen else ("plain",)

"""The quantised product on a CPU: numba reads packed weights as they are; BLAS gets many rows and blocks of weights.

In fp32 whatever the activations are. Calls compute at once: MLX has no host callback, so that they cannot be traced.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.quantized_matmul.reference import packed_of
from labkit.kernels.signature import Launch

BLOCK_BYTES = 4 << 20
"""Of dequantised weights at a time: about what a core's cache keeps until BLAS has read them."""


def few_rows(launch: Launch) -> list[mx.array]:
    """x W^T for a few rows, weights read once."""
    x, packed = _host(launch.inputs[0]), packed_of(launch, 1)
    y = np.empty((x.shape[0], packed.n), np.float32)
    _compiled(packed.bits)[0](*_bytes(packed), x, y, packed.group_size)
    return [mx.array(y).astype(launch.output_dtypes[0])]


def many_rows(launch: Launch) -> list[mx.array]:
    """x W^T, blocks of rows of W dequantised in turn."""
    x, packed = _host(launch.inputs[0]), packed_of(launch, 1)
    w, scales, biases = _bytes(packed)
    y = np.empty((x.shape[0], packed.n), np.float32)
    step = max(1, BLOCK_BYTES // (4 * packed.k))
    block = np.empty((step, packed.k), np.float32)
    dequantize = _compiled(packed.bits)[1]
    for first in range(0, packed.n, step):
        part = slice(first, min(first + step, packed.n))
        size = part.stop - first
        dequantize(w[part], scales[part], biases[part], block[:size], packed.group_size)
        np.matmul(x, block[:size].T, out=y[:, part])
    return [mx.array(y).astype(launch.output_dtypes[0])]


def _host(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32), copy=False)


def _bytes(packed: Packed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    w = np.array(packed.w, copy=False).view(np.uint8)  # little-endian words: the first weight in the first byte
    return w, _host(packed.scales), _host(packed.biases)


@cache
def _compiled(bits: int):
    """(multiply, dequantize) for a number of bits, constant in the inner loops: so these become vector instructions."""
    import numba

    options = {"parallel": True, "fastmath": {"reassoc", "contract", "nsz"}, "cache": True}
    four = bits == 4

    @numba.njit(**options)
    def multiply(w, scales, biases, x, y, group):
        rows, groups, size = x.shape[0], scales.shape[1], group * bits // 8
        # A byte of 4-bit weights holds one of an even and one of an odd place.
        even, odd = x[:, 0::2].copy(), x[:, 1::2].copy()
        sums = np.empty((rows, groups), np.float32)
        for m in range(rows):
            for g in range(groups):
                sums[m, g] = x[m, g * group : (g + 1) * group].sum()
        for n in numba.prange(w.shape[0]):
            for m in range(rows):
                total = np.float32(0)
                for g in range(groups):
                    dot = np.float32(0)
                    if four:
                        for i in range(size):
                            byte = w[n, g * size + i]
                            low, high = np.float32(byte & 15), np.float32(byte >> 4)
                            dot += low * even[m, g * size + i] + high * odd[m, g * size + i]
                    else:
                        for i in range(size):
                            dot += np.float32(w[n, g * size + i]) * x[m, g * size + i]
                    total += scales[n, g] * dot + biases[n, g] * sums[m, g]
                y[m, n] = total

    @numba.njit(**options)
    def dequantize(w, scales, biases, out, group):
        size = group * bits // 8
        for n in numba.prange(w.shape[0]):
            for g in range(scales.shape[1]):
                scale, bias = scales[n, g], biases[n, g]
                if four:
                    for i in range(size):
                        byte = w[n, g * size + i]
                        out[n, 2 * (g * size + i)] = np.float32(byte & 15) * scale + bias
                        out[n, 2 * (g * size + i) + 1] = np.float32(byte >> 4) * scale + bias
                else:
                    for i in range(size):
                        out[n, g * size + i] = np.float32(w[n, g * size + i]) * scale + bias

    return multiply, dequantize

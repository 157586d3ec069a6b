"""The quantised product on a CPU: compiled loops on packed weights, in fp32 whatever the activations are.

A few rows meet the weights as they lie. Many rows are worth laying them out in panels first, block by block, whose
inner product models use on weights that they laid out once. Calls compute at once: MLX has no host callback, so that
they cannot be traced. numba is imported at the first call.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import numpy as np

from labkit.kernels.quantized_matmul.packed import Packed
from labkit.kernels.quantized_matmul.reference import packed_of
from labkit.kernels.signature import Launch
from labkit.kernels.workers import all_workers

OUTPUTS = 512
"""Of a task: some panels, whose laying out is a small part of their use."""

PARALLEL_FROM = 30_000_000
"""Products of a weight and an input from which threads share the outputs (about 1 ms of one)."""


def few_rows(launch: Launch) -> list[mx.array]:
    """x W^T for a few rows, weights read once, where they are."""
    return [few_rows_of(launch.inputs[0], packed_of(launch, 1), launch.output_dtypes[0])]


def few_rows_of(x: mx.array, packed: Packed, dtype: mx.Dtype) -> mx.array:
    """`few_rows` of x [M, K] without a launch, whose making takes a third of one row's product; in `dtype`."""
    from labkit.kernels.quantized_matmul.packed_loops import rows_by_packed

    rows = _host(x)
    y = np.empty((rows.shape[0], packed.n), np.float32)
    sizes = rows.shape[0], packed.bits, packed.k, packed.group_size
    places = *packed.host_addresses, rows.ctypes.data, *sizes, y.ctypes.data, packed.n
    _share(partial(rows_by_packed.call, *places), rows.shape[0], packed)
    result = mx.array(y)
    return result if dtype == mx.float32 else result.astype(dtype)


def many_rows(launch: Launch) -> list[mx.array]:
    """x W^T, blocks of W laid out in panels in turn."""
    from labkit.kernels.quantized_matmul.packed_loops import rows_by_panels, use_panels

    x, packed = _host(launch.inputs[0]), packed_of(launch, 1)
    y = np.empty((x.shape[0], packed.n), np.float32)
    use_panels(packed.bits)
    _share(partial(rows_by_panels, *packed.host_arrays, x, packed.bits, packed.group_size, y), x.shape[0], packed)
    return [mx.array(y).astype(launch.output_dtypes[0])]


def _share(stage, rows: int, packed: Packed) -> None:
    if rows * packed.n * packed.k < PARALLEL_FROM:
        stage(0, packed.n)
    else:
        all_workers().share(stage, packed.n, OUTPUTS)


def _host(array: mx.array) -> np.ndarray:
    floats = array if array.dtype == mx.float32 else array.astype(mx.float32)
    return np.ascontiguousarray(np.array(floats, copy=False))

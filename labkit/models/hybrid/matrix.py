"""A weight matrix in whatever form the checkpoint has it, and matrices joined so that one product serves several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from labkit.kernels.fused import embedding_rows
from labkit.kernels.quantized_matmul import Packed
from labkit.kernels.targets import target_in_use
from labkit.models.files import LoadError
from labkit.models.hybrid.config import NotSpecialised

Weights = Packed | mx.array
"""A matrix [N, K], or one for each expert [E, N, K]: packed, or plain floats."""

Tensors = Mapping[str, mx.array]


@dataclass(frozen=True)
class Matrix:
    """Matrices with the same inputs, their outputs side by side: one where their forms allow it, else several."""

    parts: tuple[Weights, ...]

    @cached_property
    def n(self) -> int:
        """Outputs."""
        return sum(rows_of(part) for part in self.parts)

    @cached_property
    def k(self) -> int:
        """Inputs."""
        part = self.parts[0]
        return part.k if isinstance(part, Packed) else part.shape[-1]

    @property
    def packed(self) -> Packed | None:
        """The one packed matrix that it is, or None."""
        return self.parts[0] if len(self.parts) == 1 and isinstance(self.parts[0], Packed) else None

    @property
    def arrays(self) -> list[mx.array]:
        """All that it holds."""
        return [array for part in self.parts for array in arrays_of(part)]

    def rows(self, indices: mx.array, dtype: mx.Dtype) -> mx.array:
        """Rows by their numbers [...] -> [..., K]: the lookup of an embedding."""
        (part,) = self.parts
        if isinstance(part, mx.array):
            return part[indices].astype(dtype)
        if target_in_use() is not None and part.fits_kernels:
            return embedding_rows(indices, part, dtype)
        taken = (array[indices] for array in part.arrays)
        return mx.dequantize(*taken, part.group_size, part.bits).astype(dtype)


def rows_of(part: Weights) -> int:
    """Outputs of one matrix."""
    return part.n if isinstance(part, Packed) else part.shape[-2]


def arrays_of(part: Weights) -> list[mx.array]:
    """The arrays of one matrix."""
    return part.arrays if isinstance(part, Packed) else [part]


def take(tensors: Tensors, name: str, rows: tuple[int, ...], inputs: int, dtype: mx.Dtype) -> Weights:
    """The matrix `name` of a checkpoint; its bits and groups follow from its shapes, which cannot be wrong.

    Args:
        tensors: under mlx-lm's names. rows: (N,), or (E, N) for one matrix an expert. inputs: K.
        dtype: of scales, biases and plain weights.

    Raises:
        NotSpecialised: a quantisation that the kernels do not read.
        LoadError: it is not there, or of another shape.
    """
    weight, scales = tensors[f"{name}.weight"], tensors.get(f"{name}.scales")
    if weight.shape[:-1] != rows or (scales is None and weight.shape[-1] != inputs):
        raise LoadError(f"{name} is {weight.shape}, where the config has {(*rows, inputs)}: they do not fit together")
    if scales is None:
        return weight.astype(dtype)
    biases = tensors.get(f"{name}.biases")
    if biases is None:
        raise NotSpecialised(f"{name} is quantised without biases (mxfp4 or the like): the kernels read affine codes")
    bits, groups = 32 * weight.shape[-1] // inputs, scales.shape[-1]
    if bits * inputs != 32 * weight.shape[-1] or inputs % groups:
        raise NotSpecialised(
            f"{name}: {weight.shape[-1]} words and {groups} groups do not divide into {inputs} weights a row"
        )
    try:
        return Packed(weight, scales.astype(dtype), biases.astype(dtype), inputs // groups, bits)
    except ValueError as error:
        raise NotSpecialised(f"{name}: {error}") from error


def same_form(*parts: Weights) -> bool:
    """Whether matrices can lie in one array."""
    return len({_form(part) for part in parts}) == 1


def _form(part: Weights) -> tuple:
    if isinstance(part, Packed):
        return part.bits, part.group_size, part.k, part.scales.dtype
    return part.shape[-1], part.dtype


def join(*parts: Weights, axis: int = 0) -> Weights:
    """Matrices of one form in one, along `axis` of every array."""
    return mapped(lambda *arrays: mx.concatenate(arrays, axis=axis), *parts)


def side_by_side(*parts: Weights) -> Matrix:
    """The outputs of all parts, in order: neighbours of one form become one matrix."""
    joined: list[list[Weights]] = []
    for part in parts:
        if joined and same_form(joined[-1][0], part):
            joined[-1].append(part)
        else:
            joined.append([part])
    return Matrix(tuple(join(*group) if len(group) > 1 else group[0] for group in joined))


def mapped(change: Callable[..., mx.array], *parts: Weights) -> Weights:
    """`change` applied to the arrays of the parts, one kind of array at a time."""
    if isinstance(parts[0], mx.array):
        return change(*parts)
    arrays = (change(*kind) for kind in zip(*(part.arrays for part in parts), strict=True))
    return Packed(*arrays, parts[0].group_size, parts[0].bits)

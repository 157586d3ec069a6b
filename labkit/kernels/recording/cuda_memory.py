"""Addresses and memory that MLX does not give: asked of the GPU by launches of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import mlx.core as mx

from labkit.kernels.recording.memory import as_bytes, from_bytes

PROBED = 32
"""Arrays whose addresses one launch tells."""


def addresses_of(arrays: Sequence[mx.array]) -> list[int]:
    """Where evaluated arrays lie: kernels tell, since MLX does not. 0 of an empty one."""
    some, found = [as_bytes(array) for array in arrays if array.size], []
    for at in range(0, len(some), PROBED):
        part = some[at : at + PROBED]
        part += part[:1] * (PROBED - len(part))
        found += _probe()(
            inputs=part, template=[], grid=(32, 1, 1), threadgroup=(32, 1, 1),
            output_shapes=[(PROBED,)], output_dtypes=[mx.uint64],
        )  # fmt: skip
    told = iter(mx.concatenate(found).tolist() if found else ())
    return [next(told) if array.size else 0 for array in arrays]


@cache
def _probe() -> Callable:
    names = [f"a{index}" for index in range(PROBED)]
    lines = [f"if (threadIdx.x == {index}) found[{index}] = (uint64_t){name};" for index, name in enumerate(names)]
    return mx.fast.cuda_kernel(
        name="labkit_addresses",
        input_names=names,
        output_names=["found"],
        source="\n".join(lines),
        ensure_row_contiguous=False,
    )


@cache
def _nothing() -> Callable:
    return mx.fast.cuda_kernel(
        name="labkit_nothing", input_names=["unread"], output_names=["made"], source="", ensure_row_contiguous=False
    )


def empty_like(array: mx.array) -> mx.array:
    """Memory for the same shape and dtype, by a launch of its own: MLX's operations may hand the same memory on."""
    if not array.size:
        return mx.zeros(array.shape, array.dtype)
    (made,) = _nothing()(
        inputs=[mx.array([0], mx.uint8)], template=[], grid=(32, 1, 1), threadgroup=(32, 1, 1),
        output_shapes=[(array.nbytes,)], output_dtypes=[mx.uint8],
    )  # fmt: skip
    return from_bytes(made, array)

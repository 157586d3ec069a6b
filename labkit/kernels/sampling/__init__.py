"""Choosing the next token on the device, one row at a time, without a trip to the host."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from labkit.kernels.door import takes_arrays
from labkit.kernels.headers import SHARED
from labkit.kernels.launch import Kernel
from labkit.kernels.sampling import reference
from labkit.kernels.sampling.draw import sample
from labkit.kernels.targets import threads_that_fit

__all__ = ["ARGMAX", "argmax", "argmax_call", "sample"]

ARGMAX = Kernel.from_file(
    Path(__file__).parent / "argmax.metal",
    ["logits", "V"],
    ["token"],
    name="argmax_rows",
    header=SHARED,
    reference=reference.argmax,
)


def argmax_call(logits: mx.array) -> dict:
    """The arguments of `ARGMAX` for `argmax`.

    Raises:
        ValueError: logits without rows or values.
    """
    if logits.ndim < 1 or logits.size == 0:
        raise ValueError(f"logits need shape [..., V] with at least one value, not {logits.shape}")
    vocabulary = logits.shape[-1]
    threads = threads_that_fit(min(1024, max(32, -(-vocabulary // 32) * 32)))
    return {
        "inputs": [logits, vocabulary],
        "template": [("THREADS", threads)],
        "grid": (logits.size // vocabulary * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [logits.shape[:-1]],
        "output_dtypes": [mx.uint32],
    }


@takes_arrays
def argmax(logits: mx.array, *, target: str | None = None) -> mx.array:
    """The most likely token of each row.

    Args:
        logits: [..., V], float32, float16 or bfloat16. NaN counts as less than everything.
        target: where to run (`labkit.kernels.targets`).

    Returns:
        [...] uint32: the index of the largest value, the smallest index among equals, 0 for a row of NaN.

    Raises:
        ValueError: logits without rows or values.
    """
    return ARGMAX(**argmax_call(logits), target=target)[0]

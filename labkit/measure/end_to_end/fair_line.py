"""mlx-lm with its own DeltaNet kernels where mlx-lm does not run them.

Off Metal, mlx-lm computes Gated DeltaNet in a Python loop over tokens, eight times slower than its own Metal text
behind labkit's CUDA header. To be ahead of the loop says little. So a comparison on CUDA shows two lines: mlx-lm as
released, and the fair line, which is mlx-lm's code and mlx-lm's kernel text on all that this device can do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from labkit.kernels.launch import Kernel

_MAKERS = {
    "_gated_delta_kernel": ("_make_gated_delta_kernel", {"has_mask": False, "vectorized": False}),
    "_gated_delta_kernel_masked": ("_make_gated_delta_kernel", {"has_mask": True, "vectorized": False}),
    "_gated_delta_kernel_packed": ("_make_gated_delta_packed_kernel", {}),
}


@contextlib.contextmanager
def own_deltanet(target: str | None = None) -> Iterator[None]:
    """While active, mlx-lm's Gated DeltaNet runs its own Metal text on labkit's kernel target.

    Nothing but `mlx_lm.models.gated_delta` sees a difference, and it is as before afterwards.

    Args:
        target: a kernel target of labkit ("cuda", "metal", "simulator"); the device's own by default.
    """
    from mlx_lm.models import gated_delta

    def metal_kernel(
        name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = "", **_: Any
    ) -> Any:
        kernel = _kernel(f"mlx_lm_{name}", tuple(input_names), tuple(output_names), source, header)
        return lambda **call: kernel(**call, target=target)

    seen = _WithMetal(metal_kernel)
    saved = {name: getattr(gated_delta, name) for name in ("mx", *_MAKERS)}
    gated_delta.mx = seen
    try:
        for name, (maker, options) in _MAKERS.items():
            setattr(gated_delta, name, getattr(gated_delta, maker)(**options))
        yield
    finally:
        for name, value in saved.items():
            setattr(gated_delta, name, value)


@cache
def _kernel(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...], source: str, header: str) -> Kernel:
    """Kept, so that what a device has compiled of it is kept."""
    return Kernel(name, inputs, outputs, source, header)


class _WithMetal:
    """`mlx.core` as a module sees it on a machine with Metal."""

    def __init__(self, metal_kernel: Any):
        self.metal = SimpleNamespace(is_available=lambda: True)
        self.fast = _Fast(metal_kernel)

    def default_device(self) -> Any:
        return mx.gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


class _Fast:
    def __init__(self, metal_kernel: Any):
        self.metal_kernel = metal_kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(mx.fast, name)

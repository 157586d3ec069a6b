"""Where recordings are replayed: what that must be able to do, and what there is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from labkit.kernels.recording.program import Place, Program
from labkit.kernels.targets import device_target

Resolve = Callable[[Place], int]


class Machine(Protocol):
    """Memory at addresses, and launches on it. Nothing waits but `wait` and `read`."""

    def addresses(self, arrays: Sequence[mx.array]) -> list[int]:
        """Where evaluated arrays lie; of one that is not whole in memory, where a copy of it lay until now, each in a
        place of its own."""
        ...

    def copies(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Evaluated arrays of the same values in memory of their own."""
        ...

    def prepare(self, program: Program) -> Any:
        """A program with all that does not depend on addresses."""
        ...

    def build(self, prepared: Any, resolve: Resolve) -> Any:
        """All its launches as one object, for the addresses that `resolve` gives places."""
        ...

    def move(self, built: Any, resolve: Resolve) -> None:
        """Change the addresses of what is given."""
        ...

    def release(self, built: Any) -> None:
        """Wait for what `build` gave, and let it go."""
        ...

    def launch(self, built: Any, reads: Sequence[tuple[int, int]]) -> Any:
        """Begin to replay, behind all that was begun before; then copy (address, bytes) to the host. Returns what
        `read` takes."""
        ...

    def read(self, begun: Any) -> list[np.ndarray]:
        """Wait for what `launch` began: its copies, uint8."""
        ...

    def copy(self, pairs: Sequence[tuple[int, int, int]]) -> None:
        """Begin to copy (to, from, bytes), behind all that was begun before."""
        ...

    def wait(self) -> None:
        """Until all that was begun is done."""
        ...


@cache
def machine_here() -> Machine | None:
    """What MLX computes on, if recordings can be replayed there: an NVIDIA GPU, with NVIDIA's bindings for Python."""
    if device_target() != "cuda":
        return None
    from labkit.kernels.recording import cuda_graph

    return None if cuda_graph.unavailable() else cuda_graph.CudaGraphs()

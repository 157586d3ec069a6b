"""What a step's launches should take on an H200, from their number, the bytes they move and the barriers within them.

The figures are of launches, barriers and streams measured apart. The device's part is a bound: a layer in one launch
took it three times as long (README.md says what was measured).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BARRIERS = {"sparse_half": 2, "linear_layer": 5, "full_layer": 7}
"""Grid-wide barriers of a launch."""

RATE = 3.2e12
"""Bytes a second of 1.76 GB in 240 stages without a barrier between them (0.55 ms). With one after each, and nothing on
its way before it, it took 1.04 ms."""

BARRIER = 1.3e-6
"""Seconds of a grid-wide barrier: 1.2 to 1.4 us."""

LAUNCH = 12e-6
"""Seconds of the host's time for a launch, of a fill as of a kernel: 275 of them took 3.4 ms of a step, what MLX does
for each operation between them inside (data/measured/h200_step_timeline.json)."""


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step.

    Attributes:
        host: in which the host launches. device: in which the GPU moves the bytes and threadgroups wait for each other;
            chains of loads within a stage come on top, and are not in it.
    """

    host: float
    device: float

    @property
    def seconds(self) -> float:
        """The longer of both: the host launches the next step while the GPU works."""
        return max(self.host, self.device)


def predict(launches: int, moved: float, barriers: int = 0) -> Prediction:
    """For a step of `launches` launches that move `moved` bytes, with `barriers` barriers within them."""
    return Prediction(launches * LAUNCH, moved / RATE + barriers * BARRIER)


def barriers_in(kernels: Mapping[str, int]) -> int:
    """Grid-wide barriers of a step, from how often each kernel is launched."""
    return sum(
        count * barriers
        for name, count in kernels.items()
        for kernel, barriers in BARRIERS.items()
        if name.removesuffix("_plain").removesuffix("_tensor") == kernel
    )

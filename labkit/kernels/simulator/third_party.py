"""Let kernels that other libraries built with `mx.fast.metal_kernel` run in the simulator, unmodified."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from labkit.kernels.signature import MetalText, make_launch
from labkit.kernels.simulator.faults import KernelFault
from labkit.kernels.simulator.run import STOPPING, Order, Run, run


class SimulatedKernel:
    """A drop-in for what `mx.fast.metal_kernel` returns: calling it runs the text on the CPU.

    `last` is the last call's `Run`.
    """

    def __init__(self, text: MetalText, session: Session | None = None):
        self.text = text
        self.last: Run | None = None
        self._session = session or Session()

    def __call__(self, **call) -> list[mx.array]:
        """The call of `mx.fast.metal_kernel`'s kernels. Raises KernelFault if the launch had to be stopped."""
        session = self._session
        self.last = run(
            self.text,
            make_launch(self.text, **call),
            check=session.check,
            order=session.order,
            resident=session.resident,
        )
        session.runs.append(self.last)
        if any(fault.kind in STOPPING for fault in self.last.faults):
            raise KernelFault(self.last.faults)
        return self.last.outputs

    def run(self, *, check: bool = False, order: Order = "forward", resident: bool = False, **call) -> Run:
        """One launch with its report; the remaining arguments are the call's."""
        self.last = run(self.text, make_launch(self.text, **call), check=check, order=order, resident=resident)
        return self.last


@dataclass
class Session:
    """How intercepted kernels run, and every run so far."""

    check: bool = False
    order: Order = "forward"
    resident: bool = False
    runs: list[Run] = field(default_factory=list)

    @property
    def faults(self) -> list:
        """The faults of all runs."""
        return [fault for one in self.runs for fault in one.faults]


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict | None = None,
) -> SimulatedKernel:
    """`mx.fast.metal_kernel` for a machine without Metal: the same arguments, a kernel that runs on the CPU.

    `compile_options` is taken and has no effect here.
    """
    text = MetalText(
        name, tuple(input_names), tuple(output_names), source, header, ensure_row_contiguous, atomic_outputs
    )
    return SimulatedKernel(text)


@contextlib.contextmanager
def intercept(*, check: bool = False, order: Order = "forward", resident: bool = False) -> Iterator[Session]:
    """While active, `mx.fast.metal_kernel` makes kernels that run in the simulator, and MLX says that Metal is there.

    Libraries build their kernels at import or at first use, so import them, or call what builds, inside:

        with simulator.intercept(check=True) as session:
            from mlx_lm.models.gated_delta import gated_delta_kernel
            ...
        print(session.faults)

    A library's kernels made inside keep running in the simulator afterwards; those made before are not touched.
    """
    session = Session(check, order, resident)

    def make(
        name, input_names, output_names, source, header="", ensure_row_contiguous=True, atomic_outputs=False, **options
    ) -> SimulatedKernel:
        kernel = metal_kernel(
            name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs, **options
        )
        kernel._session = session
        return kernel

    saved = mx.fast.metal_kernel, mx.metal.is_available
    mx.fast.metal_kernel, mx.metal.is_available = make, lambda: True
    try:
        yield session
    finally:
        mx.fast.metal_kernel, mx.metal.is_available = saved

"""Let kernels that other libraries built with `mx.fast.metal_kernel` run in the simulator, unmodified."""

from __future__ import annotations

import contextlib
import sys
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
def intercept(
    *, fresh: Sequence[str] = (), check: bool = False, order: Order = "forward", resident: bool = False
) -> Iterator[Session]:
    """While active, `mx.fast.metal_kernel` makes kernels that run in the simulator, and MLX says that Metal is there.

    Libraries build their kernels at import or at first use, so name the modules that do: inside, they are imported
    anew::

        with simulator.intercept(fresh=["mlx_lm.models.gated_delta"], check=True) as session:
            from mlx_lm.models.gated_delta import gated_delta_kernel
            ...
        print(session.faults)

    A library's kernels made inside keep running in the simulator afterwards; those made before are not touched.

    Args:
        fresh: modules (with all below them) to import anew inside; the former ones are put back at the end.
        check, order, resident: as for `simulator.run`, for every launch.

    Yields:
        the session: its `runs`, and all their `faults`. Its attributes may be changed between launches.
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
        with _fresh_modules(fresh):
            yield session
    finally:
        mx.fast.metal_kernel, mx.metal.is_available = saved


@contextlib.contextmanager
def _fresh_modules(names: Sequence[str]) -> Iterator[None]:
    """Forget modules while active; put back the former ones, and where they hang in their packages, afterwards."""

    def meant(module: str) -> bool:
        return any(module == name or module.startswith(name + ".") for name in names)

    former = {module: sys.modules.pop(module) for module in [*sys.modules] if meant(module)}
    try:
        yield
    finally:
        for module in [module for module in sys.modules if meant(module)]:
            del sys.modules[module]
        sys.modules.update(former)
        for module, value in former.items():
            package, _, name = module.rpartition(".")
            if package in sys.modules:
                setattr(sys.modules[package], name, value)

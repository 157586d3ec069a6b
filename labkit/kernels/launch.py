"""`Kernel`: one Metal text that runs on Metal, on CUDA, in the simulator, or as the functions registered beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from labkit.kernels.header import Header
from labkit.kernels.signature import Launch, MetalText, Scalar, TemplateValue, make_launch

Implementation = Callable[[Launch], Sequence[mx.array]]
"""Computes a launch's outputs from its inputs and template arguments, ignoring grid and threadgroup."""


@dataclass(frozen=True)
class CudaOverride:
    """A CUDA text that replaces the translated Metal text on that target; it sees the same names.

    Attributes:
        source: the body. Scalar inputs are values, attributes have Metal's names.
        header: what goes before it, at global scope.
        shared_memory: bytes of dynamic shared memory.
    """

    source: str
    header: str = ""
    shared_memory: int = 0


class Kernel:
    """A device kernel, called as `mx.fast.metal_kernel`'s kernels are.

    Args:
        name: unique in labkit; also the name of the function on the device.
        input_names, output_names: the buffers that the text sees.
        source: the body of the Metal function, as `mx.fast.metal_kernel` takes it.
        header: what goes before the function: a text, or a `Header` of which the used sections are taken.
        ensure_row_contiguous, atomic_outputs, compile_options: as for `mx.fast.metal_kernel`.
        reference: the same in MLX's own operations, fp32 from upcast inputs to the end: what other targets are held to.
        native: the same as a Python or numba function, for machines whose device is the CPU.
        cuda: a hand-written CUDA text under the same contract, where the translated one is not good enough.
        resident: all threadgroups must live at once, since they wait for each other (`labkit.kernels.resident`).
        in_place: inputs that may be the very memory of an output, by the output's name: each thread reads what it
            rewrites before it does, and nobody else reads that (`labkit.kernels.in_place`).

    Raises:
        ValueError: a name that cannot be a function's, names that occur twice, or an `in_place` that names no buffers,
            or comes with a CUDA text of its own, which no check has seen.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str | Header = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: dict[str, str] | None = None,
        *,
        reference: Implementation | None = None,
        native: Implementation | None = None,
        cuda: CudaOverride | None = None,
        resident: bool = False,
        in_place: Mapping[str, str] | None = None,
    ):
        if not name.isidentifier():
            raise ValueError(f"a kernel's name is an identifier, not {name!r}")
        names = [*input_names, *output_names]
        if twice := {n for n in names if names.count(n) > 1}:
            raise ValueError(f"kernel {name}: buffer names occur twice: {sorted(twice)}")
        in_place = dict(in_place or {})
        if set(in_place) - set(input_names) or set(in_place.values()) - set(output_names) or (in_place and cuda):
            raise ValueError(f"kernel {name}: in_place {in_place} is for inputs and outputs of a Metal text alone")
        emitted = header.used_by(source) if isinstance(header, Header) else header
        self.text = MetalText(
            name, tuple(input_names), tuple(output_names), source, emitted, ensure_row_contiguous, atomic_outputs
        )
        self.compile_options = compile_options
        self.reference = reference
        self.native = native
        self.cuda = cuda
        self.resident = resident
        self.in_place = in_place
        self.device_kernels: dict[Any, Any] = {}  # what the metal and cuda targets built, by what shapes the text
        self.device_launches: dict[Any, Any] = {}  # what they prepared for launches of one form

    @classmethod
    def from_file(
        cls, path: Path, input_names: Sequence[str], output_names: Sequence[str], *, name: str | None = None, **options
    ) -> Kernel:
        """A kernel whose source is a `.metal` file; its name is the file's unless given."""
        return cls(name or path.stem, input_names, output_names, path.read_text(), **options)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.text.name

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | Scalar],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, TemplateValue]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
        target: str | None = None,
    ) -> list[mx.array]:
        """Launch the kernel: the call of `mx.fast.metal_kernel`'s kernels, and where to run.

        Args:
            inputs: arrays, or numbers that become scalar arrays.
            output_shapes, output_dtypes: of each output.
            grid: threads in all, in three dimensions (of threads, not of threadgroups).
            threadgroup: threads of a threadgroup, at most 1,024.
            template: (name, dtype or bool or int) for the text's template arguments.
            init_value: what outputs hold before the kernel writes; undefined without it.
            verbose: print the generated text.
            stream: MLX stream or device; metal and cuda only.
            target: "metal", "cuda", "simulator", "native" or "reference"; by default the one that `use_target` set, or
                else the best that this machine has for this kernel (`labkit.kernels.targets.default_target`).

        Raises:
            ValueError, TypeError: arguments that do not fit the kernel's names.
            RuntimeError: the target is not there on this machine or for this kernel.
        """
        from labkit.kernels.targets import run_on

        launch = self.launch(
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=threadgroup,
            template=template,
            init_value=init_value,
            verbose=verbose,
            stream=stream,
        )
        return run_on(target, self, launch)

    def launch(self, **call) -> Launch:
        """The checked arguments of a call, without running it."""
        return make_launch(self.text, **call)

    def rewritten(self, launch: Launch) -> dict[str, str]:
        """The pairs of `in_place` that have one shape and dtype in this launch."""
        inputs = {n: (a.shape, a.dtype) for n, a in zip(self.text.input_names, launch.inputs, strict=True)}
        forms = zip(launch.output_shapes, launch.output_dtypes, strict=True)
        outputs = dict(zip(self.text.output_names, forms, strict=True))
        return {old: new for old, new in self.in_place.items() if inputs[old] == outputs[new]}

    def __repr__(self) -> str:
        return f"Kernel({self.name}: {', '.join(self.text.input_names)} -> {', '.join(self.text.output_names)})"

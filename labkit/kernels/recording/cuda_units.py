"""The machine code of a noted launch: the text that MLX would compile, under a name that can be found."""

from __future__ import annotations

from pathlib import Path

from labkit.kernels import cuda_build
from labkit.kernels.artefacts import ArtefactCache, content_key
from labkit.kernels.cuda_build.unit import function_name
from labkit.kernels.recording.program import Node, NotRecordable
from labkit.kernels.targets.cuda_text import CudaText, is_whole, translate


def form_of(node: Node) -> tuple:
    """What decides over a launch's text."""
    launch = node.launch
    arrays = tuple((array.dtype, array.ndim == 0) for array in launch.inputs)
    return (
        node.kernel.name,
        arrays,
        tuple(map(type, launch.numbers)),
        launch.output_dtypes,
        launch.template,
        is_whole(launch),
    )


def text_of(node: Node) -> CudaText:
    """A launch's text."""
    override = node.kernel.cuda
    return translate(node.kernel.text, node.launch, *((override.source, override.header) if override else ()))


def unit_of(node: Node) -> str:
    """The translation unit of a launch.

    Raises:
        NotRecordable: the kernel asks for an input's shape.
    """
    kernel = node.kernel
    unit = cuda_build.translation_unit(kernel.text, node.launch, kernel.cuda)
    if "__grid_constant__" in unit:
        raise NotRecordable(f"kernel {kernel.name} asks for an input's shape, which a recording does not pass on")
    name = function_name(kernel.text)
    return unit.replace(f"__global__ void {name}(", f'extern "C" __global__ void {name}(')


def cubin_of(unit: str, architecture: str) -> bytes:
    """Its machine code, compiled once a machine."""

    def write(folder: Path) -> None:
        (folder / "kernel.cubin").write_bytes(cuda_build.compile_cuda(unit, architecture=architecture).cubin)

    key = content_key("cubin", unit, architecture, repr(cuda_build.version()))
    return (ArtefactCache().get(key, write) / "kernel.cubin").read_bytes()

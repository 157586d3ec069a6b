"""Recordings as CUDA graphs: labkit's texts compiled by NVRTC, chained in a graph, launched by NVIDIA's driver."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from labkit.kernels import cuda_build
from labkit.kernels.cuda_build.unit import function_name
from labkit.kernels.recording.cuda_memory import addresses_of, empty_like
from labkit.kernels.recording.cuda_units import cubin_of, form_of, text_of, unit_of
from labkit.kernels.recording.machine import Resolve
from labkit.kernels.recording.program import Node, Program
from labkit.kernels.resident import check_resident, multiprocessors
from labkit.kernels.signature import threadgroup_size
from labkit.kernels.targets import cuda
from labkit.kernels.targets.cuda_text import CudaText

COMPILERS = 8
"""Texts compiled at once."""

DECLARED = 48 * 1024
"""Bytes of a threadgroup's memory beyond which a function must be told that it may have them."""


def unavailable() -> str:
    """Why nothing can be recorded here, or ""."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "NVIDIA's bindings are not installed: cuda-bindings from PyPI brings them"
    return cuda_build.unavailable()


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _call(function: Callable, *arguments: Any) -> Any:
    """A driver's function; its result, or the error as an exception."""
    status, *result = function(*arguments)
    if int(status):
        raise RuntimeError(f"{function.__name__} failed: {status.name}")
    return result[0] if len(result) == 1 else result


class Call(NamedTuple):
    """One launch but for its addresses.

    Attributes:
        constants: addresses of what is passed behind its inputs: the words of its numbers, its grid. kept: the arrays.
    """

    node: Node
    text: CudaText
    function: Any
    shared: int
    constants: tuple[int, ...]
    kept: tuple[mx.array, ...]


@dataclass
class Graph:
    """A graph that can be launched, each call with its node, and the host's memory for its copies by their number.

    Attributes:
        held: lets go of all of it.
    """

    executable: Any
    nodes: list[tuple[Call, Any]]
    event: Any
    pinned: dict[int, tuple[int, np.ndarray]]
    held: contextlib.ExitStack


class Begun(NamedTuple):
    """One replay of a graph, which copies so many arrays to the host."""

    graph: Graph
    copies: int


class CudaGraphs:
    """One stream of the GPU that MLX computes on, beside MLX's own."""

    def __init__(self) -> None:
        driver = self._d = _driver()
        _call(driver.cuInit, 0)
        device = _call(driver.cuDeviceGet, 0)
        self._context = _call(driver.cuDevicePrimaryCtxRetain, device)
        self._current = threading.local()
        self._enter()
        self._architecture = _architecture(driver, device)
        self._stream = _call(driver.cuStreamCreate, int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._loaded: dict[tuple, tuple[CudaText, Any, int]] = {}
        self._modules: list[Any] = []

    def _enter(self) -> None:
        """Each thread has a current context of its own."""
        if not getattr(self._current, "entered", False):
            _call(self._d.cuCtxSetCurrent, self._context)
            self._current.entered = True

    # -- memory --------------------------------------------------------------------------------------------------------

    def addresses(self, arrays: Sequence[mx.array]) -> list[int]:
        """Where evaluated arrays lie."""
        return addresses_of(arrays)

    def copies(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Evaluated arrays of the same values in memory of their own."""
        made = [empty_like(array) for array in arrays]
        mx.eval(made)
        where = self.addresses([*made, *arrays])
        self.wait()
        self.copy([(to, at, a.nbytes) for to, at, a in zip(where, where[len(made) :], arrays, strict=False)])
        self.wait()
        return made

    def copy(self, pairs: Sequence[tuple[int, int, int]]) -> None:
        """Begin to copy (to, from, bytes), behind all that was begun before."""
        self._enter()
        for to, source, nbytes in pairs:
            if nbytes:
                _call(self._d.cuMemcpyDtoDAsync, to, source, nbytes, self._stream)

    def wait(self) -> None:
        """Until all that was begun is done, by MLX too."""
        self._enter()
        mx.synchronize()
        _call(self._d.cuStreamSynchronize, self._stream)

    # -- graphs --------------------------------------------------------------------------------------------------------

    def prepare(self, program: Program) -> list[Call]:
        """Compile what was not compiled before, several texts at once; all that launches need but their addresses.

        Raises:
            NotRecordable: a kernel that asks for an input's shape.
        """
        self._enter()
        forms = [form_of(node) for node in program.nodes]
        example = dict(zip(forms, program.nodes, strict=True))
        new = {form: unit_of(node) for form, node in example.items() if form not in self._loaded}
        with ThreadPoolExecutor(COMPILERS) as pool:
            cubins = list(pool.map(lambda text: cubin_of(text, self._architecture), new.values()))
        for form, cubin in zip(new, cubins, strict=True):
            self._loaded[form] = self._load(example[form], cubin)
        constants = [
            cuda.constants(node.launch, self._loaded[form][0]) for form, node in zip(forms, program.nodes, strict=True)
        ]
        where = iter(self.addresses([array for some in constants for array in some]))
        return [
            Call(node, *self._loaded[form], tuple(next(where) for _ in some), some)
            for node, form, some in zip(program.nodes, forms, constants, strict=True)
        ]

    def build(self, calls: Sequence[Call], resolve: Resolve) -> Graph:
        """All launches in a chain."""
        self._enter()
        driver = self._d
        with contextlib.ExitStack() as held:  # whatever fails, what is there by then goes
            graph = _call(driver.cuGraphCreate, 0)
            held.callback(_call, driver.cuGraphDestroy, graph)
            nodes: list[Any] = []
            for call in calls:
                behind, parameters = nodes[-1:], self._parameters(call, resolve)
                nodes.append(_call(driver.cuGraphAddKernelNode, graph, behind, len(behind), parameters))
            executable = _call(driver.cuGraphInstantiate, graph, 0)
            held.callback(_call, driver.cuGraphExecDestroy, executable)
            _call(driver.cuGraphUpload, executable, self._stream)
            event = _call(driver.cuEventCreate, int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
            held.callback(_call, driver.cuEventDestroy, event)
            return Graph(executable, list(zip(calls, nodes, strict=True)), event, {}, held.pop_all())

    def move(self, built: Graph, resolve: Resolve) -> None:
        """Change the addresses of what is given."""
        self._enter()
        for call, handle in built.nodes:
            if call.node.given:
                _call(self._d.cuGraphExecKernelNodeSetParams, built.executable, handle, self._parameters(call, resolve))

    def release(self, built: Graph) -> None:
        """Wait for it, and let it go."""
        self._enter()
        with built.held:
            _call(self._d.cuStreamSynchronize, self._stream)
        built.pinned.clear()

    def launch(self, built: Graph, reads: Sequence[tuple[int, int]]) -> Begun:
        """Begin to replay, then to copy (address, bytes) to the host."""
        self._enter()
        driver = self._d
        _call(driver.cuGraphLaunch, built.executable, self._stream)
        for index, (address, size) in enumerate(reads):
            if index not in built.pinned:
                built.pinned[index] = self._pinned(size)
                built.held.callback(_call, driver.cuMemFreeHost, built.pinned[index][0])
            _call(driver.cuMemcpyDtoHAsync, built.pinned[index][0], address, size, self._stream)
        _call(driver.cuEventRecord, built.event, self._stream)
        return Begun(built, len(reads))

    def read(self, begun: Begun) -> list[np.ndarray]:
        """Wait for it: its copies."""
        self._enter()
        _call(self._d.cuEventSynchronize, begun.graph.event)
        return [begun.graph.pinned[index][1].copy() for index in range(begun.copies)]

    def _pinned(self, nbytes: int) -> tuple[int, np.ndarray]:
        address = int(_call(self._d.cuMemAllocHost, nbytes))
        return address, np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    # -- kernels -------------------------------------------------------------------------------------------------------

    def _parameters(self, call: Call, resolve: Resolve) -> Any:
        launch = call.node.launch
        group = threadgroup_size(launch)
        parameters = self._d.CUDA_KERNEL_NODE_PARAMS()
        parameters.func = call.function
        blocks = [-(-size // part) for size, part in zip(launch.grid, group, strict=True)]
        parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = blocks
        parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = group
        parameters.sharedMemBytes = call.shared
        addresses = [resolve(call.node.inputs[index]) for index in call.text.arrays]
        addresses += [*call.constants, *(resolve(place) for place in call.node.outputs)]
        parameters.kernelParams = (tuple(addresses), (ctypes.c_void_p,) * len(addresses))
        return parameters

    def _load(self, node: Node, cubin: bytes) -> tuple[CudaText, Any, int]:
        """A launch's text, its function, its dynamic shared memory."""
        driver, kernel = self._d, node.kernel
        if kernel.resident:
            check_resident(kernel.name, node.launch, multiprocessors())
        module = _call(driver.cuModuleLoadData, cubin)
        function = _call(driver.cuModuleGetFunction, module, function_name(kernel.text).encode())
        shared = kernel.cuda.shared_memory if kernel.cuda else 0
        if shared > DECLARED:
            most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call(driver.cuFuncSetAttribute, function, most, shared)
        self._modules.append(module)
        return text_of(node), function, shared


def _architecture(driver: Any, device: Any) -> str:
    attribute = driver.CUdevice_attribute
    major = _call(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = _call(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

"""NVIDIA's run-time compiler (NVRTC) from its wheel, or from an installed toolkit, given what MLX gives it."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.kernels.cuda_build.headers import Headers, light_headers

ARCHITECTURE = "sm_90a"
"""The H100 and H200; MLX compiles for the device that is there."""

_LAYOUTS = (("cu13/lib/libnvrtc.so.13", "cu13/include"), ("cuda_nvrtc/lib/libnvrtc.so.12", "cuda_runtime/include"))
"""The library and CUDA's headers in the folder `nvidia` of an environment, for CUDA 13 and 12."""


class CudaMissing(RuntimeError):
    """The compiler's wheels are not installed."""


class CudaError(Exception):
    """A text that does not compile; the message is the compiler's log."""


@dataclass(frozen=True)
class CompiledCuda:
    """A translation unit's machine code.

    Attributes:
        cubin: an ELF file. log: what the assembler says of registers, spills and memory.
    """

    cubin: bytes
    log: str


def unavailable() -> str:
    """Why nothing can be compiled here, or ""."""
    try:
        _installed()
    except CudaMissing as missing:
        return str(missing)
    return ""


def compile_cuda(source: str, headers: Headers | None = None, architecture: str = ARCHITECTURE) -> CompiledCuda:
    """Compile a translation unit as MLX would, for a chip that need not be there.

    Args:
        headers: what MLX includes before a kernel; by default light stand-ins, which compile in a tenth of the time.
        architecture: such as "sm_90a".

    Raises:
        CudaMissing: the wheels are not installed. CudaError: the text does not compile.
    """
    library, include = _installed()
    headers = headers or light_headers()
    options = [
        f"--gpu-architecture={architecture}",
        *(f"--include-path={folder}" for folder in (*headers.folders, include)),
        "--device-as-default-execution-space",
        "--ptxas-options=-v",
    ]
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program),
            source.encode(),
            b"kernel.cu",
            len(headers.texts),
            _strings(headers.texts.values()),
            _strings(headers.texts),
        )
    )
    try:
        failed = library.nvrtcCompileProgram(program, len(options), _strings(options))
        log = _fetch(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program).rstrip(b"\0").decode()
        if failed:
            raise CudaError(log)
        return CompiledCuda(_fetch(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), log)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> tuple[int, int]:
    """The compiler's version.

    Raises:
        CudaMissing: it is not installed.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_installed()[0].nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


@cache
def _installed() -> tuple[ctypes.CDLL, Path]:
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        for library, include in _LAYOUTS:
            if (Path(folder) / library).exists() and (Path(folder) / include / "cuda_fp16.h").exists():
                return ctypes.CDLL(str(Path(folder) / library)), Path(folder) / include
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if (toolkit / "lib64" / "libnvrtc.so").exists() and (toolkit / "include" / "cuda_fp16.h").exists():
        return ctypes.CDLL(str(toolkit / "lib64" / "libnvrtc.so")), toolkit / "include"
    raise CudaMissing("CUDA texts are compiled by NVRTC: `uv sync --inexact --group cuda-compile` brings it (60 MB)")


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC failed with status {status}")


def _strings(texts) -> ctypes.Array:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _fetch(size_of, copy, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(copy(program, buffer))
    return buffer.raw

"""CUDA texts compiled without a GPU: what the compiler gets, what it refuses, what it says of registers."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import Kernel, cuda_build
from labkit.kernels.check import check_cuda_text
from labkit.kernels.cuda_build.headers import light_headers, mlx_headers
from labkit.kernels.cuda_build.usage import Usage, usage
from labkit.kernels.registry import Case, Entry

needs_nvrtc = pytest.mark.skipif(bool(cuda_build.unavailable()), reason=cuda_build.unavailable())

LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3mlx4core2cu' for 'sm_90a'
ptxas info    : Function properties for _ZN3mlx4core2cu
ptxas         .     72 bytes stack frame, 68 bytes spill stores, 76 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 72 bytes cumulative stack size, 32768 bytes smem
"""


def entry(source: str, **options) -> Entry:
    """A kernel of one input and one output for 64 threads."""
    kernel = Kernel("sketch", ["x"], ["y"], source, **options)

    def make(dtype):
        return kernel.launch(
            inputs=[mx.zeros((64,), dtype)],
            grid=(64, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(64,)],
            output_dtypes=[dtype],
        )

    return Entry(kernel, (Case("64", make),), "")


def test_the_log_of_the_assembler_is_read():
    found = usage(LOG)
    assert found == Usage(registers=255, stack=72, spill_stores=68, spill_loads=76, shared=32768)
    with pytest.raises(ValueError, match="no kernel"):
        usage("ptxas info    : 0 bytes gmem")


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "groups"),
    [
        (32, 0, 256, 8),  # all threads live
        (33, 0, 256, 6),  # registers go out in eights a thread
        (255, 32768, 128, 2),
        (32, 48 * 1024, 64, 4),  # 49 KB of 228 each
        (16, 0, 32, 32),  # no more than 32 threadgroups
    ],
)
def test_how_many_threadgroups_live_at_once(registers, shared, threads, groups):
    found = Usage(registers, 0, 0, 0, shared)
    assert found.groups(threads) == groups
    assert found.occupancy(threads) == groups * threads / 2048


def test_the_unit_has_the_signature_that_mlx_writes():
    sketch = entry("y[thread_position_in_grid.x] = x[x_shape[0] - 1];")
    unit = cuda_build.translation_unit(sketch.kernel.text, sketch.cases[0].make(mx.bfloat16))
    signature = unit[unit.index("__global__") :].split("{")[0]
    assert "".join(signature.split()) == (
        "__global__voidcustom_kernel_sketch(const__nv_bfloat16*x,const__grid_constant__Shapex_shape,__nv_bfloat16*y)"
    )
    assert unit.index('#include "mlx/backend/cuda/device/utils.cuh"') < unit.index("namespace metal")


def test_mlx_headers_come_out_of_its_library(tmp_path):
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / "libmlx.so"
    texts = {
        "utils": "// © one\nstruct LoopedElemToLoc {};",
        "complex": "// two\nusing complex_t = int;",
        "config": "#define WARP_SIZE 32",
    }
    library.write_bytes(b"\x7fELF\0" + "\0\0".join(texts.values()).encode() + b"\0rest")
    found = mlx_headers(tmp_path)
    assert found.texts["mlx/backend/cuda/device/complex.cuh"] == texts["complex"]
    assert set(found.texts) - {"cooperative_groups.h"} >= set(light_headers().texts) - {"cooperative_groups.h"}
    library.write_bytes(b"\x7fELF\0")
    with pytest.raises(ValueError, match="no CUDA build of MLX"):
        mlx_headers(tmp_path)


@needs_nvrtc
def test_what_is_compiled_says_what_it_takes():
    sketch = entry("threadgroup float memory[64]; memory[thread_index_in_simdgroup] = x[0]; y[0] = memory[3];")
    unit = cuda_build.translation_unit(sketch.kernel.text, sketch.cases[0].make(mx.float32))
    compiled = cuda_build.compile_cuda(unit)
    assert compiled.cubin[:4] == b"\x7fELF"
    found = usage(compiled.log)
    assert (found.shared, found.spill_stores, found.stack) == (256, 0, 0)
    assert 8 <= found.registers <= 32


@needs_nvrtc
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("y[0] = x[0] + missing;", "missing"),
        # Fine for nvcc; ambiguous at run time, where Metal's `uint3` is in scope beside CUDA's.
        ("uint3 p = make_uint3(0, 0, 0); y[p.x] = x[thread_position_in_grid.x];", "make_uint3"),
        ('asm volatile("no.such.instruction;"); y[0] = x[0];', "no"),
    ],
)
def test_the_gate_finds_what_does_not_compile(source, says):
    result = check_cuda_text(entry(source), mx.float32, seed=1)
    assert not result.passed
    assert says in result.detail


@needs_nvrtc
def test_the_gate_passes_what_compiles():
    sketch = entry("y[thread_position_in_grid.x] = simd_sum(x[thread_position_in_grid.x]);")
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        assert check_cuda_text(sketch, dtype, seed=1).passed


def test_without_the_compiler_the_message_says_how_to_get_it(monkeypatch):
    from labkit.kernels.cuda_build import compiler

    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    compiler._installed.cache_clear()
    try:
        assert "cuda-compile" in cuda_build.unavailable()
        with pytest.raises(cuda_build.CudaMissing, match="NVRTC"):
            cuda_build.compile_cuda("")
    finally:
        monkeypatch.undo()
        compiler._installed.cache_clear()

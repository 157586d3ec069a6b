"""CUDA texts in files: the same code, and a launch's text of one line."""

from __future__ import annotations

import mlx.core as mx
import pytest

from labkit.kernels import Kernel, cuda_build
from labkit.kernels.registry import find_entries
from labkit.kernels.targets import cuda_files
from labkit.kernels.targets.cuda_text import translate


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_CACHE_DIR", str(tmp_path / "a cache"))
    cuda_files._written.cache_clear()
    yield tmp_path
    cuda_files._written.cache_clear()


def of_one(body: str, names=("x",)):
    kernel = Kernel("one", list(names), ["y"], body)
    launch = kernel.launch(
        inputs=[mx.zeros((64,)) for _ in names],
        grid=(64, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(64,)],
        output_dtypes=[mx.float32],
    )
    return translate(kernel.text, launch)


@pytest.mark.skipif(bool(cuda_build.unavailable()), reason=cuda_build.unavailable())
def test_the_compiled_code_is_that_of_the_whole_text(monkeypatch):
    entry = find_entries(["few_rows_tensor"])[0]
    launch = entry.cases[0].make(entry.dtypes[-1])
    whole = cuda_build.translation_unit(entry.kernel.text, launch)
    monkeypatch.setattr(cuda_build.unit, "translate", lambda *given: cuda_files.in_files(translate(*given)))
    short = cuda_build.translation_unit(entry.kernel.text, launch)
    assert len(short) < len(whole) / 10
    assert cuda_build.compile_cuda(short).cubin == cuda_build.compile_cuda(whole).cubin


def test_mlx_finds_the_names_that_it_looks_for():
    text = of_one("uint i = thread_position_in_grid.x; y[i] = x[i % x_shape[0]] + ab_strides[0];", ("x", "ab", "c"))
    short = cuda_files.in_files(text)
    for name in text.input_names:
        for suffix in ("shape", "strides", "ndim"):
            assert (f"{name}_{suffix}" in short.source) == (f"{name}_{suffix}" in text.source)


def test_other_texts_lie_in_other_files():
    one, same, other = (cuda_files.in_files(of_one(f"y[thread_position_in_grid.x] = {n};")) for n in (1, 1, 2))
    assert one == same
    assert one.source != other.source


def test_a_folder_that_cannot_be_written_leaves_the_text_as_it_is(own_folder, monkeypatch):
    (own_folder / "a cache").write_text("a file where the folder should be")
    text = of_one("y[thread_position_in_grid.x] = 3;")
    assert cuda_files.in_files(text) == text

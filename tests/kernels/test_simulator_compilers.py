"""The simulator's compilers: the same bits from each, and what is said without one."""

from __future__ import annotations

import shutil
import subprocess
import sys

import mlx.core as mx
import pytest

from labkit.kernels import simulator
from labkit.kernels.artefacts import ArtefactCache
from labkit.kernels.signature import MetalText, make_launch
from labkit.kernels.simulator.compiler import Build, build_library
from labkit.kernels.simulator.translation import translate
from tests.kernels.bodies import HEAD, launch, norm_runs

ZIG = (sys.executable, "-m", "ziglang", "c++")


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("way", ["zig", "portable switch"])
def test_other_compilers_and_switches_give_the_same_bits(way, check):
    options = {"compiler": ZIG} if way == "zig" else {"portable_switch": True}
    one, other = norm_runs(check=check), norm_runs(check=check, **options)
    assert other.clean, str(other)
    assert all(mx.array_equal(a, b) for a, b in zip(one.outputs, other.outputs, strict=True))
    if check:
        assert other.traffic.buffers == one.traffic.buffers
        assert {f.line for f in other.traffic.by_line} == {f.line for f in one.traffic.by_line}


@pytest.mark.skipif(not (shutil.which("ldd") and shutil.which("g++")), reason="asks the loader what GCC linked")
def test_a_kernel_needs_no_library_of_the_compiler():
    """Reading one took three quarters of each link."""
    text = MetalText("plain", ("x",), ("y",), HEAD + "y[i] = x[i];")
    call = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.float32]}
    translated = translate(text, make_launch(text, inputs=[mx.zeros((64,))], **call))
    library = build_library(translated, Build(check=True), ArtefactCache())
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert "libc." in needed or "musl" in needed
    assert "++" not in needed


def test_a_fault_found_through_zig_names_its_line():
    text = MetalText("racy", ("x",), ("y",), HEAD + "threadgroup bfloat16_t s[64];\ns[t] = x[i];\ny[i] = s[63 - t];")
    x = mx.random.normal((64,)).astype(mx.bfloat16)
    call = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1), "output_shapes": [(64,)], "output_dtypes": [mx.bfloat16]}
    run = simulator.run(text, make_launch(text, inputs=[x], **call), check=True, compiler=ZIG)
    lines = {fault.line for fault in run.faults if fault.kind == "race-between-simdgroups"}
    assert 4 in lines
    assert lines <= {3, 4}, "the write may meet the other simdgroup's early read too"


def test_no_compiler_says_how_to_get_one(monkeypatch):
    monkeypatch.delenv("LABKIT_CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(simulator.CompilerMissing, match="pip install ziglang") as caught:
        simulator.find_compiler()
    assert "g++" in str(caught.value)
    assert "LABKIT_CXX" in str(caught.value)


def test_without_a_system_compiler_zigs_is_taken(monkeypatch):
    monkeypatch.delenv("LABKIT_CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert simulator.find_compiler() == ZIG
    monkeypatch.setenv("LABKIT_CXX", "clang++ -v")
    assert simulator.find_compiler() == ("clang++", "-v")


def test_a_text_that_does_not_compile_names_its_line():
    with pytest.raises(simulator.CompileError, match=r"body\.metal:3.*undeclared_name"):
        launch("\ny[i] = undeclared_name;", [mx.zeros((64,))], (64,))


def test_storage_in_the_header_is_refused():
    with pytest.raises(ValueError, match="line 2 declares threadgroup storage"):
        launch("y[i] = x[i];", [mx.zeros((64,))], (64,), header="inline void f() {\n  threadgroup float s[4];\n}")

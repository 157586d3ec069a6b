"""What labkit hands to `mx.fast.metal_kernel`, as far as it can be told without a Mac."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import mlx
import mlx.core as mx
import pytest

from labkit.kernels import Kernel, simulator, use_target
from labkit.kernels.check import compare
from labkit.kernels.metal_text import blank, identifiers, strip_comments
from labkit.kernels.recording.counting import COUNT_ON
from labkit.kernels.registry import all_entries
from labkit.kernels.routing.launches import group_rows_call
from labkit.kernels.signature import threadgroup_size
from labkit.kernels.targets import SURE_ON_METAL, metal, run_on

PRELUDE = Path(next(iter(mlx.__path__))) / "include" / "mlx" / "backend" / "metal" / "kernels"


def test_the_function_begins_on_a_line_of_its_own():
    """MLX writes `template <...> [[kernel]] void` straight behind the header: after an `#endif` it would be lost."""
    kernel = Kernel("guarded", ["x"], ["y"], "y[0] = f(x[0]);", header="#if 1\nfloat f(float a) { return a; }\n#endif")
    assert metal.arguments(kernel)["header"].splitlines()[-1] == "#endif"
    assert metal.arguments(kernel)["header"].endswith("\n")


def global_names(text: str) -> set[str]:
    """Names of functions, structs and constants outside every brace."""
    code = blank(text)
    while (flat := re.sub(r"\{[^{}]*\}", " ; ", code)) != code:
        code = flat
    functions = re.findall(r"\b(\w+)\s*\([^()]*\)\s*(?:const)?\s*;", code)
    return set(functions) | set(re.findall(r"\bstruct\s+(\w+)", code))


@pytest.mark.skipif(not (PRELUDE / "utils.h").exists(), reason="this MLX has no headers")
def test_no_name_of_ours_is_one_of_mlxs_or_metals():
    """What MLX puts before each text is in the installed package, what Metal names as far as we use it in our check."""
    files = ("utils.h", "bf16.h", "bf16_math.h", "complex.h", "defines.h", "logging.h")
    theirs = set().union(*(identifiers(strip_comments((PRELUDE / name).read_text())) for name in files))
    vocabulary = Path(metal.__file__).parents[1] / "address_spaces.h"
    theirs |= identifiers(vocabulary.read_text())
    ours = set().union(*(global_names(entry.kernel.text.header) for entry in all_entries()))
    assert {"threadgroup_sum", "TileBySimdgroup", "swiglu"} <= ours
    assert {"ceildiv", "elem_to_loc", "simd_sum"} <= theirs
    assert not ours & theirs


def launches_of(entry) -> list:
    """The entry's cases as a Mac would launch them."""
    with use_target("metal"):
        return [case.make(entry.dtypes[-1]) for case in entry.cases]


@pytest.mark.parametrize(
    "entry", [e for e in all_entries() if not e.resident and e.kernel is not COUNT_ON], ids=lambda e: e.name
)
def test_every_threadgroup_is_one_that_an_m1_launches(entry):
    """More threads start only where the compiler takes fewer registers: MLX refuses a launch amid a step."""
    for case, launch in zip(entry.cases, launches_of(entry), strict=True):
        experts = dict(launch.template).get("E", 0) if entry.mechanism == "routing" else 0
        assert math.prod(threadgroup_size(launch)) <= max(SURE_ON_METAL, -(-experts // 32) * 32), case.label


def test_a_thread_for_each_expert_where_the_text_needs_one():
    indices, counts = mx.zeros((40, 8), mx.int32), mx.zeros((2, 512), mx.int32)
    with use_target("metal"):
        assert group_rows_call(indices, counts, 512, 32)["threadgroup"] == (512, 1, 1)
        assert group_rows_call(indices, counts[:, :64], 64, 32)["threadgroup"] == (256, 1, 1)
    assert group_rows_call(indices, counts[:, :64], 64, 32)["threadgroup"] == (1024, 1, 1)


FEWER = {"gated_delta_step", "merge_attention_parts", "group_rows", "choose_experts", "argmax_rows", "route_few"}


@pytest.mark.parametrize("entry", [e for e in all_entries() if e.name in FEWER], ids=lambda e: e.name)
def test_fewer_threads_compute_the_same(entry):
    """Other launches than the gates': what a Mac launches, in the simulator, against the reference."""
    dtype = entry.dtypes[0]
    for case, launch in zip(entry.cases, launches_of(replace(entry, dtypes=(dtype,))), strict=True):
        run = simulator.run(entry.kernel.text, launch, check=True)
        assert run.faults == [], case.label
        wanted = entry.parts(launch, run_on("reference", entry.kernel, launch))
        for name, got in entry.parts(launch, run.outputs).items():
            assert compare(got, wanted[name], entry.tolerance[dtype]) == "", f"{case.label}: {name}"

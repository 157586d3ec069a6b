"""What labkit hands to `mx.fast.metal_kernel`, as far as it can be told without a Mac."""

from __future__ import annotations

import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import mlx
import mlx.core as mx
import pytest

from labkit.kernels import Kernel, simulator, use_target
from labkit.kernels.address_spaces import FLAGS, VOCABULARY, find_clang, translate
from labkit.kernels.check import compare
from labkit.kernels.metal_text import blank, identifiers, strip_comments
from labkit.kernels.recording.counting import COUNT_ON
from labkit.kernels.registry import all_entries
from labkit.kernels.routing.launches import group_rows_call
from labkit.kernels.signature import MetalText, make_launch, threadgroup_size
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
    theirs |= identifiers(VOCABULARY.read_text())
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


def builtins(prelude: str) -> str:
    """What Apple's compiler knows by itself, as far as MLX's prelude names it."""
    modes = "".join(f"#define __METAL_{mode}_MATH__ true\n" for mode in ("MAYBE_FAST", "FAST", "PRECISE"))
    names = sorted(set(re.findall(r"\b__metal_\w+", prelude)))
    assert "__metal_simd_sum" in names
    function = "template <class T, class... Others> T lk_builtin(T, Others...);\n"
    return modes + function + "".join(f"#define {name} lk_builtin\n" for name in names)


def behind_the_prelude(folder: Path, bodies: list[str]) -> list[str]:
    """What clang says of texts, each in a namespace, behind what MLX puts before them; of MLX's own lines nothing."""
    for name in ("metal_math", "metal_stdlib", "metal_logging"):
        (folder / name).write_text("")
    opening = "using namespace metal;\n"
    unit = [
        f'#include "{VOCABULARY}"',
        builtins((PRELUDE / "bf16_math.h").read_text()),
        '#include "mlx/backend/metal/kernels/utils.h"',
        opening,
    ]
    unit += [f"namespace lk_{i} {{\n{body.split(opening, 1)[1]}\n}}" for i, body in enumerate(bodies)]
    flags = [flag for flag in FLAGS if not flag.startswith(("-ferror-limit", "-Wall"))]
    command = [*find_clang(), *flags, "-ferror-limit=0", f"-I{folder}", f"-I{PRELUDE.parents[3]}", "-"]
    done = subprocess.run(command, input="\n".join(unit), capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if ": error:" in line and "mlx/backend" not in line]


@pytest.mark.skipif(not (PRELUDE / "utils.h").exists(), reason="this MLX has no headers")
def test_every_text_compiles_behind_mlxs_prelude(tmp_path):
    """Its overloads for bfloat, for 64 bits and bool must leave no call of ours ambiguous."""
    bodies = []
    for entry in (entry for entry in all_entries() if not entry.resident):
        for dtype in entry.dtypes:
            bodies.append(translate(entry.kernel.text, entry.cases[0].make(dtype)))
    assert behind_the_prelude(tmp_path, bodies) == []
    wrong = MetalText("wrong", ("x",), ("y",), "y[0] = log1p(x[0], 2.0f); y[1] = ceildiv(3, 2);")
    launch = make_launch(
        wrong, inputs=[mx.zeros((8,))], output_shapes=[(8,)], output_dtypes=[mx.float32], grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )  # fmt: skip
    (error,) = behind_the_prelude(tmp_path, [translate(wrong, launch)])
    assert "log1p" in error

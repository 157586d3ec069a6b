"""What labkit hands to `mx.fast.metal_kernel`, as far as it can be told without a Mac."""

from __future__ import annotations

import re
from pathlib import Path

import mlx
import pytest

from labkit.kernels import Kernel
from labkit.kernels.metal_text import blank, identifiers, strip_comments
from labkit.kernels.registry import all_entries
from labkit.kernels.targets import metal

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

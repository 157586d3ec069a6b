"""Would Metal accept the text? Upstream clang knows much of it, and comes with PyPI's `ziglang`.

The function that MLX would compile is checked as C++ for OpenCL, whose address spaces, program-scope variables and
missing `double` are Metal's: a pointer into `threadgroup` memory given to a helper that takes `device`, an input of
fewer than eight elements (MLX passes it as `constant`) given to one that takes `const device`, a type that a function
of Metal's does not take, two types that make a call ambiguous, a name that a template argument has already. The
simulator runs such texts, Metal refuses them. What clang takes and Metal does not stands in `metal_rules`.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import mlx.core as mx

from labkit.kernels.metal_text import blank, storage_declarations
from labkit.kernels.signature import METAL_TYPES, Launch, MetalText, TemplateValue, parameters

VOCABULARY = Path(__file__).with_name("address_spaces.h")

_WARNINGS_OFF = [
    *("unused", "sign-compare", "parentheses", "missing-braces"),
    *("unknown-pragmas", "undefined-internal", "undefined-inline", "array-bounds"),
]
# Without the last, whatever has a program's lifetime lies in `constant`, as in Metal.
_ABSENT = ("pipes", "device_enqueue", "fp64", "program_scope_global_variables")
FLAGS = [
    *("-xcl", "-cl-std=clc++2021", "-cl-no-stdinc", "--target=x86_64-unknown-none", "-fsyntax-only"),
    *("-Xclang", "-cl-ext=-cl_khr_fp64," + ",".join(f"-__opencl_c_{name}" for name in _ABSENT)),
    *("-Wall", "-Wimplicit-float-conversion", "-Wno-implicit-int-float-conversion", "-ferror-limit=10"),
    *(f"-Wno-{warning}" for warning in _WARNINGS_OFF),
]


class ClangMissing(RuntimeError):
    """No clang was found."""


@cache
def find_clang() -> tuple[str, ...]:
    """The clang command: the one in PyPI's `ziglang`, else the system's.

    Raises:
        ClangMissing: there is none; the message says how to get one.
    """
    if importlib.util.find_spec("ziglang"):
        return (sys.executable, "-m", "ziglang", "clang")
    if path := shutil.which("clang"):
        return (path,)
    raise ClangMissing("the address-space check needs clang: `pip install ziglang` brings one (no root needed)")


def check(text: MetalText, launch: Launch) -> list[str]:
    """The errors and warnings that clang finds, with lines of the Metal text; empty if it accepts.

    Raises:
        ClangMissing: there is no clang.
    """
    done = subprocess.run(
        [*find_clang(), *FLAGS, f"-I{VOCABULARY.parent}", "-"],
        input=translate(text, launch),
        capture_output=True,
        text=True,
    )
    found = [line for line in done.stderr.splitlines() if ": error:" in line or ": warning:" in line]
    if done.returncode and not found:
        found = [done.stderr.strip()[-2000:] or f"clang ended with {done.returncode}"]
    return found


def translate(text: MetalText, launch: Launch) -> str:
    """The function that MLX makes of the text, as C++ for OpenCL."""
    signature = []
    for parameter in parameters(text, launch):
        space = "constant" if parameter.constant else "device"
        const = "" if parameter.kind == "output" else "const "
        mark = "&" if parameter.kind in ("scalar", "ndim") else "*"
        signature.append(f"{const}{space} {parameter.metal_type}{mark} {parameter.name}")
    signature += [f"{metal_type} {name}" for name, metal_type in text.attributes]
    function = f"lk_{text.name}"
    lines = [
        f'#include "{VOCABULARY.name}"',
        "using namespace metal;",
        f'#line 1 "{text.name}.header.metal"',
        "\n".join("" if row.strip().startswith("#include") else row for row in _own_methods(text.header).splitlines()),
    ]
    if launch.template:
        lines.append(f"template <{', '.join(f'{_kind(value)} {name}' for name, value in launch.template)}>")
    lines += [
        f"void {function}({', '.join(signature)}) {{",
        f'#line 1 "{text.name}.metal"',
        _storage_by_reference(text.source),
        "}",
    ]
    if launch.template:
        function += f"<{', '.join(_argument(value) for _, value in launch.template)}>"
        lines.append(f"template decltype({function}) {function};")
    return "\n".join([*lines, ""])


def _kind(value: TemplateValue) -> str:
    return "typename" if isinstance(value, mx.Dtype) else "bool" if isinstance(value, bool) else "int"


def _argument(value: TemplateValue) -> str:
    return METAL_TYPES[value] if isinstance(value, mx.Dtype) else str(value).lower()


def _own_methods(header: str) -> str:
    """The header with `thread` behind each method: what Metal takes for granted, where OpenCL takes any space."""
    code, parts, last = blank(header), [], 0
    for match in re.finditer(r"(?<!static )\bMETAL_FUNC\b[^(){};]*\(", code):
        if code.count("{", 0, match.start()) == code.count("}", 0, match.start()):
            continue  # a function of nobody's
        open_ = 1
        end = match.end()
        while open_:
            open_ += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        end += len(re.match(r"(?:\s*const\b)?", code[end:]).group())
        parts.append(header[last:end] + " thread")
        last = end
    return "".join(parts) + header[last:]


def _storage_by_reference(source: str) -> str:
    """Each declaration of threadgroup memory as references to such memory, which may stand in a template."""
    code, parts, last = blank(source), [], 0
    for declared in storage_declarations(source):
        end = code.index(";", declared.end)
        names = "|".join(declared.names)
        types = re.sub(rf"\b({names})\b(?=\s*[\[,=;]|\s*$)", r"lk_\1", source[declared.end : end])
        bound = "".join(f" threadgroup lk_{n}& {n} = lk_storage<lk_{n}>();" for n in declared.names)
        # The variable takes an `alignas` that stands before.
        parts.append(f"{source[last : declared.start]}char lk_{declared.start}; typedef {types};{bound}")
        last = end + 1
    return "".join(parts) + source[last:]

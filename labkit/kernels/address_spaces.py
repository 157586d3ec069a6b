"""Would Metal accept the text's address spaces? Upstream clang knows, and comes with PyPI's `ziglang`.

A pointer into `threadgroup` memory given to a helper that takes `device`, or an input of fewer than eight elements (MLX
passes it as `constant`) given to one that takes `const device`: the simulator runs such a text, Metal refuses it. It
is no Metal compiler: Metal's other rules are checked on a Mac.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from labkit.kernels.metal_text import replace_storage
from labkit.kernels.signature import Launch, MetalText, parameters, template_lines

VOCABULARY = Path(__file__).with_name("address_spaces.h")

_WARNINGS_OFF = [
    *("unused", "sign-compare", "parentheses", "missing-braces"),
    *("unknown-pragmas", "undefined-internal", "undefined-inline"),
]
_FLAGS = [
    *("-xc++", "-std=c++17", "-fsyntax-only", "-nostdinc", "-nostdinc++", "-Wall", "-ferror-limit=10"),
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
        [*find_clang(), *_FLAGS, f"-I{VOCABULARY.parent}", "-"],
        input=translate(text, launch),
        capture_output=True,
        text=True,
    )
    found = [line for line in done.stderr.splitlines() if ": error:" in line or ": warning:" in line]
    if done.returncode and not found:
        found = [done.stderr.strip()[-2000:] or f"clang ended with {done.returncode}"]
    return found


def translate(text: MetalText, launch: Launch) -> str:
    """The text as a C++ function with MLX's signature, its address spaces kept."""
    signature = []
    for parameter in parameters(text, launch):
        space = "constant" if parameter.constant else "device"
        const = (
            "" if parameter.kind == "output" or parameter.constant else "const "
        )  # the macro `constant` brings its own
        mark = "&" if parameter.kind in ("scalar", "ndim") else "*"
        signature.append(f"{const}{space} {parameter.metal_type}{mark} {parameter.name}")
    signature += [f"{metal_type} {name}" for name, metal_type in text.attributes]
    return "\n".join(
        [
            f'#include "{VOCABULARY.name}"',
            f'#line 1 "{text.name}.header.metal"',
            "\n".join("" if row.strip().startswith("#include") else row for row in text.header.splitlines()),
            f"void lk_body({', '.join(signature)}) {{",
            template_lines(launch),
            f'#line 1 "{text.name}.metal"',
            replace_storage(text.source, lambda k: "extern threadgroup"),
            "}",
            "",
        ]
    )

"""What Apple's compiler and MLX refuse that clang's check cannot see: rules on the text alone, and on one launch of it.

Where the rules come from: the Metal Shading Language specification (Metal and C++, Address Spaces, its limits) and
MLX's `metal_kernel.cpp` and `custom_kernel.cpp` of 0.32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import mlx.core as mx

from labkit.kernels.metal_text import (
    ADDRESS_SPACES,
    ATTRIBUTES,
    blank,
    identifiers,
    line_at,
    storage_declarations,
)
from labkit.kernels.signature import Launch, MetalText, parameters

MOST_BUFFERS = 31
"""Buffers of a Metal function: inputs with the shapes, strides and ranks that the text names, and outputs."""

ABSENT = (
    *("asm", "delete", "double", "dynamic_cast", "goto", "new", "printf", "register"),
    *("thread_local", "throw", "try", "typeid", "union", "virtual"),
)
"""Words of C++ that Metal's language does not have."""

TAKEN = ("fragment", "intersection", "kernel", "mesh", "object", "stitchable", "vertex", "visible")
"""Words that say what a function is in Metal: no names of anything else."""

_SPACE = rf"\b(?:{'|'.join(ADDRESS_SPACES)})\b"
_NUMBERS = r"bool|u?char|u?short|u?int|u?long|half|float|bfloat|bfloat16_t|size_t|u?int(?:8|16|32|64)_t"
_VECTORS = r"(?:u?char|u?short|u?int|u?long|half|float|bfloat)[234]"
_WIDE = rf"(?:{_VECTORS}|(?:metal::)?vec\s*<[^<>]*>)"


def broken(text: MetalText, launch: Launch) -> list[str]:
    """What is wrong with a text and a launch of it, each with the place; empty if nothing is."""
    found = []
    for name, part in ((f"{text.name}.header.metal", text.header), (f"{text.name}.metal", text.source)):
        part, inside = _without_cuda(part), part is text.source
        code = blank(part)
        types = _types(text, launch)
        for position, message in (
            *_absent(code),
            *_storage(part, code, inside),
            *_pointers(code, types),
            *_casts(part, code),
        ):
            found.append(f"{name}:{line_at(part, position)}: {message}")
    return found + [f"{text.name}: {message}" for message in _of_launch(text, launch)]


def _without_cuda(part: str) -> str:
    """The text as Metal's preprocessor leaves it, line by line: what stands for CUDA alone is empty."""
    lines, branches = [], []  # of each open conditional: whether it is one on CUDA, and whether its branch stays
    for line in part.split("\n"):
        word = re.match(r"\s*#\s*(if|ifdef|else|elif|endif)\b", line)
        if word and word[1] in ("if", "ifdef"):
            ours = bool(re.match(r"\s*#\s*(?:ifdef\s+|if\s+defined\s*\(?\s*)(?:__CUDACC__|LABKIT_CUDA)\b", line))
            branches.append((ours, not ours))
        elif word and word[1] == "else" and branches[-1][0]:
            branches[-1] = (True, not branches[-1][1])
        elif word and word[1] == "endif":
            branches.pop()
        lines.append(line if all(stays for _, stays in branches) else "")
    return "\n".join(lines)


def _absent(code: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(rf"\b(?:{'|'.join(ABSENT)})\b", code):
        yield match.start(), f"Metal has no `{match.group()}`"
    for match in re.finditer(rf"\b(?:{'|'.join(TAKEN)})\b", code):
        yield match.start(), f"`{match.group()}` is a word of Metal's own"
    for match in re.finditer(r"\[\s*[&=]?\s*\]\s*[({]", code):
        yield match.start(), "Metal has no lambda before 3.2 (macOS 15)"
    for match in re.finditer(r"\b(?:struct|class)\s+\w+\s*(?:<[^{};]*>)?\s*:(?!:)", code):
        yield match.start(), "Metal has no derived classes"
    for match in re.finditer(r"\bstatic\s+constexpr\s+(?!constant\b)[\w:]+\s+\w+\s*=", code):
        yield match.start(), "a static member lies in Metal's `constant` address space: `static constexpr constant`"


def _storage(part: str, code: str, inside: bool) -> Iterator[tuple[int, str]]:
    """Threadgroup memory is declared in the outermost block of the kernel's own function, `alignas` in front."""
    for declared in storage_declarations(part):
        names = ", ".join(declared.names)
        if declared.alignment:
            yield declared.start, f"`alignas` stands before `threadgroup`, not behind it: {names}"
        before = code[: declared.start]
        if not inside:
            yield declared.start, f"threadgroup memory outside the kernel's own function: {names}"
        elif before.count("{") > before.count("}"):
            yield declared.start, f"threadgroup memory in an inner block: {names}"


def _types(text: MetalText, launch: Launch) -> str:
    """A pattern for every type that the text can name."""
    code = blank(text.header) + "\n" + blank(text.source)
    own = set(re.findall(r"\b(?:struct|class|typename|using)\s+([A-Za-z_]\w*)", code))
    own |= {name for name, value in launch.template if isinstance(value, mx.Dtype)}
    own -= {"namespace", "template"}
    return rf"(?:{_VECTORS}|{_NUMBERS}|{_WIDE}|(?:{'|'.join(map(re.escape, sorted(own)))})\b(?:\s*<[^<>;]*>)?(?!\s*::))"


def _pointers(code: str, types: str) -> Iterator[tuple[int, str]]:
    """Every pointer and reference names the address space of what it points to, a pointer to pointers too."""
    words = rf"(?:(?:const|volatile|{'|'.join(ADDRESS_SPACES)})\s+)*"
    after = rf"(?:\s*\b(?:const|volatile|{'|'.join(ADDRESS_SPACES)})\b)*"
    pattern = re.compile(
        rf"(?<![\w:.<])(?P<before>{words})(?P<type>{types})(?P<after>{after})\s*"
        # A name and what may follow it, or none in a cast; or `(*name)[`, where arrays are pointed to.
        rf"(?:(?P<stars>[*&](?:\s*(?:const\b|volatile\b|{_SPACE}|[*&]))*)\s*(?:[A-Za-z_]\w*)?\s*(?=[,;)=\[:({{])"
        rf"|\(\s*(?P<array>[*&])\s*[A-Za-z_]\w*\s*\)\s*\[)",
    )
    for match in pattern.finditer(code):
        if not re.search(_SPACE, match["before"] + match["after"]):
            yield match.start(), f"no address space: `{_short(match.group())}`"
        elif len(re.findall(_SPACE, match["before"] + match["after"])) > 1:
            yield match.start(), f"two address spaces for one type: `{_short(match.group())}`"
        elif any(not re.search(_SPACE, gap) for gap in re.split(r"[*&]", match["stars"] or "")[1:-1]):
            yield match.start(), f"no address space between two stars: `{_short(match.group())}`"


def _casts(part: str, code: str) -> Iterator[tuple[int, str]]:
    """An array that is read by a wider type than its own says how it is aligned."""
    for declared in storage_declarations(part):
        if declared.alignment or re.search(r"alignas\s*\([^()]*\)\s*$", code[: declared.start]):
            continue
        if re.match(rf"\s*{_WIDE}", code[declared.end :]):
            continue
        for name in declared.names:
            cast = rf"\(\s*(?:const\s+)?threadgroup\s+(?:const\s+)?{_WIDE}\s*(?:const\s*)?\*\s*\)\s*\(?\s*&?\s*{name}\b"
            if re.search(cast, code):
                yield declared.start, f"`{name}` is read by a wider type: `alignas(16)` before it"


def _of_launch(text: MetalText, launch: Launch) -> Iterator[str]:
    if (count := len(parameters(text, launch))) > MOST_BUFFERS:
        yield f"{count} buffers, with shapes and strides; Metal has {MOST_BUFFERS}"
    for name, value in launch.template:
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            yield f"template argument {name} is {value}: MLX makes it part of the function's name, which holds no minus"
    for name in sorted(identifiers(text.header) & set(ATTRIBUTES)):
        yield f"the header names the attribute {name}, which MLX passes to the kernel's own function alone"


def _short(code: str) -> str:
    return re.sub(r"\s+", " ", code).strip()

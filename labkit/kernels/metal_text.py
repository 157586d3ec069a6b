"""Reading Metal text: the one place that knows comments, preprocessor lines, attributes and address spaces.

The simulator, the CUDA target and the address-space check all rewrite a kernel's text; each asks here what is where.
All positions refer to the text as given, so a rewritten text keeps its lines and a report can name them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_POSITIONS = ("thread_position_in_grid", "thread_position_in_threadgroup", "threadgroup_position_in_grid")
_SIZES = ("grid_origin", "grid_size", "threads_per_grid", "threadgroups_per_grid")
_UNITS = ("simdgroup", "quadgroup")
_INDICES = (
    *(f"thread_index_in_{unit}" for unit in ("threadgroup", *_UNITS)),
    *(f"{unit}_index_in_threadgroup" for unit in _UNITS),
)
# Metal tells what was asked for apart from what is there at the edge of a grid.
_PER_THREADGROUP = [
    (f"{asked}{unit}s_per_threadgroup", kind)
    for asked in ("", "dispatch_")
    for unit, kind in (("thread", "uint3"), ("simdgroup", "uint"), ("quadgroup", "uint"))
]

ATTRIBUTES: dict[str, str] = dict(
    sorted(
        [
            *((name, "uint3") for name in (*_POSITIONS, *_SIZES)),
            *((name, "uint") for name in (*_INDICES, "threads_per_simdgroup", "thread_execution_width")),
            *_PER_THREADGROUP,
        ]
    )
)
"""The attributes that MLX passes to a kernel whose source names them, with their Metal types, in MLX's order: the
alphabet's."""

ADDRESS_SPACES = ("device", "constant", "threadgroup", "thread")

_WORD = re.compile(r"[A-Za-z_]\w*")
_NOT_CODE = re.compile(
    r"""//[^\n]*
      | /\*.*?\*/
      | "(?:[^"\\\n]|\\.)*"
      | '(?:[^'\\\n]|\\.)'
      | ^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*""",
    re.X | re.S | re.M,
)
_ALIGNAS = r"alignas\s*\([^()]*\)"


@dataclass(frozen=True)
class StorageDeclaration:
    """One `threadgroup T a[N], b;` that declares storage (not a pointer or reference into it).

    Attributes:
        start, end: the span of the word `threadgroup` and an `alignas` behind it, in the text.
        alignment: the `alignas(...)` behind the word, or "".
        names: the variables it declares.
        line: its line in the text, from 1.
    """

    start: int
    end: int
    alignment: str
    names: tuple[str, ...]
    line: int


def blank(text: str) -> str:
    """`text` with comments, literals and preprocessor lines turned to spaces; positions and lines stay the same."""
    return _NOT_CODE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)


def strip_comments(text: str) -> str:
    """`text` without comments and blank lines, for headers that MLX would hash at every launch."""

    def keep_literals(match: re.Match[str]) -> str:
        found = match.group()
        if found.startswith("//"):
            return ""
        if found.startswith("/*"):
            return " "
        return re.sub(r"//[^\n]*|/\*.*?\*/", "", found, flags=re.S) if found.lstrip().startswith("#") else found

    text = _NOT_CODE.sub(keep_literals, text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


_CONDITION = re.compile(
    r"[ \t]*#[ \t]*(?:(ifn?def)[ \t]+(\w+)|if[ \t]+(!?)[ \t]*defined[ \t]*\(?[ \t]*(\w+)[ \t]*\)?)[ \t]*$"
)
_BRANCH = re.compile(r"[ \t]*#[ \t]*(if|ifdef|ifndef|else|elif|endif)\b")


def keep_branches(text: str, defined: dict[str, bool]) -> str:
    """`text` (without comments) with the conditionals on the given names decided; all others stay as they are.

    A conditional is `#ifdef`, `#ifndef` or `#if [!]defined(...)` of one name, with `#else` and without `#elif`.
    """
    kept, stack = (
        [],
        [],
    )  # of each open conditional: whether its present branch stays, or None if it is not decided here
    for line in text.split("\n"):
        word = branch.group(1) if (branch := _BRANCH.match(line)) else ""
        if word.startswith("if"):
            match = _CONDITION.match(line)
            name = (match.group(2) or match.group(4)) if match else None
            negated = bool(match) and (match.group(1) == "ifndef" or match.group(3) == "!")
            stack.append(defined[name] != negated if name in defined else None)
            ours = stack[-1] is not None
        elif word == "else" and stack[-1] is not None:
            stack[-1], ours = not stack[-1], True
        elif word == "endif":
            ours = stack.pop() is not None
        else:
            ours = False
        if not ours and all(stays is not False for stays in stack):
            kept.append(line)
    return "\n".join(kept)


_BRACKETS, _OPERATORS = r"(){}\[\],;", r"+\-*/%&|^<>=!~?:."
_SPACES = re.compile(
    rf"(?<=[{_BRACKETS}]) | (?=[{_BRACKETS}])|(?<=[{_OPERATORS}]) (?=\w)"
    rf"|(?<=\w)(?<![eEpP]) (?=[+\-])|(?<=\w) (?=[{_OPERATORS.replace(chr(92) + '-', '').replace('+', '')}])"
)


def compact(text: str) -> str:
    """The same tokens in as few characters as lines that stay lines allow, for texts that are hashed at every launch.

    Comments, blank lines, indentation and spaces that part no tokens go; continued preprocessor lines are joined.
    """
    text = strip_comments(text)
    parts, last = [], 0
    for match in [*_NOT_CODE.finditer(text), None]:
        code = re.sub(r"[ \t]+", " ", text[last : match.start() if match else len(text)])
        parts.append(_SPACES.sub("", re.sub(r" ?\n ?", "\n", code)))
        if match:
            found, last = match.group(), match.end()
            if found.lstrip().startswith("#"):
                found = re.sub(r"[ \t]+", " ", re.sub(r"[ \t]*\\\n[ \t]*", " ", found)).strip()
            parts.append(found)
    return "".join(parts).strip()


def identifiers(text: str) -> set[str]:
    """Every word of the code, preprocessor lines included, comments and literals not."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
    return set(_WORD.findall(re.sub(r'"(?:[^"\\\n]|\\.)*"', " ", text)))


def attributes_in(source: str) -> list[tuple[str, str]]:
    """(name, Metal type) of the attributes that MLX would pass: it looks for each name anywhere in the source."""
    return [(name, kind) for name, kind in ATTRIBUTES.items() if name in source]


def line_at(text: str, position: int) -> int:
    """The line, from 1, of a position in the text."""
    return text.count("\n", 0, position) + 1


def storage_declarations(text: str) -> list[StorageDeclaration]:
    """The threadgroup arrays and variables that `text` declares.

    `threadgroup` opens a declaration when it stands where a statement starts and no declarator is a pointer, a
    reference or a function.
    """
    code = blank(text)
    found = []
    for match in re.finditer(r"\bthreadgroup\b(?=\s)", code):
        before = re.sub(_ALIGNAS + r"\s*$", "", code[: match.start()].rstrip()).rstrip()
        if before and before[-1] not in ";{}":
            continue
        aligned = re.match(r"\s*(" + _ALIGNAS + r")", code[match.end() :])
        end = match.end() + (aligned.end() if aligned else 0)
        statement = code[end:].split(";", 1)[0]
        declarators = re.sub(r"<[^<>;]*(?:<[^<>;]*>[^<>;]*)*>", lambda m: "_" * len(m.group()), statement)
        head = re.sub(r"\[[^\]]*\]", "", declarators).split("=")[0]
        if any(mark in head for mark in "*&("):
            continue
        names = tuple(words[-1] for part in head.split(",") if (words := _WORD.findall(part)))
        alignment = aligned.group(1) if aligned else ""
        found.append(StorageDeclaration(match.start(), end, alignment, names, line_at(text, match.start())))
    return found


def replace_storage(text: str, specifier: Callable[[int], str], first: int = 0) -> str:
    """`text` with the word `threadgroup` of the k-th storage declaration replaced by `specifier(first + k)`."""
    parts, last = [], 0
    for index, declaration in enumerate(storage_declarations(text), first):
        replacement = f"{declaration.alignment} {specifier(index)}".lstrip()
        parts += [text[last : declaration.start], replacement]
        last = declaration.end
    return "".join(parts) + text[last:]


def remove_words(text: str, words: tuple[str, ...] = (*ADDRESS_SPACES, "kernel")) -> str:
    """`text` without the given whole words in code and preprocessor lines; comments and literals keep them."""
    pattern = re.compile(r"\b(?:" + "|".join(words) + r")\b")
    code = re.sub(
        r"//[^\n]*|/\*.*?\*/|\"(?:[^\"\\\n]|\\.)*\"", lambda m: re.sub(r"[^\n]", " ", m.group()), text, flags=re.S
    )
    parts, last = [], 0
    for match in pattern.finditer(code):
        parts.append(text[last : match.start()])
        last = match.end()
    return "".join(parts) + text[last:]

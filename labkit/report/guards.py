"""The rules that every committed notebook keeps, checked on its file without running it.

nbval compares a cell's outputs only if the cell has an execution count, and checks nothing of what is below; so a
stripped notebook would pass it whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit.report import executed, parameters
from labkit.report.normalise import METADATA
from labkit.report.provenance import scrub

LARGEST_BYTES = 300_000
LONGEST_CELL = 50
WIDEST_LINE = 100
REQUIRED_PARAMETERS = ("quick",)

# Folders of a person's machine, whoever's: a notebook may come from any.
_MACHINE_PATH = re.compile(r"(?<![\w.~<>/:-])/(?:home|Users|root|private|tmp|var/folders|mnt|opt|work)/[\w.@-]+")
_PLOTTING = re.compile(r"\bplt\.|\bfig(?:ure)?\b.*=|\.subplots\(|\bframes\.|\blive\(")


_DOUBLED = re.compile(r"\$[^$\n]*\\\\[a-zA-Z]+[^$\n]*\$")


def check(notebook: Path) -> list[str]:
    """Every broken rule of a notebook, each as one sentence that names the cell; empty if it keeps them all."""
    try:
        book = executed.read(notebook)
    except Exception as error:
        return [f"cannot be read as a notebook ({error})"]
    found = list(_whole(book, notebook))
    for number, cell in enumerate(_code(book), 1):
        for rule in _CELL_RULES:
            found += [f"In [{number}] ({_first_line(cell)}): {problem}" for problem in rule(cell, number)]
    return found


def _whole(book: Any, notebook: Path) -> Iterator[str]:
    size = notebook.stat().st_size
    if size > LARGEST_BYTES:
        yield f"has {size:,} bytes, more than {LARGEST_BYTES:,}: plot fewer points or fewer figures"
    if dict(book.metadata) != METADATA:
        yield "has metadata of the editor it was saved by: run `labkit notebooks refresh`"
    if not book.cells or book.cells[0].cell_type != "markdown" or not book.cells[0].source.startswith("# "):
        yield "does not begin with a title cell (`# Title`)"
    prose = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    if match := _DOUBLED.search(prose):
        yield f"has a doubled backslash in a formula, {match.group()}: MathJax reads it as a line break"
    yield from _parameters(book, notebook)


def _parameters(book: Any, notebook: Path) -> Iterator[str]:
    tagged = [number for number, cell in enumerate(_code(book), 1) if parameters.TAG in _tags(cell)]
    if tagged != [1]:
        yield f"needs exactly one cell tagged `parameters`, the first code cell; it has {tagged or 'none'}"
        return
    try:
        declared = parameters.declared(notebook)
    except parameters.ParameterError as error:
        yield str(error)
        return
    for name, parameter in declared.items():
        if not parameter.help:
            yield f"parameter {name} is not explained by a comment"
        try:
            parameters.convert(parameter.default, parameter, notebook.name)
        except parameters.ParameterError as error:
            yield str(error)
    for name in REQUIRED_PARAMETERS:
        if name not in declared:
            yield f"has no parameter {name!r}"


def _executed_in_order(cell: Any, number: int) -> Iterator[str]:
    if cell.execution_count != number:
        yield f"its execution count is {cell.execution_count}, not {number}: run `labkit notebooks refresh`"


def _errors(cell: Any, number: int) -> Iterator[str]:
    raised = [output.ename for output in cell.outputs if output.output_type == "error"]
    expected = "raises-exception" in _tags(cell)
    if raised and not expected:
        yield f"its output is an error ({raised[0]})"
    if expected and not raised:
        yield "it is tagged raises-exception but raised nothing"


def _noise(cell: Any, number: int) -> Iterator[str]:
    for output in cell.outputs:
        if output.output_type == "stream" and output.name == "stderr":
            yield f"it writes to standard error: {output.text.strip()[:80]!r}"


def _length(cell: Any, number: int) -> Iterator[str]:
    lines = len(cell.source.splitlines())
    if lines > LONGEST_CELL:
        yield f"it has {lines} lines, more than {LONGEST_CELL}: move logic into the library"
    widest = max(map(len, cell.source.splitlines()), default=0)
    if widest > WIDEST_LINE:
        yield f"it has a line of {widest} columns, more than {WIDEST_LINE}: a page cuts it off"


def _paths(cell: Any, number: int) -> Iterator[str]:
    text = cell.source + "\n" + json.dumps([dict(output) for output in cell.outputs])
    if match := _MACHINE_PATH.search(text):
        yield f"it holds a path of a machine: {match.group()}"
    elif scrub(text) != text:
        yield "it holds a path of this machine"


def _plots(cell: Any, number: int) -> Iterator[str]:
    pictures = any(mime.startswith("image/") for output in cell.outputs for mime in output.get("data", ()))
    if not pictures and not _PLOTTING.search(cell.source):
        return
    if (pictures or _shows_html(cell)) and "nbval-ignore-output" not in _tags(cell):
        yield "it draws, so it needs the tag nbval-ignore-output"
    if pictures and any(output.output_type == "execute_result" for output in cell.outputs):
        yield "its last line shows the object that a plotting call returns: end it with a statement or `;`"


def _syntax(cell: Any, number: int) -> Iterator[str]:
    source = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in cell.source.splitlines())
    try:
        ast.parse(source)
    except SyntaxError as error:
        yield f"it is not Python: {error.msg}"


_CELL_RULES: tuple[Callable[[Any, int], Iterator[str]], ...] = (
    _executed_in_order,
    _errors,
    _noise,
    _length,
    _paths,
    _plots,
    _syntax,
)


def _code(book: Any) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def _tags(cell: Any) -> list[str]:
    return cell.metadata.get("tags", [])


def _shows_html(cell: Any) -> bool:
    return any("text/html" in output.get("data", ()) for output in cell.outputs)


def _first_line(cell: Any) -> str:
    return (cell.source.strip().splitlines() or ["empty"])[0][:60]

"""Each rule for committed notebooks turns red on a notebook that breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from labkit.report import guards
from labkit.report.normalise import normalise


def output(kind: str, **values: Any) -> Any:
    return nbformat.v4.new_output(kind, **values)


@pytest.fixture
def book(tmp_path: Path, write_notebook) -> Any:
    """A notebook that keeps every rule, as if it had been executed."""
    path = write_notebook(tmp_path / "n.ipynb", "print(steps)", ("plt.plot()", ["nbval-ignore-output"]))
    book = nbformat.read(path, 4)
    for number, cell in enumerate((cell for cell in book.cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
    book.cells[2].outputs = [output("stream", name="stdout", text="3\n")]
    book.cells[3].outputs = [output("display_data", data={"image/svg+xml": "<svg/>"})]
    return book


def findings(book: Any, tmp_path: Path) -> list[str]:
    path = tmp_path / "m.ipynb"
    path.write_text(nbformat.writes(book), encoding="utf-8")
    return guards.check(path)


def test_a_good_notebook_keeps_every_rule(book: Any, tmp_path: Path) -> None:
    assert findings(book, tmp_path) == []
    normalise(book)
    assert findings(book, tmp_path) == []


def _tag(index: int, *tags: str) -> Callable[[Any], None]:
    return lambda book: book.cells[index].metadata.update(tags=list(tags))


def _source(index: int, text: str) -> Callable[[Any], None]:
    return lambda book: book.cells[index].update(source=text)


def _outputs(index: int, *outputs: Any) -> Callable[[Any], None]:
    return lambda book: book.cells[index].update(outputs=list(outputs))


ERROR = output("error", ename="ValueError", evalue="no", traceback=["no"])
FIGURE = output("execute_result", data={"image/svg+xml": "<svg/>", "text/plain": "x"}, execution_count=3)
BREAKS = {
    "stripped of counts": (lambda book: book.cells[2].update(execution_count=None), "execution count is None, not 2"),
    "out of order": (lambda book: book.cells[2].update(execution_count=5), "execution count is 5, not 2"),
    "an error output": (_outputs(2, ERROR), r"its output is an error \(ValueError\)"),
    "an expected error that stays away": (_tag(2, "raises-exception"), "raised nothing"),
    "noise": (_outputs(2, output("stream", name="stderr", text="a warning")), "standard error"),
    "a path in an output": (
        _outputs(2, output("stream", name="stdout", text="/home/someone/x")),
        "a path of a machine",
    ),
    "a path in the code": (_source(2, "open('/Users/someone/x')"), "a path of a machine"),
    "a path of this machine": (
        _outputs(2, output("stream", name="stdout", text=str(Path(guards.__file__).resolve()))),
        "holds a path of",
    ),
    "a broken formula": (
        lambda book: book.cells.append(nbformat.v4.new_markdown_cell("At most $5\\\\cdot 3$.")),
        "doubled backslash",
    ),
    "a long cell": (_source(2, "x = 1\n" * 60), "59 lines|60 lines"),
    "a wide line": (_source(2, "x = '" + "a" * 120 + "'"), "columns"),
    "a compared plot": (_tag(3), "nbval-ignore-output"),
    "the repr of a plot": (_outputs(3, FIGURE), "the object that a plotting call returns"),
    "no python": (_source(2, "def f(:"), "it is not Python"),
    "no parameters cell": (_tag(1), "exactly one cell tagged"),
    "two parameters cells": (_tag(2, "parameters"), "exactly one cell tagged"),
    "a late parameters cell": (lambda book: book.cells.insert(1, book.cells.pop(2)), "the first code cell"),
    "an unexplained parameter": (_source(1, "quick: bool = True  # small\nsteps: int = 3"), "steps is not explained"),
    "a parameter without a type": (_source(1, "quick = True  # small"), "is not `name: type = literal`"),
    "a default of another type": (_source(1, "quick: bool = True  # a\nn: int = 'x'  # b"), "parameter n is int"),
    "no quick mode": (_source(1, "steps: int = 3  # how many"), "no parameter 'quick'"),
    "an editor's metadata": (lambda book: book.metadata.update(toc={}), "metadata of the editor"),
    "no title": (lambda book: book.cells.pop(0), "title"),
    "too large": (_outputs(2, output("stream", name="stdout", text="x" * 300_000)), "bytes, more than"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_each_broken_rule_is_found(name: str, book: Any, tmp_path: Path) -> None:
    change, words = BREAKS[name]
    change(book)
    found = findings(book, tmp_path)
    assert any(re.search(words, finding) for finding in found), found


def test_a_file_that_is_no_notebook_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text("{}")
    assert "cannot be read" in guards.check(path)[0]

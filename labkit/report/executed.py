"""What is done to a notebook after its execution: paths removed, provenance added, outputs checked, records read."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat

from labkit.report import provenance
from labkit.report.provenance import scrub
from labkit.report.records import MIME, Record, collect

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

WIDGET_MIMES = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json")


class BadOutput(ValueError):
    """An executed notebook whose outputs do not make a report; knows the code cell's number and first line."""

    def __init__(self, message: str, cell: int | None = None, line: str = "") -> None:
        super().__init__(message)
        self.cell, self.line = cell, line


def count_code_cells(notebook: Path) -> int:
    return sum(cell.cell_type == "code" for cell in read(notebook).cells)


def read(notebook: Path) -> Any:
    return nbformat.read(notebook, as_version=4)


def finish(notebook: Path, parameters: Mapping[str, Any], *, failed: bool) -> tuple[Record, ...]:
    """Turn papermill's output file into a report's notebook, in place, and return its records.

    Raises:
        BadOutput: a cell tagged `raises-exception` raised nothing, or two records share a name.
        nbformat.reader.NotJSONError: papermill could not write it whole.
    """
    book = read(notebook)
    durations = [cell.metadata.get("papermill", {}).get("duration") for cell in book.cells if cell.cell_type == "code"]
    clean(book)
    papermill = book.metadata.pop("papermill", {})
    book.metadata["labkit"] = provenance.collect(parameters) | {
        "started": papermill.get("start_time"),
        "seconds": papermill.get("duration"),
        "cell_seconds": [round(duration or 0.0, 2) for duration in durations],
        "failed": failed,
    }
    write(book, notebook)
    for number, cell in enumerate((cell for cell in book.cells if cell.cell_type == "code"), 1):
        silent = not any(output.output_type == "error" for output in cell.outputs)
        if "raises-exception" in cell.metadata.get("tags", ()) and silent and not failed:
            line = (cell.source.strip().splitlines() or [""])[0]
            raise BadOutput("the cell is tagged raises-exception but raised nothing", number, line)
    try:
        return tuple(collect(book))
    except ValueError as error:
        raise BadOutput(str(error)) from None


def work_seconds(notebook: Path) -> tuple[float, ...]:
    """Seconds of each code cell of a report's notebook, in order; 0.0 for a cell that mostly imports.

    What packages take to import is the same for every notebook and none of its work.
    """
    book = read(notebook)
    taken = book.metadata.get("labkit", {}).get("cell_seconds", ())
    cells = (cell for cell in book.cells if cell.cell_type == "code")
    return tuple(0.0 if _imports(cell.source) else seconds for cell, seconds in zip(cells, taken, strict=False))


def _imports(source: str) -> bool:
    """Whether more statements of a cell are imports than not."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return False
    return 2 * sum(isinstance(statement, ast.Import | ast.ImportFrom) for statement in statements) > len(statements)


def clean(book: Any) -> None:
    """Drop what depends on the machine or the moment and tells a reader nothing: timings, paths, widget state."""
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        for key in ("papermill", "execution", "ExecuteTime", "scrolled", "collapsed"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags"):
            cell.metadata.pop("tags", None)
        if cell.cell_type != "code":
            continue
        if "injected-parameters" in cell.metadata.get("tags", ()):
            cell.source = scrub(cell.source)
        cell.outputs = [output for output in map(_clean_output, cell.outputs) if output is not None]


def write(book: Any, path: Path) -> None:
    """Write a notebook whole or not at all."""
    write_text(nbformat.writes(book, version=4).rstrip("\n") + "\n", path)


def write_text(text: str, path: Path) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def without_colours(text: str) -> str:
    """`text` without terminal colours and machine paths."""
    return scrub(_COLOURS.sub("", text))


def _clean_output(output: Any) -> Any | None:
    if output.output_type == "stream":
        output.text = scrub(output.text)
    elif output.output_type == "error":
        output.evalue = scrub(output.evalue)
        output.traceback = [scrub(line) for line in output.traceback]
    else:
        for mime in WIDGET_MIMES:
            if output.data.pop(mime, None) is not None:
                # What is left of a widget is the text of its object.
                output.data.pop("text/plain", None)
        if not output.data:
            return None
        for mime, content in output.data.items():
            if isinstance(content, str) and mime != MIME:
                output.data[mime] = scrub(content)
    return output

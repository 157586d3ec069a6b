"""Small notebooks for the tests, written as an editor would."""

from __future__ import annotations

from pathlib import Path

import nbformat

from labkit.report.normalise import METADATA

PARAMETERS = "quick: bool = True  # small sizes\nsteps: int = 3  # how many\nname: str = 'x'  # whatever"


def write(path: Path, *cells: str | tuple[str, list[str]], parameters: str | None = PARAMETERS) -> Path:
    """A notebook of a title, a parameters cell (unless None) and code cells; a cell may be (source, tags)."""
    parts = [nbformat.v4.new_markdown_cell("# A title")]
    if parameters is not None:
        parts.append(nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    for cell in cells:
        source, tags = cell if isinstance(cell, tuple) else (cell, [])
        parts.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags} if tags else {}))
    book = nbformat.v4.new_notebook(cells=parts, metadata=METADATA)
    path.write_text(nbformat.writes(book) + "\n", encoding="utf-8")
    return path

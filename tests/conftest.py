"""Fixtures that several folders of tests share: small notebooks, and the book built once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

PARAMETERS = "quick: bool = True  # small sizes\nsteps: int = 3  # how many\nname: str = 'x'  # whatever"


@pytest.fixture(scope="session")
def write_notebook() -> Any:
    """`write_notebook(path, *cells, parameters=...)` writes one as an editor would; a cell may be (source, tags)."""
    import nbformat

    from labkit.report.normalise import METADATA

    def write(path: Path, *cells: str | tuple[str, list[str]], parameters: str | None = PARAMETERS) -> Path:
        parts = [nbformat.v4.new_markdown_cell("# A title")]
        if parameters is not None:
            parts.append(nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
        for cell in cells:
            source, tags = cell if isinstance(cell, tuple) else (cell, [])
            parts.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags} if tags else {}))
        book = nbformat.v4.new_notebook(cells=parts, metadata=METADATA)
        path.write_text(nbformat.writes(book) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def built_book(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The book (a `labkit.report.book.Book`), built with warnings as errors.

    The committed notebooks stand for a report: they hold what papermill gave.
    """
    pytest.importorskip("jupyter_book", reason="the book's tools are not installed (uv sync --group book)")
    from labkit.report import book, summary
    from labkit.resources import notebooks_folder

    folder = tmp_path_factory.mktemp("book")
    reports = folder / "reports"
    reports.mkdir()
    outcomes = [_as_outcome(path, reports) for path in sorted(notebooks_folder().glob("*.ipynb"))]
    summary.write(summary.summarise(outcomes), reports)
    # A few packages stand for all: `labkit book` itself, which CI runs, describes every one.
    return book.build(folder, reports=reports, packages=["caches", "measure", "report"])


def _as_outcome(path: Path, reports: Path) -> Any:
    from labkit.report import executed
    from labkit.report.runner import Outcome

    copy = Path(shutil.copy2(path, reports))
    cells = executed.count_code_cells(copy)
    records = executed.finish(copy, {}, failed=False)
    return Outcome(path, copy, seconds=0.0, cells=cells, retried=False, failure=None, records=records)

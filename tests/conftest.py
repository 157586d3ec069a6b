"""Fixtures that several folders of tests share: small notebooks, and the book built once."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# `make test` draws the same cases each time, so that a red run says something of the change in it; `make test-nightly`
# draws new ones (and whoever sets HYPOTHESIS_PROFILE=new), and what it finds becomes a test with its case written out.
settings.register_profile("same", derandomize=True)
settings.register_profile("new", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

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
    """The book (a `labkit.report.book.Book`), built with warnings as errors, once for all processes of a test run.

    The committed notebooks stand for a report: they hold what papermill gave.
    """
    pytest.importorskip("jupyter_book", reason="the book's tools are not installed (uv sync --group book)")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # what the workers have in common
    return _once(folder / "book", _build_book)


def _once(folder: Path, build: Callable[[Path], Any]) -> Any:
    """What `build(folder)` returns, from whichever process comes first; the others wait for it and read it."""
    result = folder.with_suffix(".pickle")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            result.write_bytes(pickle.dumps(build(folder)))
    return pickle.loads(result.read_bytes())


def _build_book(folder: Path) -> Any:
    from labkit.report import book, summary
    from labkit.resources import notebooks_folder

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

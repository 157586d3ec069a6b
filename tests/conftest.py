"""Fixtures that several folders of tests share: small notebooks, and the book built once."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import random
import secrets
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# `make test` draws the same cases each time, so that a red run says something of the change in it; `make test-nightly`
# draws new ones (and whoever sets HYPOTHESIS_PROFILE=new), and what it finds becomes a test with its case written out.
# No case fails for its time: on a busy machine any takes long.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", patient, derandomize=True)
settings.register_profile("new", patient, derandomize=False, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "same")
settings.load_profile(PROFILE)

LONGEST = [
    *("kernels/test_gates.py", "notebooks/test_committed.py", "engine/test_invariance.py", "report/test_book.py"),
    *("engine/test_paged_engine.py", "engine/prefix/test_engine.py", "parity/test_replay_hybrid.py"),
    *("parity/test_replay.py", "parity/test_replay_paged.py", "engine/parking/test_scenarios.py"),
    *("models/hybrid/test_few_tokens.py", "measure/test_end_to_end.py", "engine/parking/test_crashes.py"),
    *("browser/test_jupyterlab.py", "engine/test_commands.py", "house/test_readme.py", "house/test_wheel.py"),
    *("report/test_runner.py", "kernels/test_third_party.py", "engine/prefix/test_store.py"),
]
"""Files that take half a minute and more: begun first, so that no process has one left when the others are done."""

PARAMETERS = "quick: bool = True  # small sizes\nsteps: int = 3  # how many\nname: str = 'x'  # whatever"


PTX = "MLX_PTX_CACHE_DIR"
if PTX in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    # MLX writes the files of this folder in place: of two processes that begin together one may read half of a file.
    shared, own = Path(os.environ[PTX]), Path(f"{os.environ[PTX]}-{os.environ['PYTEST_XDIST_WORKER']}")
    if shared.is_dir():
        shutil.copytree(shared, own, dirs_exist_ok=True)
    os.environ[PTX] = str(own)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_FailuresAtOnce(config))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`LONGEST` first, then the files with most tests; `make test` gives files to its processes in this order."""
    here, counts = Path(__file__).parent, Counter(item.path for item in items)
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path, len(places)), -counts[item.path]))


def pytest_collection_finish() -> None:
    """What the imports made stays for good: the garbage collector, which many tests call, need not look through it."""
    gc.collect()
    gc.freeze()


class _FailuresAtOnce:
    """A failure has a line of its own when it happens: whoever reads along, or stops the run, has it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        out = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and out is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = (crash.message if crash else str(report.longrepr)).strip().splitlines() or [""]
            out.write("\n")  # behind the row of letters
            out.write_line(f"FAILED {report.nodeid} in {report.when}: {said[0][:300]}", red=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a seed of its own obeys the profile too, whichever tests the process ran before it."""
    seed = secrets.randbits(31) if PROFILE == "new" else zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    mx.random.seed(seed)


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
    from labkit.report.outcomes import Outcome

    copy = Path(shutil.copy2(path, reports))
    cells = executed.count_code_cells(copy)
    records = executed.finish(copy, {}, failed=False)
    return Outcome(path, copy, seconds=0.0, cells=cells, retried=False, failure=None, records=records)

"""How notebooks are committed: executed from top to bottom with their default parameters, outputs kept, noise removed.

Equal code on one machine gives equal bytes, so that a diff shows what changed and nothing else.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit.report import executed
from labkit.report.outcomes import Outcome, Progress
from labkit.report.runner import run, try_to_write

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def refresh(
    notebooks: Sequence[Path], *, jobs: int | None = None, progress: Callable[[Progress], None] = lambda _: None
) -> list[Outcome]:
    """Execute notebooks anew and write them back with their outputs; one that fails is left as it was.

    Raises:
        OSError: they lie where nothing can be written; nothing has been started.
    """
    for home in {path.parent for path in notebooks}:
        try_to_write(home)
    with tempfile.TemporaryDirectory(prefix="labkit-refresh-") as folder:
        outcomes = run(notebooks, Path(folder), jobs=jobs, progress=progress)
        for outcome in outcomes:
            if outcome.passed:
                book = executed.read(outcome.output)
                normalise(book)
                executed.write(book, outcome.notebook)
    return outcomes


def normalise(book: Any) -> None:
    """Bring an executed notebook into the one form in which it is committed, in place."""
    executed.clean(book)
    book.nbformat, book.nbformat_minor = 4, 5
    book.metadata.clear()
    book.metadata.update(METADATA)
    taken: set[str] = set()
    for cell in book.cells:
        cell.source = cell.source.strip("\n")
        cell.metadata = {"tags": sorted(tags)} if (tags := cell.metadata.get("tags")) else {}
        cell.id = _name(cell, taken)
        for number, output in enumerate(cell.get("outputs", ())):
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count
            if output.output_type == "stream" and number and cell.outputs[number - 1].get("name") == output.name:
                output.text = cell.outputs[number - 1].text + output.text
                cell.outputs[number - 1].text = ""
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("text") != ""]


def _name(cell: Any, taken: set[str]) -> str:
    """A cell id from the cell's text: the same cell keeps its id wherever it moves."""
    digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
    name, copy = digest, 1
    while name in taken:
        copy += 1
        name = f"{digest}-{copy}"
    taken.add(name)
    return name

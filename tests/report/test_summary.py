"""The summary: how each notebook went, and which one takes far longer than quick mode should."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from labkit.report import executed, summary
from labkit.report.outcomes import Outcome


def entry(*work_seconds: float, **given: Any) -> tuple[dict[str, Any], str]:
    """A notebook's entry and the summary's page, for cells that took so long."""
    path = Path("01_x.ipynb")
    outcome = Outcome(path, path, sum(work_seconds) + 3, len(work_seconds), False, None, (), work_seconds)
    result = summary.summarise([outcome], given)
    return result["notebooks"][0], summary.as_markdown(result)


def test_a_notebook_far_over_the_bar_is_named_with_its_longest_cell() -> None:
    found, page = entry(1.0, 4.0, summary.FAR_OVER * summary.QUICK_SECONDS, 2.0)
    assert found["slow"] == "its cells take 27 of 10 s, In [3] alone 20"
    assert "| 01_x.ipynb | passed | 30.0 | 27.0 | 4 |" in page
    assert "\n\n* 01_x.ipynb: its cells take 27 of 10 s, In [3] alone 20\n" in page


@pytest.mark.parametrize("cells", [(), (9.0, 10.9)])
def test_one_near_the_bar_is_not(cells: tuple[float, ...]) -> None:
    found, page = entry(*cells)
    assert found["slow"] is None
    assert f"| passed | {sum(cells) + 3:.1f} | {sum(cells):.1f} |" in page


def test_in_full_mode_there_is_no_bar() -> None:
    found, _ = entry(100.0, 100.0, quick=False)
    assert found["slow"] is None


def test_imports_are_no_work(tmp_path: Path) -> None:
    sources = {
        "n: int = 3  # how many": 0.1,
        "import json\nimport labkit\nlabkit.__version__": 4.0,
        "import tempfile\na = 1\nb = 2": 2.0,
        "%matplotlib inline": 0.2,
    }
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    book.metadata["labkit"] = {"cell_seconds": list(sources.values())}
    path = tmp_path / "book.ipynb"
    nbformat.write(book, path)
    assert executed.work_seconds(path) == (0.1, 0.0, 2.0, 0.2)

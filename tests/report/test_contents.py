"""The book's contents: what a report holds and nothing else, each notebook with its question and parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.report import contents
from labkit.report.contents import Heading
from labkit.resources import notebooks_folder

NOTEBOOKS = sorted(notebooks_folder().glob("*.ipynb"))
TABLE = {
    "format": "jb-book",
    "root": "intro",
    "parts": [
        {"caption": "First", "chapters": [{"glob": "notebooks/0[1-3]*"}]},
        {"caption": "Second", "chapters": [{"glob": "notebooks/1*"}]},
        {"caption": "Reference", "chapters": [{"file": "api/index", "sections": [{"glob": "api/labkit*"}]}]},
    ],
}


def test_patterns_become_pages_in_their_order():
    pages = ["notebooks/02_b", "notebooks/01_a", "notebooks/10_c", "api/index", "api/labkit.engine"]
    parts = contents.table_of_contents(TABLE, pages)["parts"]
    assert [part["caption"] for part in parts] == ["First", "Second", "Reference"]
    assert parts[0]["chapters"] == [{"file": "notebooks/01_a"}, {"file": "notebooks/02_b"}]
    assert parts[2]["chapters"] == [{"file": "api/index", "sections": [{"file": "api/labkit.engine"}]}]


def test_a_part_without_pages_is_left_out():
    found = contents.table_of_contents(TABLE, ["notebooks/10_c", "api/index"])
    assert [part["caption"] for part in found["parts"]] == ["Second", "Reference"]
    assert found["parts"][1]["chapters"] == [{"file": "api/index"}]
    assert (found["format"], found["root"]) == ("jb-book", "intro")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_each_notebook_has_its_number_and_a_question(path: Path):
    heading = Heading.of(path)
    assert heading.title.startswith(f"{path.stem[:2]}. ")
    assert heading.question.endswith(("?", "."))
    assert "\n" not in heading.question


def test_a_notebook_without_a_question_is_listed_all_the_same(tmp_path: Path, write_notebook):
    path = write_notebook(tmp_path / "01_x.ipynb", "x = 1")
    assert Heading.of(path) == Heading("A title", "")
    table = {"parts": [{"caption": "First", "chapters": [{"file": "notebooks/01_x"}]}]}
    listed = contents.list_of_notebooks(table, [path])
    assert listed.splitlines()[0] == "### First"
    assert "[A title](notebooks/01_x.ipynb)" in listed


def test_only_notebooks_of_this_book_are_listed(tmp_path: Path, write_notebook):
    path = write_notebook(tmp_path / "01_x.ipynb", "x = 1")
    table = {"parts": [{"caption": "Reference", "chapters": [{"file": "results"}]}]}
    assert contents.list_of_notebooks(table, [path]) == ""


def test_the_page_of_parameters_has_each_name_with_its_type_default_and_meaning(tmp_path: Path, write_notebook):
    path = write_notebook(tmp_path / "01_x.ipynb", parameters="bits: int | None = None  # width | of a code")
    page = contents.parameters_page([path])
    assert "## [A title](notebooks/01_x.ipynb)" in page
    assert "| `bits` | `int \\| None` | `None` | width \\| of a code |" in page


def test_links_into_the_repository_become_text():
    text = "[README](persistent/README.md), [MLX](https://x.org), ![curves](training.svg), [above](#rules)"
    assert contents.adopted(text) == "README, [MLX](https://x.org), ![curves](training.svg), [above](#rules)"


def test_a_link_to_a_page_that_the_book_has_too_leads_there():
    text = "[reached](measured.md), [rules](../measured.md)"
    assert contents.adopted(text, {"measured.md": "kernels_measured.md"}) == "[reached](kernels_measured.md), rules"

"""The committed form: equal bytes from run to run, nothing of the machine, cell ids that stay."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from labkit.report import executed, guards, normalise
from labkit.report.normalise import refresh

CELLS = [
    "import sys\nprint('one')\nprint('two')\nprint(sys.prefix)",
    "from labkit.report import record, tables\nrecord('n', basis='counted', n=steps)\n"
    "tables.show('T', ['a', 'b'], [[1, 2]])",
    (
        "import matplotlib.pyplot as plt\nfrom labkit.report import frames, live, style\nstyle.use()\n"
        "plt.plot([1, 2], [3, 4])\nplt.show()\nlive(lambda n: print('n is', n), n=(1, 9))",
        ["nbval-ignore-output"],
    ),
]


@pytest.fixture(scope="module")
def refreshed(tmp_path_factory: pytest.TempPathFactory, write_notebook) -> list[bytes]:
    """The bytes of one notebook, refreshed twice; beside it one that fails, which must stay as it was."""
    folder = tmp_path_factory.mktemp("refresh")
    path = write_notebook(folder / "01_small.ipynb", *CELLS)
    bad = write_notebook(folder / "02_bad.ipynb", "1 / 0")
    before, versions = bad.read_bytes(), []
    for notebooks in ([path, bad], [path]):
        good, *failed = refresh(notebooks)
        assert good.passed, good.failure
        assert not any(outcome.passed for outcome in failed)
        versions.append(path.read_bytes())
    assert bad.read_bytes() == before
    assert sorted(folder.iterdir()) == [path, bad]
    assert guards.check(path) == []
    return versions


def test_a_second_refresh_changes_no_byte(refreshed: list[bytes]) -> None:
    assert refreshed[0] == refreshed[1]


def test_nothing_of_the_machine_or_the_moment_is_left(refreshed: list[bytes]) -> None:
    text = refreshed[0].decode()
    for word in ("papermill", "start_time", str(Path.cwd()), "widget-view", "application/vnd.jupyter.widget"):
        assert word not in text
    assert "<python>" in text


def test_a_widget_is_one_picture_in_a_static_page(refreshed: list[bytes]) -> None:
    assert "n is 5" in refreshed[0].decode()


def test_outputs_and_counts_are_kept(refreshed: list[bytes]) -> None:
    book = nbformat.reads(refreshed[0].decode(), 4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4]
    assert code[1].outputs[0].text.startswith("one\ntwo\n")
    assert "image/svg+xml" in code[3].outputs[0].data


def test_ids_follow_the_text_and_stay_unique() -> None:
    def ids(*sources: str) -> list[str]:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
        normalise.normalise(book)
        return [cell.id for cell in book.cells]

    first, second = ids("a = 1", "b = 2"), ids("new", "a = 1", "b = 2")
    assert first == second[1:]
    assert len(set(ids("same", "same", "same"))) == 3


def test_streams_that_were_sent_in_pieces_become_one() -> None:
    piece = {"output_type": "stream", "name": "stdout"}
    cell = nbformat.v4.new_code_cell(
        "x", outputs=[nbformat.from_dict(piece | {"text": t}) for t in ("a\n", "b\n", "c\n")]
    )
    book = nbformat.v4.new_notebook(cells=[cell])
    normalise.normalise(book)
    assert [output.text for output in book.cells[0].outputs] == ["a\nb\nc\n"]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.txt"
    executed.write_text("old", path)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        executed.write_text("new", path)
    assert path.read_text() == "old"

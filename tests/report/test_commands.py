"""The commands: JSON on standard output alone, progress on standard error, exit codes that mean something."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from labkit import resources
from labkit.report import normalise, runner
from labkit.report.commands import find_notebooks, notebooks_app, report


@pytest.fixture
def invoke():
    app = typer.Typer()
    app.command()(report)
    app.add_typer(notebooks_app, name="notebooks")
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


def test_report_runs_collects_and_names_what_fails(invoke, tmp_path: Path, write_notebook, monkeypatch) -> None:
    folder, output = tmp_path / "notebooks", tmp_path / "deep" / "out"
    folder.mkdir()
    monkeypatch.setattr(resources, "notebooks_folder", lambda: folder)
    write_notebook(
        folder / "01_small.ipynb",
        "from labkit.report import record\n"
        "record('r', basis='predicted', by_size={'1000': 1.5, '20': 2.5}, n=steps, quick=quick)",
    )
    write_notebook(folder / "02_bad.ipynb", "raise KeyError('missing | thing')")
    done = invoke("report", "-p", "steps=9", "--full", "--output", output, "--json")
    assert done.exit_code == 1
    assert "1 of 2 notebooks failed: 02_bad.ipynb, In [3] (raise KeyError('missing | thing')): KeyError" in done.stderr
    assert "01_small  [3/3]" in done.stderr
    result = json.loads(done.stdout)
    assert result["passed"] is False
    assert [one["passed"] for one in result["notebooks"]] == [True, False]
    assert result["records"][0]["values"] == {"by_size": {"1000": 1.5, "20": 2.5}, "n": 9, "quick": False}
    assert json.loads((output / "summary.json").read_text()) == result
    page = (output / "summary.md").read_text()
    assert "| r | predicted | by size: **20: 2.5, 1000: 1.5**; n: **9**; quick: **False** |" in page
    assert "missing \\| thing" in page
    assert (output / "01_small.ipynb").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-p", "stpes=3"], "did you mean 'steps'?"),
        (["-p", "steps"], "is not name=value"),
        (["-p", "steps=many"], "parameter steps is int"),
        (["-p", "quick=True", "--quick"], "not both"),
    ],
)
def test_bad_parameters_end_with_code_2(invoke, tmp_path: Path, write_notebook, arguments, words: str) -> None:
    path = write_notebook(tmp_path / "01_small.ipynb", "x = 1")
    done = invoke("report", path, *arguments, "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert words in done.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named_before_anything_runs(tmp_path, write_notebook, monkeypatch) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", f"{dir}/tmp1234")

    monkeypatch.setattr(runner.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(runner, "_start", lambda *_, **__: pytest.fail("a notebook was started"))
    path = write_notebook(tmp_path / "01_small.ipynb", "x = 1")
    with pytest.raises(OSError, match=r"Read-only file system: '.*/out'$"):
        runner.run([path], tmp_path / "out")
    monkeypatch.setattr(normalise, "run", lambda *_, **__: pytest.fail("a notebook was started"))
    with pytest.raises(OSError, match=f"Read-only file system: '{re.escape(str(tmp_path))}'$"):
        normalise.refresh([path])


def test_check_lists_findings_and_fails(invoke, tmp_path: Path, write_notebook) -> None:
    path = write_notebook(tmp_path / "01_small.ipynb", "x = 1")
    done = invoke("notebooks", "check", path, "--json")
    assert done.exit_code == 1
    assert "execution count" in json.loads(done.stdout)["notebooks"]["01_small.ipynb"][0]


def test_notebooks_are_found_by_number_name_and_pattern(tmp_path: Path) -> None:
    everything = find_notebooks(None)
    assert find_notebooks("01") == [path for path in everything if path.name.startswith("01")]
    assert find_notebooks("*machine*") == find_notebooks("01")
    with pytest.raises(typer.Exit):
        find_notebooks("no-such-notebook")

"""A recipe's table: kept after every row and part, whatever becomes of the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.measure.tables import read
from recipes.measured.table import Table, shown


def test_rows_are_kept_at_once_as_a_table_that_notebooks_can_read(tmp_path: Path) -> None:
    table = Table(tmp_path / "new" / "here.json", "abc", family="some")
    table.add({"name": "first", "us": 1.5})
    kept = read(table.path)
    assert (kept.commit, kept.find(name="first")["us"]) == ("abc", 1.5)
    assert kept.device
    assert kept.date
    assert json.loads(table.path.read_text())["family"] == "some"


def test_a_part_that_fails_is_named_and_the_next_one_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def fails() -> None:
        table.add({"name": "half"})
        raise RuntimeError("no memory")

    table = Table(tmp_path / "here.json", "abc")
    table.attempt("broken", fails)
    table.attempt("whole", lambda: table.rows.append({"name": "other"}))
    found = json.loads(table.path.read_text())
    assert [row["name"] for row in found["rows"]] == ["half", "other"]
    assert list(found["failed"]) == ["broken"]
    assert "no memory" in found["failed"]["broken"]
    assert "no memory" in capsys.readouterr().err


def test_a_write_that_fails_leaves_the_table_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path / "here.json", "abc")
    table.add({"name": "first"})
    before = table.path.read_text()

    def full(self: Path, text: str) -> None:
        self.write_bytes(text[:10].encode())
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            table.add({"name": "second"})
    assert table.path.read_text() == before


def test_time_runs_out(tmp_path: Path) -> None:
    assert Table(tmp_path / "a.json", "abc").left == float("inf")
    assert Table(tmp_path / "a.json", "abc", seconds=-1).left < 0


def test_a_row_in_a_line() -> None:
    assert shown({"name": "a", "us": 1.23456, "turns": [1.0, 2.5]}) == "name=a  us=1.235  turns=1 2.5"

"""Measured tables: every committed one says where it comes from, and a lookup never guesses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.measure import tables
from labkit.resources import data_folder

COMMITTED = sorted((data_folder() / "measured").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=[path.stem for path in COMMITTED])
def test_committed_tables_name_device_and_commit(path: Path) -> None:
    table = tables.measured(path.stem)
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert (table.device, table.commit, table.date) == (raw["device"], raw["commit"], raw["date"])
    assert [dict(row) for row in table] == raw["rows"]
    assert table.rows
    assert table.device in table.label
    assert table.commit in table.label
    assert all(row for row in table)


def test_an_unknown_table_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no measured table 'h100_attention'; there are: .*h200_attention"):
        tables.measured("h100_attention")


def _write(folder: Path, **content) -> Path:
    path = folder / "some.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_a_lookup_finds_one_row_none_or_refuses(tmp_path: Path) -> None:
    rows = [{"name": "a", "shape": "4K", "us": 1}, {"name": "a", "shape": "8K", "us": 2}]
    table = tables.read(_write(tmp_path, device="GPU", commit="abc", date="2026-01-01", mlx="1", rows=rows))
    assert table.find(name="a", shape="8K")["us"] == 2
    assert table.find(name="b") is None
    assert table.find(nothing=1) is None
    assert (table.versions, table.note) == ({"mlx": "1"}, "")
    noted = _write(tmp_path, device="GPU", commit="abc", date="2026-01-01", note="alone", rows=rows)
    assert tables.read(noted).note == "alone"
    with pytest.raises(ValueError, match="2 rows of some fit"):
        table.find(name="a")


@pytest.mark.parametrize("lacking", ["device", "commit", "date", "rows"])
def test_a_table_without_its_origin_is_refused(tmp_path: Path, lacking: str) -> None:
    content = {"device": "GPU", "commit": "abc", "date": "2026-01-01", "rows": [{"name": "a"}]}
    with pytest.raises(ValueError, match=f"some.json lacks {lacking}"):
        tables.read(_write(tmp_path, **{**content, lacking: None}))

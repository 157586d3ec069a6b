"""Times by both clocks: the fastest of each kernel and shape, and nothing of a table that has but one clock."""

from __future__ import annotations

import types

import pytest

from labkit.report import clocks


class Table(types.SimpleNamespace):
    def __iter__(self):
        return iter(self.rows)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list:
    found = []
    monkeypatch.setattr(clocks.tables, "show", lambda *table: found.append(table))
    return found


def test_the_fastest_configuration_is_shown_by_both_clocks(shown: list) -> None:
    rows = [
        {"name": "few", "shape": "1", "us": 9.0, "device_us": 5.0, "mlx_us": 18.0, "mlx_device_us": 16.25},
        {"name": "few", "shape": "1", "us": 8.0, "device_us": 6.0, "mlx_us": 18.0, "mlx_device_us": 16.25},
        {"name": "few", "shape": "2", "us": 1234.5, "device_us": 1200.0, "mlx_us": None},
        {"name": "many", "shape": "1", "us": 7.0, "device_us": 3.0},
        {"name": "only inside", "shape": "1", "us": 7.0},
    ]
    clocks.show(Table(label="a GPU", rows=rows), "few", "only")
    ((title, columns, lines),) = shown
    assert title == "Measured by both clocks (a GPU)"
    assert columns == [
        *("kernel", "shape", "launch cost inside: us", "on the device alone: us"),
        *("MLX, launch cost inside: us", "MLX, on the device alone: us"),
    ]
    assert lines == [["few", "1", "9.0", "5.0", "18.0", "16.2"], ["few", "2", "1,234.5", "1,200.0", "-", "-"]]
    clocks.show(Table(label="a GPU", rows=rows))
    assert len(shown[1][2]) == 3


def test_a_table_with_one_clock_shows_nothing(shown: list) -> None:
    clocks.show(Table(label="a GPU", rows=[{"name": "few", "shape": "1", "us": 9.0}]))
    assert not shown

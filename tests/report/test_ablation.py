"""The ablation table keeps what was counted, predicted, measured and published apart."""

from __future__ import annotations

import pytest

from labkit.measure.published import Figure
from labkit.measure.tables import MeasuredTable
from labkit.report import ablation
from labkit.report.ablation import Ablation

TABLE = MeasuredTable("t", "Some GPU", "abc", "2026-01-01", {}, ())
FIGURE = Figure("gain", 25.0, "%", "Another machine, 1 GB", "a model", "somewhere")


@pytest.fixture
def shown(monkeypatch):
    found = {}
    monkeypatch.setattr(ablation.tables, "show", lambda title, columns, rows: found.update(columns=columns, rows=rows))
    monkeypatch.setattr(ablation, "record", lambda name, **values: found.update(record=values))
    return found


def test_each_basis_has_its_own_labelled_column(shown):
    row = Ablation("a thing", "8 rows", 30.0, 10.0, counted=4.0, predicted="1 to 4", share=0.5, published=FIGURE)
    ablation.show("Gains", [row], TABLE, counted="bytes", whole="decode step")
    cells = dict(zip(shown["columns"], shown["rows"][0], strict=True))
    assert cells["counted: bytes"] == "4.00"
    assert cells["predicted: gain"] == "1 to 4"
    assert (cells["measured, Some GPU: us without"], cells["us with"], cells["gain"]) == ("30.0", "10.0", "3.00")
    assert cells["predicted: gain of a decode step"] == "1.50"
    assert cells["published, Another machine: gain of a decode step"] == "1.25"
    assert shown["record"] == {"basis": "measured", "device": "Some GPU", "commit": "abc", "a thing": {"8 rows": 3.0}}


def test_what_was_not_measured_is_said_and_not_recorded(shown):
    rows = [Ablation("a", "1", 30.0, None), Ablation("b", "1", 10.0, 20.0)]
    ablation.show("Gains", rows, TABLE)
    assert shown["columns"] == ["mechanism", "size", "measured, Some GPU: us without", "us with", "gain"]
    assert shown["rows"][0][2:] == ["30.0", "not measured", "-"]
    assert "a" not in shown["record"]
    assert shown["record"]["b"] == {"1": 0.5}


def test_a_table_without_any_measurement_records_nothing(shown):
    ablation.show("Gains", [Ablation("a", "1", counted=2.0)], TABLE, counted="launches")
    assert shown["columns"][2] == "counted: launches"
    assert "record" not in shown

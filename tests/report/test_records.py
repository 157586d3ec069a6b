"""Records: plain, labelled, read back whole, and refused where they are not data."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from labkit.report import records
from labkit.report.records import MIME, Record, collect, record


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    bundles: list[dict] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: bundles.append(data))
    return bundles


def notebook(*bundles: dict) -> dict:
    return {"cells": [{"outputs": [{"data": bundle} for bundle in bundles]}, {"cell_type": "markdown"}]}


def test_a_record_comes_back_as_it_was_given(shown: list[dict]) -> None:
    record("speed", basis="measured", tokens_s=np.float32(2.5), count=mx.array(3), list=[np.int64(1), None], ok=True)
    assert collect(notebook(*shown)) == [
        Record("speed", "measured", {"tokens_s": 2.5, "count": 3, "list": [1, None], "ok": True})
    ]
    assert shown[0]["text/plain"].startswith("speed (measured)\n")


def test_nothing_is_returned_so_that_nothing_is_shown_twice(shown: list[dict]) -> None:
    assert record("speed", basis="counted", n=1) is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, np.array([1.0, math.nan]), mx.array(-math.inf), {"a": [math.nan]}])
def test_numbers_that_json_lacks_are_refused_by_name(bad, shown: list[dict]) -> None:
    with pytest.raises(ValueError, match=r"speed\.value"):
        record("speed", basis="measured", value=bad)
    assert shown == []


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(TypeError, match=r"speed\.thing is a object"):
        record("speed", basis="measured", thing=object())


@pytest.mark.parametrize(("basis", "values"), [("guessed", {"a": 1}), ("measured", {})])
def test_basis_and_values_are_required(basis: str, values: dict) -> None:
    with pytest.raises(ValueError, match="speed"):
        record("speed", basis=basis, **values)


def test_a_name_is_unique_in_its_notebook() -> None:
    bundle = {MIME: Record("a", "counted", {"n": 1}).as_json()}
    with pytest.raises(ValueError, match="'a'"):
        collect(notebook(bundle, bundle))


def test_every_basis_has_its_place_in_the_summary() -> None:
    from typing import get_args

    from labkit.report.summary import BASES

    assert set(BASES) == set(get_args(records.Basis))

"""Decode steps of several caches by turns, at small sizes: every kind has its row, its steps and its bytes."""

from __future__ import annotations

import pytest

from recipes.measured import paged


def test_steps_and_bytes_of_every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HEADS": 4,
        "KV_HEADS": 1,
        "WIDTH": 32,
        "STEPS": 20,
        "CONTIGUOUS_STEPS": 3,
        "WARMING": 1,
    }.items():
        monkeypatch.setattr(paged, name, value)
    rows = {(row["rows"], row["name"].removeprefix("decode step, ")): row for row in paged.decode_steps(48, 1e12)}
    assert set(rows) == {(count, kind) for count in (1, 8) for kind in paged.KINDS}
    for (count, kind), row in rows.items():
        assert row["steps"] == (3 if kind == "contiguous" else 20)
        assert count * 48 * 2 * 2 * 32 <= row["held_bytes"] < row["peak_bytes"]  # keys and values; what a step adds
    assert list(paged.decode_steps(48, deadline=-1)) == []

"""Restoring against computing, on a model of two small layers: every length is there, and its bytes are."""

import pytest

from labkit.measure import restoring
from labkit.measure.pressure_film import small_hybrid


@pytest.fixture(scope="module")
def loaded():
    return small_hybrid()


def test_every_length_has_its_bytes_and_all_its_times(loaded, tmp_path):
    rows = restoring.measure(loaded, tmp_path / "store", [32, 16, 64], width=16, rounds=1)
    assert [row.tokens for row in rows] == [16, 32, 64]
    per_token = loaded.model.layouts[1].bytes_per_token
    assert [row.bytes - rows[0].bytes for row in rows] == [0, 16 * per_token, 48 * per_token]
    for row in rows:
        record = row.as_record()
        assert all(record[f"{side}_seconds"] > 0 for side in ("prefill", "memory", "disk", "commit", "between"))
        assert record["disk_ratio"] == row.prefill_seconds / row.disk_seconds
    assert rows[0].commit_seconds < rows[-1].commit_seconds


def test_lengths_off_the_grid_are_refused(loaded, tmp_path):
    with pytest.raises(ValueError, match="24 tokens is no multiple"):
        restoring.measure(loaded, tmp_path / "store", [16, 24], width=16)

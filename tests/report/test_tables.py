"""Tables: numbers to the right, text to the left, and every row of the table's width."""

from __future__ import annotations

import pytest

from labkit.report.tables import as_markdown


def test_columns_of_numbers_are_right_aligned() -> None:
    text = as_markdown("T", ["name", "size", "note"], [["a", "1,234.5 GB", ""], ["b", 7, "a|b"]])
    assert text.splitlines()[2:] == [
        "| name | size | note |",
        "|---|---:|---|",
        "| a | 1,234.5 GB |  |",
        r"| b | 7 | a\|b |",
    ]


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="has 1 entries, the table 2 columns"):
        as_markdown("T", ["a", "b"], [["only"]])

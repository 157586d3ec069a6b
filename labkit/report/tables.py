"""Plain tables inside a notebook, as Markdown: readable in JupyterLab, in the book and in a diff."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Show a table in the notebook; columns of numbers are right-aligned."""
    from IPython.display import display

    text = as_markdown(title, columns, rows)
    display({"text/markdown": text, "text/plain": text}, raw=True)


def as_markdown(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The table as Markdown, with its title in bold above it.

    Raises:
        ValueError: a row whose length is not that of `columns`.
    """
    rows = [list(row) for row in rows]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"the row {row} has {len(row)} entries, the table {len(columns)} columns")
    numeric = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    rule = "|" + "".join("---:|" if right else "---|" for right in numeric)
    return "\n".join([f"**{title}**", "", _row(columns), rule, *map(_row, rows)])


def _is_number(cell: Any) -> bool:
    """Whether a cell is a number, perhaps with a unit or a percent sign behind it."""
    return bool(re.match(r"^[-+]?[\d,]*\.?\d+(e[-+]?\d+)?\s*\D*$", str(cell)))


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

"""Plain tables inside a notebook, as Markdown: readable in JupyterLab, in the book and in a diff."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Show a table in the notebook; every column but the first is right-aligned."""
    from IPython.display import display

    text = as_markdown(title, columns, rows)
    display({"text/markdown": text, "text/plain": text}, raw=True)


def as_markdown(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The table as Markdown, with its title in bold above it.

    Raises:
        ValueError: a row whose length is not that of `columns`.
    """
    lines = [f"**{title}**", "", _row(columns), "|---|" + "---:|" * (len(columns) - 1)]
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"the row {list(row)} has {len(row)} entries, the table {len(columns)} columns")
        lines.append(_row(row))
    return "\n".join(lines)


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

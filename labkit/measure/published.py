"""Figures that others published, with their machine and source: shown beside ours, never mixed with them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from labkit.resources import data_folder


@dataclass(frozen=True)
class Figure:
    """One published figure: what it is, its value and unit, on which machine and model, and where it is printed."""

    name: str
    value: float
    unit: str
    machine: str
    model: str
    source: str


def published(collection: str) -> dict[str, Figure]:
    """The figures of one publication, by name.

    Args:
        collection: the name of a file in `data/published`, such as "specialised-engine".

    Raises:
        ValueError: no such collection; the message lists those that there are.
    """
    folder = data_folder() / "published"
    path = folder / f"{collection}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.json")))
        raise ValueError(f"no published figures {collection!r}; there are: {known}")
    table = json.loads(path.read_text(encoding="utf-8"))
    source = "{authors}: {title}, {date}, {url}".format(**table["source"])
    return {
        name: Figure(name, entry["value"], entry["unit"], table["machine"], table["model"], source)
        for name, entry in table["figures"].items()
    }

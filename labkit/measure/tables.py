"""Tables measured on named devices and kept in `data/measured`: shown where the device is not there, labelled so."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.resources import data_folder

_REQUIRED = ("device", "commit", "date", "rows")
_VERSIONS = ("python", "mlx", "mlx-lm", "torch", "triton")


@dataclass(frozen=True)
class MeasuredTable:
    """What one run measured on one device.

    Attributes:
        name: the file's name in `data/measured`, without its ending.
        device: such as "NVIDIA H200". commit: of labkit. date: of the run. versions: of the packages that took part.
        rows: one a measurement, as the bench wrote it: `name`, `shape`, `us` (microseconds) and more.
        note: what a reader must know of the run beside that, or "".
    """

    name: str
    device: str
    commit: str
    date: str
    versions: Mapping[str, str]
    rows: tuple[Mapping[str, Any], ...]
    note: str = ""

    @property
    def label(self) -> str:
        """Device, commit and date: what must stand beside every figure of this table."""
        return f"{self.device}, commit {self.commit}, {self.date}"

    def select(self, **wanted: Any) -> list[Mapping[str, Any]]:
        """The rows whose entries equal all of `wanted`: `select(shape="8 rows", target="cuda")`."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in wanted.items())]

    def find(self, **wanted: Any) -> Mapping[str, Any] | None:
        """The one row whose entries equal all of `wanted`, or None if it was not measured.

        Raises:
            ValueError: several rows fit, so that any choice would be a guess.
        """
        rows = self.select(**wanted)
        if len(rows) > 1:
            raise ValueError(f"{len(rows)} rows of {self.name} fit {wanted}: ask for more of {sorted(rows[0])}")
        return rows[0] if rows else None

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)


def measured(name: str) -> MeasuredTable:
    """A table of `data/measured`.

    Args:
        name: such as "h200_attention".

    Raises:
        ValueError: no such table (the message lists those there are), or one that does not say where it was measured.
    """
    folder = data_folder() / "measured"
    path = folder / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.json"))) or "none"
        raise ValueError(f"no measured table {name!r}; there are: {known}")
    return read(path)


def kept(name: str) -> MeasuredTable | None:
    """A table of `data/measured`, or None where it has not been measured: a reader then shows what is there."""
    try:
        return measured(name)
    except ValueError:
        return None


def read(path: Path) -> MeasuredTable:
    """The table in a file. Raises ValueError for one without device, commit, date or rows."""
    content = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in _REQUIRED if not content.get(key)]
    if missing:
        raise ValueError(f"{path.name} lacks {', '.join(missing)}: a figure without them cannot be shown")
    versions = {key: content[key] for key in _VERSIONS if key in content}
    return MeasuredTable(
        path.stem,
        *(content[key] for key in ("device", "commit", "date")),
        versions,
        tuple(content["rows"]),
        content.get("note", ""),
    )

"""One file a point: what a run has measured stays, and the next run goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CONDITIONS = "conditions.json"


class PartsError(ValueError):
    """A folder holds the parts of another comparison."""


class Parts:
    """The points of one comparison in a folder.

    Args:
        folder: made if it is not there; None keeps nothing.
        conditions: what must be equal for points to stand in one table: model, device, versions, rounds.
        fresh: throw away the parts that the folder holds.

    Raises:
        PartsError: the folder's parts were measured under other conditions; the message names the first difference. Or
            it is to be emptied and holds JSON files of another origin.
    """

    def __init__(self, folder: Path | None, conditions: Mapping[str, Any], *, fresh: bool = False):
        self.folder, self.conditions = folder, json.loads(json.dumps(conditions))
        self._memory: dict[str, dict[str, Any]] = {}
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        stored = folder / _CONDITIONS
        if fresh:
            found = list(folder.glob("*.json"))
            if found and not stored.is_file():
                raise PartsError(
                    f"{folder} holds {found[0].name} and no {_CONDITIONS}: no comparison has measured here, so "
                    "--fresh deletes nothing of it; give another folder"
                )
            for path in found:
                path.unlink()
        if stored.is_file():
            before = json.loads(stored.read_text(encoding="utf-8"))
            for key in sorted(before.keys() | self.conditions.keys()):
                if before.get(key) != self.conditions.get(key):
                    raise PartsError(
                        f"{folder} holds points measured with {key} = {before.get(key)!r}, and this run has "
                        f"{self.conditions.get(key)!r}: give another folder, or --fresh to measure all anew"
                    )
        else:
            _write(stored, self.conditions)

    def load(self, name: str) -> dict[str, Any] | None:
        """A point's record, or None if it has not been measured (or its file was cut short)."""
        if self.folder is None:
            return self._memory.get(name)
        try:
            return json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def store(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a point's record, whole or not at all."""
        if self.folder is None:
            self._memory[name] = dict(record)
        else:
            _write(self.folder / f"{name}.json", record)


def _write(path: Path, record: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(".partial")
    scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(scratch, path)

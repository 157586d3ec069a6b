"""The table that a recipe measures, written after every part: what fails or runs out of time costs only itself."""

from __future__ import annotations

import json
import math
import platform
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from labkit.devices import installed_versions, this_device

PACKAGES = ("mlx", "mlx-lm", "torch", "triton")


def conditions(commit: str) -> dict[str, Any]:
    """Device, versions, commit and date: what a figure must carry."""
    found = {"device": this_device().name, "commit": commit, "python": platform.python_version()}
    return found | installed_versions(PACKAGES) | {"date": time.strftime("%Y-%m-%d")}


class Table:
    """Rows, and what they depend on.

    Args:
        path: the JSON file; its folder is made.
        commit: of the tree that runs.
        seconds: from now on, in which parts may begin.
        about: what else the file says beside its rows.

    Attributes:
        rows: what has been measured so far.
        about: `conditions` and what was given; may be added to.
    """

    def __init__(self, path: Path, commit: str, *, seconds: float = math.inf, **about: Any):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.rows, self.about = path, [], conditions(commit) | about
        self._begin, self._seconds = time.perf_counter(), seconds

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._begin

    @property
    def left(self) -> float:
        """Seconds in which parts may still begin; negative once time is up."""
        return self._seconds - self.elapsed

    def say(self, text: str) -> None:
        """Print progress."""
        print(f"[{self.elapsed:6.1f} s] {text}", flush=True)

    def add(self, row: Mapping[str, Any]) -> None:
        """One more row, kept at once."""
        self.rows.append(dict(row))
        self.write()

    def attempt(self, name: str, part: Callable[[], Any]) -> None:
        """Run a part. One that fails is printed and named in the table, and the next one may begin."""
        try:
            part()
        except Exception:
            traceback.print_exc()
            self.about.setdefault("failed", {})[name] = traceback.format_exc(limit=-3)
        self.write()

    def write(self) -> None:
        """The file, whole or as it was before."""
        scratch = self.path.with_suffix(".partial")
        scratch.write_text(json.dumps(self.about | {"rows": self.rows}, indent=1, default=str) + "\n")
        scratch.replace(self.path)


def shown(row: Mapping[str, Any]) -> str:
    """A row in one line."""
    return "  ".join(f"{key}={_short(value)}" for key, value in row.items())


def _short(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_short, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)

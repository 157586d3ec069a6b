"""What a run of notebooks tells: each step while it runs, and how each notebook ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from labkit.report.records import Record


@dataclass(frozen=True)
class Failure:
    """Why a notebook failed, and where.

    Attributes:
        kind: "cell" (it raised), "dead" (the kernel died), "timeout", "start" (the kernel never answered, twice),
            "lost" (a message between the worker and its living kernel was lost, twice), "kernel" (no such kernel),
            "records" (its outputs do not make a report) or "other".
        cell: the code cell's number, counted from 1 as in `In [1]`; None if no cell had started.
        line: that cell's first line.
        message: one line.
        detail: the traceback as the notebook shows it, without colours.
    """

    kind: str
    message: str
    cell: int | None = None
    line: str = ""
    detail: str = ""

    def describe(self, notebook: str) -> str:
        where = f"{notebook}, In [{self.cell}] ({self.line})" if self.cell else notebook
        return f"{where}: {self.message}"


@dataclass(frozen=True)
class Outcome:
    """How one notebook went: its executed copy, seconds with start and imports, code cells run, the failure if there
    was one, records, and the seconds of each code cell, 0 for those that import."""

    notebook: Path
    output: Path
    seconds: float
    cells: int
    retried: bool
    failure: Failure | None
    records: tuple[Record, ...] = ()
    work_seconds: tuple[float, ...] = ()

    @property
    def passed(self) -> bool:
        return self.failure is None


@dataclass(frozen=True)
class Progress:
    """One step forward: which notebook (or "native graph", where it is compiled ahead of them), and what it is at
    ("start", "cell", "retry", "done" or "failed")."""

    notebook: str
    step: str
    cell: int = 0
    cells: int = 0
    text: str = ""

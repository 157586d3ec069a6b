"""All records of a report in one table: `summary.json` for programs, `summary.md` for people and for the book."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.report import provenance
from labkit.report.executed import write_text
from labkit.report.outcomes import Outcome
from labkit.report.records import Record, readable

BASES = ("measured", "predicted", "counted", "published", "checked")

QUICK_SECONDS = 10
"""What a notebook's cells may take in quick mode beside imports, on two cores with nothing else to do."""
FAR_OVER = 2


def summarise(outcomes: Sequence[Outcome], parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    """The report as plain data: provenance, how each notebook went, and every record."""
    quick = (parameters or {}).get("quick", True)
    return {
        "provenance": provenance.collect(parameters),
        "passed": all(outcome.passed for outcome in outcomes),
        "notebooks": [
            {
                "notebook": outcome.notebook.name,
                "passed": outcome.passed,
                "seconds": round(outcome.seconds, 2),
                "work_seconds": list(outcome.work_seconds),
                "slow": slow(outcome.work_seconds) if quick else None,
                "cells": outcome.cells,
                "retried": outcome.retried,
                "failure": outcome.failure.describe(outcome.notebook.name) if outcome.failure else None,
            }
            for outcome in outcomes
        ],
        "records": [
            {"notebook": outcome.notebook.name, **record.as_json()}
            for outcome in outcomes
            for record in outcome.records
        ],
    }


def slow(work_seconds: Sequence[float]) -> str | None:
    """What to say of a notebook whose cells take far longer than quick mode should; None if they do not."""
    total = sum(work_seconds)
    if total <= FAR_OVER * QUICK_SECONDS:
        return None
    number, longest = max(enumerate(work_seconds, 1), key=lambda cell: cell[1])
    return f"its cells take {total:.0f} of {QUICK_SECONDS} s, In [{number}] alone {longest:.0f}"


def write(summary: dict[str, Any], folder: Path) -> None:
    """Write `summary.json` and `summary.md` into `folder`."""
    write_text(json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n", folder / "summary.json")
    write_text(as_markdown(summary), folder / "summary.md")


def as_markdown(summary: dict[str, Any]) -> str:
    """The report as a page: where it was run, the notebooks, and the records of each, by where the values come from."""
    device, found = summary["provenance"]["device"], summary["provenance"]
    changed = " with changes" if found["changed"] else ""
    commit = f", commit `{found['commit'][:12]}`{changed}" if found["commit"] else ""
    packages = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    lines = [
        "# Results",
        "",
        f"Run on **{device['name']}** ({device['kind']}, {device['memory_bytes'] / 2**30:.0f} GiB, {device['dtype']}) "
        f"with labkit {found['labkit']}{commit}, Python {found['python']}, {packages}.",
        "",
        "Seconds are those of a clock, with the kernel's start; *work* leaves out the cells that import.",
        "",
        "| notebook | state | seconds | work | cells |",
        "|---|---|---:|---:|---:|",
    ]
    for one in summary["notebooks"]:
        state = "passed" if one["passed"] else f"failed: {_cell(one['failure'])}"
        seconds = f"{one['seconds']:.1f} | {sum(one['work_seconds']):.1f}"
        lines.append(f"| {one['notebook']} | {state} | {seconds} | {one['cells']} |")
    # Below the table: a sentence in a column of numbers would make every row of a page as high as itself.
    lines += ["", *(f"* {one['notebook']}: {one['slow']}" for one in summary["notebooks"] if one["slow"])]
    for notebook in dict.fromkeys(record["notebook"] for record in summary["records"]):
        lines += ["", f"## {notebook.removesuffix('.ipynb').replace('_', ' ')}", ""]
        own = [Record(r["name"], r["basis"], r["values"]) for r in summary["records"] if r["notebook"] == notebook]
        lines += _records(own)
    return "\n".join(lines) + "\n"


def work(notebook: dict[str, Any]) -> str:
    """The seconds of a notebook's cells beside imports, and what took them if they are too many."""
    text = f"{sum(notebook['work_seconds']):.1f}"
    return f"{text}: {notebook['slow']}" if notebook["slow"] else text


def _records(records: list[Record]) -> list[str]:
    lines = ["| result | basis | values |", "|---|---|---|"]
    for record in sorted(records, key=lambda record: BASES.index(record.basis)):
        values = "; ".join(f"{key.replace('_', ' ')}: **{_cell(readable(v))}**" for key, v in record.values.items())
        lines.append(f"| {_cell(record.name)} | {record.basis} | {values} |")
    return lines


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")

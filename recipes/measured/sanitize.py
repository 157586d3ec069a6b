"""The device tests of the kernels under compute-sanitizer, in several processes at once, and what it found.

    python -m recipes.measured.sanitize --out data/measured --commit SHA [--jobs 12] [--seconds 250] [--tools memcheck]

Most of a test's time under the sanitizer is one core's, which compiles. Each process has its share of the tests; those
of kernels whose threadgroups wait for each other come last. No test begins after three quarters of the time, so that
the sanitizer comes to its summary. What a process had done when all of it was up counts, the rest is "not reached"; a
test that passed in a process without a summary says so: what the sanitizer tells at the end, it did not tell there.

Where the sanitizer says that it lost track of a launch, the test of that launch and those behind it in the process are
"untracked": they passed, and prove nothing of memory or races. (Its summary then has one error or hazard more than it
printed.) More `--jobs` have fewer tests each to lose. Succeeds if all tests passed and nothing was found.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipes.measured.table import Table

TESTS = "tests/kernels"
TOOLS = ("memcheck", "racecheck")
LAST = ("sparse_half", "linear_layer", "full_layer", "persistent")
"""Parts of the names of tests that may hang where the sanitizer leaves fewer threadgroups room at once."""
LAST_BEGIN = 0.75
"""No test begins after this part of a tool's time."""
LOST = "Internal Sanitizer Error"
"""How the sanitizer begins when it lost track; of later launches it may miss what is wrong."""
ROOT = Path(__file__).resolve().parents[2]


class Outcomes:
    """A pytest plugin: the tests that were collected, or a line of JSON a test as soon as it is over; none begins after
    `until` (on `time.time`)."""

    def __init__(self, path: Path | None = None, until: float = float("inf")) -> None:
        self.path, self.until, self.collected = path, until, []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.session, self.collected = session, [item.nodeid for item in session.items]

    def pytest_runtest_logfinish(self) -> None:
        if time.time() > self.until:
            self.session.shouldstop = "time is up"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.path and (report.when == "call" or report.outcome != "passed"):
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def shares(tests: Sequence[str], jobs: int) -> list[list[str]]:
    """The tests dealt out among at most so many processes, those of `LAST` at the end of each."""
    late = [test for test in tests if any(part in test for part in LAST)]
    order = [test for test in tests if test not in late] + late
    return [order[i::jobs] for i in range(min(jobs, len(order)))]


def findings(text: str) -> list[str]:
    """What the sanitizer said beside its greeting and a summary of nothing; the test before what it said in one."""
    quiet = ("COMPUTE-SANITIZER", "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards")
    said, test = [], ""
    for line in text.splitlines():
        if name := re.match(r"\S+::\S+(?= )", line):  # `pytest -v` names a test as it starts
            test = f"{name[0]}: "
        # Behind what pytest has on the line too; its own rules are longer, or end as they began.
        found = re.search(r"(?<!=)={9}(?!=)(.*[^=])$", line)
        if found and (words := found[1].strip()) and not words.startswith(quiet):
            said.append(words if " SUMMARY: " in words else test + words)
    return said


def untracked(text: str, tests: Sequence[str]) -> set[str]:
    """Those of a process's tests that ran when the sanitizer lost track of a launch, or later.

    Args:
        text: what the sanitizer and `pytest -v` said; the latter names a test as it starts.
    """
    lost = text.find(LOST)
    if lost < 0:
        return set()
    begun = {test: at for test in tests if (at := text.find(f"{test} ")) >= 0}
    at_work = max((at for at in begun.values() if at < lost), default=0)
    return {test for test, at in begun.items() if at >= at_work}


def collect(expression: str) -> list[str]:
    """The ids of the device tests, of those that fit a pytest expression."""
    seen = Outcomes()
    chosen = ["-k", expression] if expression else []
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-qq", "-m", "cuda", "--collect-only", *chosen, TESTS], [seen])
    return seen.collected


def run(command: Sequence[str], tool: str, tests: Sequence[str], jobs: int, seconds: float) -> dict:
    """One tool over all tests: {"rows": one a test, "findings": lines, "logs": ends of those of processes that
    found something or failed, "seconds": it took}.

    Args:
        command: what starts the sanitizer.
        seconds: after which processes are ended.
    """
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        dealt = shares(tests, jobs)
        stems = [Path(folder) / str(i) for i in range(len(dealt))]
        until = time.time() + LAST_BEGIN * seconds
        started = [_start(command, tool, share, stem, until) for share, stem in zip(dealt, stems, strict=True)]
        for process in started:
            _finish(process, begin + seconds)
        logs = [stem.with_suffix(".log").read_text(errors="replace") for stem in stems]
        lines = [line for path in sorted(Path(folder).glob("*.jsonl")) for line in path.read_text().splitlines()]
    found = {row["test"]: row for row in map(json.loads, lines)}
    rows = [found.get(test, {"test": test, "outcome": "not reached"}) for test in tests]
    lost = set().union(*map(untracked, logs, dealt))
    cut = {test for text, share in zip(logs, dealt, strict=True) if " SUMMARY: " not in text for test in share}
    for row in rows:
        if row["outcome"] == "passed" and row["test"] in lost:
            row["outcome"] = "untracked"
        if row["outcome"] == "passed" and row["test"] in cut:
            row["summary"] = False
    said = [line for text in logs for line in findings(text)]
    telling = [text[-3000:] for text in logs if findings(text) or " failed" in text or "Error" in text]
    return {
        "rows": [{"tool": tool, **row} for row in rows],
        "findings": said,
        "logs": telling,
        "seconds": round(time.perf_counter() - begin),
    }


def _start(command: Sequence[str], tool: str, tests: Sequence[str], stem: Path, until: float) -> subprocess.Popen:
    listed = stem.with_suffix(".json")
    listed.write_text(json.dumps(list(tests)))
    own = [sys.executable, "-m", "recipes.measured.sanitize", "--job", str(listed), "--until", str(until)]
    with stem.with_suffix(".log").open("w") as log:
        return subprocess.Popen(
            [*command, "--tool", tool, "--error-exitcode", "9", *own],
            **{"stdout": log, "stderr": log, "cwd": ROOT, "start_new_session": True},
        )


def _finish(process: subprocess.Popen, deadline: float) -> None:
    """Wait for a process; at the deadline end it with what it started."""
    try:
        process.wait(max(0.1, deadline - time.perf_counter()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def job(listed: Path, until: float) -> int:
    """The tests of one process, of which none begins after `until`."""
    plugin = Outcomes(listed.with_suffix(".jsonl"), until)
    return pytest.main(["-v", "--no-header", "-m", "cuda", "-p", "no:xdist", *json.loads(listed.read_text())], [plugin])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build"))
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) * 3 // 4))
    parser.add_argument("--seconds", type=float, default=250, help="of each tool")
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--only", default="", help="a pytest expression, such as 'bfloat16 and not persistent'")
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--name", default="h200", help="prefix of the file")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        sys.exit(job(arguments.job, arguments.until))
    os.chdir(ROOT)
    tests = collect(arguments.only)
    if not tests:
        sys.exit(f"no device test of {TESTS} fits {arguments.only!r}")
    clean = True
    path = arguments.out.resolve() / f"{arguments.name}_sanitizer.json"
    table = Table(path, arguments.commit, family="sanitizer")
    for tool in arguments.tools:
        ran = run([arguments.sanitizer], tool, tests, arguments.jobs, arguments.seconds)
        outcomes = Counter(row["outcome"] for row in ran["rows"])
        table.rows += ran["rows"]
        cut = sum(row.get("summary") is False for row in ran["rows"])
        counted = {key: ran[key] for key in ("findings", "seconds")} | dict(outcomes)
        table.about[tool] = counted | {"without summary": cut}
        table.write()
        said = f"{len(ran['findings'])} lines found, {cut} of the passed without a summary"
        print(f"== {tool}: {dict(outcomes)}, {said}, {ran['seconds']} s", flush=True)
        print("\n".join([*ran["findings"][:60], *ran["logs"][:3]]), flush=True)
        clean = clean and not ran["findings"] and outcomes["passed"] == len(tests) and not cut
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()

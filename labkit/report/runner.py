"""Run notebooks with papermill, one process each: progress, one retry where Jupyter failed, no orphan left."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from nbformat.reader import NotJSONError

from labkit.report import executed, parameters
from labkit.report.ahead import Compilation, loads_model
from labkit.report.outcomes import Failure, Outcome, Progress
from labkit.report.records import Record
from labkit.report.worker import STATIC_VARIABLE

START_TIMEOUT = 60
CELL_TIMEOUT = 1200
# Seconds that a living kernel may take to take a cell up, or to say that a cell has ended.
ANSWER_TIMEOUT = 30
# Failures of Jupyter, not of the notebook: its run is repeated once.
WORTH_A_RETRY = ("start", "lost")
# Seconds that a worker may be silent while no cell runs: between cells, and after the last one.
GRACE = 60


@dataclass
class _Run:
    """A worker in flight."""

    source: Path
    output: Path
    values: dict[str, Any]
    cells: int
    process: subprocess.Popen
    scratch: tempfile.TemporaryDirectory
    reader: threading.Thread
    started: float
    cell_timeout: int
    deadline: float
    retried: bool = False
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    last: dict[str, Any] | None = None
    in_cell: bool = False
    end: dict[str, Any] | None = None


def run(
    notebooks: Sequence[Path],
    output: Path,
    given: Mapping[str, Any] | None = None,
    *,
    jobs: int | None = None,
    cell_timeout: int = CELL_TIMEOUT,
    start_timeout: int = START_TIMEOUT,
    progress: Callable[[Progress], None] = lambda _: None,
) -> list[Outcome]:
    """Execute notebooks and write the executed copies, with provenance and without machine paths, into `output`.

    Args:
        notebooks: .ipynb files; their names must differ.
        output: folder for the executed copies, made if missing. It must not be where the notebooks lie.
        given: parameters by name, for every notebook; checked against each before anything starts.
        jobs: notebooks at a time; the number of cores at most, and by default.
        cell_timeout: seconds that one cell may take.
        start_timeout: seconds that a kernel may take to answer.
        progress: called for every step, from this thread.

    Returns:
        One outcome a notebook, in the order given. A failing notebook does not stop the others. Those that load a model
        start once the native graph is compiled, those that load none meanwhile.

    Raises:
        parameters.ParameterError: an unknown parameter or a value that does not fit; nothing has been started.
        ValueError: two notebooks of one name, or an output folder that would overwrite its source.
        OSError: `output` cannot be written; nothing has been started.
    """
    checked = {path: parameters.check(path, given or {}) for path in notebooks}
    if len({path.name for path in notebooks}) < len(notebooks):
        raise ValueError("two of the notebooks have the same file name: one copy would overwrite the other")
    output.mkdir(parents=True, exist_ok=True)
    try_to_write(output)
    if any(path.resolve().parent == output.resolve() for path in notebooks):
        raise ValueError(f"the output folder {output} holds the notebooks themselves: choose another")
    cores = os.cpu_count() or 1
    limit = max(1, min(jobs or cores, cores))
    waiting, running, outcomes = list(notebooks), {}, {}
    events: queue.Queue = queue.Queue()
    timeouts = {"cell_timeout": cell_timeout, "start_timeout": start_timeout, "answer_timeout": ANSWER_TIMEOUT}
    graph = Compilation(notebooks, lambda step, text: progress(Progress("native graph", step, text=text)))
    try:
        while waiting or running:
            while len(running) + (busy := graph.busy) < limit:
                path = next((path for path in waiting if not (busy and loads_model(path))), None)
                if path is None:
                    break
                waiting.remove(path)
                running[path] = _start(path, output / path.name, checked[path], timeouts, events)
                progress(Progress(path.name, "start", cells=running[path].cells))
            _pump(events, running, progress)
            for path, one in list(running.items()):
                _watch(one)
                if one.process.poll() is None and time.monotonic() < one.deadline:
                    continue
                if one.process.poll() is None:
                    _give_up(one)
                # The worker has ended, but what it said last may still lie in its pipe.
                one.reader.join(GRACE)
                _pump(events, running, progress, wait=0)
                _sweep(one)
                del running[path]
                if one.end and one.end.get("kind") in WORTH_A_RETRY and not one.retried:
                    progress(Progress(path.name, "retry", text=_failure(one).describe(path.name)))
                    one.scratch.cleanup()
                    running[path] = _start(path, one.output, one.values, timeouts, events, retried=True)
                    continue
                outcomes[path] = _conclude(one, given or {})
                failure = outcomes[path].failure
                text = failure.describe(path.name) if failure else f"{outcomes[path].seconds:.1f} s"
                progress(Progress(path.name, "failed" if failure else "done", text=text))
    finally:
        # Reached with workers alive only when something raised here, such as Ctrl-C.
        graph.end()
        for one in running.values():
            _watch(one)
            one.process.kill()
            _sweep(one)
    return [outcomes[path] for path in notebooks]


def try_to_write(folder: Path) -> None:
    """Raise OSError if nothing can be written in `folder`: minutes before the first notebook is done."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from None


def _start(source: Path, output: Path, values: dict, timeouts: dict, events: queue.Queue, retried=False) -> _Run:
    # A folder of its own for each: no history, profile or connection file of the user is read, written or left behind.
    scratch = tempfile.TemporaryDirectory(prefix="labkit-", ignore_cleanup_errors=True)
    here = Path(scratch.name)
    environment = os.environ | {
        "IPYTHONDIR": str(here / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(here / "runtime"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        # Its remarks on a config it does not know whole would stand in the page as warnings.
        "TRANSFORMERS_VERBOSITY": "error",
        STATIC_VARIABLE: "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit.report.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=(here / "stderr").open("wb"),
        text=True,
        encoding="utf-8",
        env=environment,
        # A session of its own: Ctrl-C reaches this process alone, which then ends the workers in order.
        start_new_session=True,
    )
    job = {
        "source": str(source.resolve()),
        "output": str(output.resolve()),
        "parameters": values,
        "cwd": os.getcwd(),
        "sockets": str(here / "kernel"),
        **timeouts,
    }
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    now = time.monotonic()
    run = _Run(
        source=source,
        output=output,
        values=values,
        cells=executed.count_code_cells(source),
        process=process,
        scratch=scratch,
        reader=threading.Thread(target=lambda: _read(run, events), daemon=True),
        started=now,
        cell_timeout=timeouts["cell_timeout"],
        deadline=now + timeouts["start_timeout"] + GRACE,
        retried=retried,
    )
    run.reader.start()
    return run


def _read(one: _Run, events: queue.Queue) -> None:
    for line in one.process.stdout:
        events.put((one, json.loads(line)))


def _pump(events: queue.Queue, running: dict, progress: Callable[[Progress], None], wait: float = 0.2) -> None:
    while True:
        try:
            one, event = events.get(timeout=wait) if wait else events.get_nowait()
        except queue.Empty:
            return
        wait = 0
        one.in_cell = event["event"] == "cell"
        one.deadline = time.monotonic() + GRACE + (one.cell_timeout if one.in_cell else 0)
        if event["event"] == "executed":
            continue
        if one.in_cell:
            one.last = event
            # papermill puts one cell more in front of the others when parameters are given.
            cells = one.cells + bool(one.values)
            progress(Progress(one.source.name, "cell", event["number"], cells, event["line"]))
        else:
            one.end = event


def _watch(one: _Run) -> None:
    """Remember every process below the worker: once it is gone they cannot be found by their parent any more."""
    try:
        for child in psutil.Process(one.process.pid).children(recursive=True):
            one.seen.setdefault(child.pid, child)
    except psutil.NoSuchProcess:
        return


def _give_up(one: _Run) -> None:
    """End a worker that is silent where it should not be; a cell that may be what holds it up is not run again."""
    if one.last is None:
        kind, message = "start", "the kernel never answered"
    else:
        kind, message = "other" if one.in_cell else "lost", "the kernel stopped answering"
    one.end = {"event": "failed", "kind": kind, "message": message, "detail": "", "cell": one.last}
    one.process.kill()


def _sweep(one: _Run) -> None:
    """End whatever the worker left, and its scratch folder."""
    for child in one.seen.values():
        # A psutil.Process knows when it was created, so a new process that got the same id is left alone.
        if child.is_running():
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
    psutil.wait_procs(list(one.seen.values()), timeout=5)
    one.process.wait()
    for stream in (one.process.stdin, one.process.stdout):
        stream.close()


def _conclude(one: _Run, given: Mapping[str, Any]) -> Outcome:
    seconds = time.monotonic() - one.started
    failure = None
    if one.end is None or one.end["event"] != "done":
        failure = _failure(one)
    records: tuple[Record, ...] = ()
    work_seconds: tuple[float, ...] = ()
    if one.output.is_file():
        try:
            records = executed.finish(one.output, one.values, failed=failure is not None)
            work_seconds = executed.work_seconds(one.output)
        except executed.BadOutput as error:
            failure = failure or Failure("records", str(error), error.cell, error.line)
            work_seconds = executed.work_seconds(one.output)
        except NotJSONError:
            # The disk did not take the whole of it; where the worker lived to say so, that is the failure.
            failure = failure or Failure("other", f"{one.output} was not written whole")
    one.scratch.cleanup()
    cells = one.last["number"] if one.last else 0
    return Outcome(one.source, one.output, seconds, cells, one.retried, failure, records, work_seconds)


def _failure(one: _Run) -> Failure:
    cell = (one.end or {}).get("cell") or one.last or {}
    where = {"cell": cell.get("number"), "line": cell.get("line", "")}
    if one.end is None:
        text = (Path(one.scratch.name) / "stderr").read_text(encoding="utf-8", errors="replace").strip()
        tail = text.splitlines()[-1] if text else "nothing on its standard error"
        return Failure("other", f"the worker process ended with code {one.process.returncode} ({tail})", **where)
    detail = executed.without_colours(one.end["detail"])
    return Failure(one.end["kind"], executed.without_colours(one.end["message"]), detail=detail, **where)

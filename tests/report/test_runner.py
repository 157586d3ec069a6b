"""Running notebooks: every way to fail ends soon, says where, and leaves no process behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

from labkit.report import runner
from labkit.report.outcomes import Outcome, Progress
from labkit.report.parameters import ParameterError


def family() -> set[int]:
    """Every process below this one, but the browser's: they come and go as they like."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since it was listed
            if child.status() != psutil.STATUS_ZOMBIE and "chrom" not in child.name():
                found.add(child.pid)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, write_notebook) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("notebooks")
    show = "from labkit.report import record\nrecord('result', basis='counted', steps=steps, quick=quick)"
    where = "import labkit, sys\nprint(labkit.__file__)\nprint(sys.prefix)"
    notebooks = [
        write_notebook(folder / "good.ipynb", where, show, ("1 / 0", ["raises-exception"]), "print(name)"),
        write_notebook(folder / "raises.ipynb", "x = 1", "# a comment\nx / 0", "never = 1"),
        write_notebook(
            folder / "killed.ipynb",
            "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        ),
        write_notebook(folder / "silent.ipynb", ("x = 1", ["raises-exception"])),
    ]
    before = family()
    done = runner.run(notebooks, folder / "out", {"steps": "7"})
    assert family() <= before
    # Each kernel has sockets of its own: shared ones would let one kernel answer for another.
    assert not any(outcome.retried for outcome in done)
    assert not list(Path.cwd().glob("*-ipc*"))
    return {outcome.notebook.stem: outcome for outcome in done}


def test_a_good_notebook_passes_with_parameters_and_records(outcomes: dict[str, Outcome]) -> None:
    good = outcomes["good"]
    assert good.passed, good.failure
    assert [(r.name, r.basis, r.values) for r in good.records] == [("result", "counted", {"steps": 7, "quick": True})]
    assert good.cells == 6  # four, the parameters, and the cell that papermill puts behind them


def test_its_copy_carries_provenance_and_no_path_of_this_machine(outcomes: dict[str, Outcome]) -> None:
    text = outcomes["good"].output.read_text()
    about = json.loads(text)["metadata"]["labkit"]
    assert about["parameters"] == {"steps": 7}
    assert about["device"]["kind"] in ("cpu", "cuda", "metal")
    assert about["failed"] is False
    for folder in (str(Path.cwd()), str(Path.home()), sys.prefix, "papermill"):
        assert folder not in text.replace('"papermill": "', "")
    assert "./labkit/__init__.py" in text or "<python>" in text


def test_warning_cells_of_papermill_are_gone_where_the_error_was_expected(outcomes: dict[str, Outcome]) -> None:
    book = nbformat.read(outcomes["good"].output, 4)
    assert not [cell for cell in book.cells if "papermill-error" in str(cell.metadata) or "exception" in cell.source]
    assert any(output.output_type == "error" for cell in book.cells for output in cell.get("outputs", ()))


def test_a_raising_cell_fails_and_is_named(outcomes: dict[str, Outcome]) -> None:
    failure = outcomes["raises"].failure
    assert failure.kind == "cell"
    assert failure.describe("raises.ipynb") == "raises.ipynb, In [4] (# a comment): ZeroDivisionError: division by zero"
    assert "----> 2 x / 0" in failure.detail
    assert "\x1b" not in failure.detail


def test_a_copy_that_the_disk_does_not_take_is_that_notebooks_failure_alone(tmp_path: Path, write_notebook) -> None:
    """A limit on files' sizes stands for a full disk: the copy on it ends in the middle of a line."""
    long = write_notebook(tmp_path / "long.ipynb", "print('x' * 200_000)")
    short = write_notebook(tmp_path / "short.ipynb", "print('x')")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, limits[1]))
    try:
        failed, passed = runner.run([long, short], tmp_path / "out", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in failed.failure.describe("long.ipynb")
    assert passed.passed


def test_a_killed_kernel_is_an_error_that_names_its_cell(outcomes: dict[str, Outcome]) -> None:
    """It is found dead: had it been waited for, it would be a "timeout", or "lost" and run again."""
    killed = outcomes["killed"]
    assert killed.failure.kind == "dead"
    assert killed.failure.cell == 4
    assert killed.failure.line == "import os, signal"
    assert not killed.retried


def test_a_killed_kernel_is_missed_within_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds slept until Jupyter's client asks whether its kernel lives, which no load of this machine makes more."""
    from nbclient import client

    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def dead() -> None:
        raise client.DeadKernelError("killed")

    one = client.NotebookClient(nbformat.v4.new_notebook())
    monkeypatch.setattr(client.asyncio, "sleep", sleep)
    monkeypatch.setattr(one, "_async_check_alive", dead)

    async def until_missed() -> None:
        one.task_poll_for_reply = asyncio.get_running_loop().create_future()
        await one._async_poll_kernel_alive()
        assert one.task_poll_for_reply.cancelled(), "the cell's reply is not waited for any longer"

    asyncio.run(until_missed())
    assert 0 < sum(slept) < 30


def test_an_expected_error_that_stays_away_is_a_failure(outcomes: dict[str, Outcome]) -> None:
    failure = outcomes["silent"].failure
    assert failure.kind == "records"
    assert "raised nothing" in failure.message


def test_parameters_are_checked_before_anything_starts(tmp_path: Path, write_notebook) -> None:
    path = write_notebook(tmp_path / "n.ipynb", "x = 1")
    before = family()
    with pytest.raises(ParameterError, match="'stepps'"):
        runner.run([path], tmp_path / "out", {"stepps": "1"})
    assert family() <= before
    assert not (tmp_path / "out").exists()


def test_the_sources_are_never_overwritten(tmp_path: Path, write_notebook) -> None:
    path = write_notebook(tmp_path / "n.ipynb", "x = 1")
    with pytest.raises(ValueError, match="holds the notebooks themselves"):
        runner.run([path], tmp_path)
    twin = write_notebook(tmp_path / "elsewhere.ipynb", "x = 1").rename(tmp_path / "twin.ipynb")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match="same file name"):
        runner.run([twin, write_notebook(other / "twin.ipynb", "x = 1")], tmp_path / "out")


def test_a_cell_that_never_ends_is_stopped(tmp_path: Path, write_notebook) -> None:
    path = write_notebook(tmp_path / "n.ipynb", "import time\ntime.sleep(300)")
    before = family()
    (outcome,) = runner.run([path], tmp_path / "out", cell_timeout=2)
    assert outcome.failure.kind == "timeout"
    assert "longer than 2 s" in outcome.failure.message
    assert family() <= before


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[list[dict]]:
    """What the next workers say, one list of events each, instead of what real ones would."""
    real, left = subprocess.Popen, []

    def popen(command, **kwargs):
        assert command[-1] == "labkit.report.worker"
        lines = "".join(json.dumps(event) + "\n" for event in left.pop(0))
        return real([sys.executable, "-c", f"input(); print({lines!r}, end='')"], **kwargs)

    monkeypatch.setattr(runner.subprocess, "Popen", popen)
    return left


CELL = {"event": "cell", "number": 1, "index": 1, "line": "x = 1"}
NO_START = [{"event": "failed", "kind": "start", "message": "no answer", "detail": "", "cell": None}]
LOST = [CELL, {"event": "failed", "kind": "lost", "message": "its reply never came", "detail": "", "cell": CELL}]
WHERE = {"start": "n.ipynb: no answer", "lost": "n.ipynb, In [1] (x = 1): its reply never came"}


@pytest.mark.parametrize("first", [NO_START, LOST], ids=["no start", "a lost message"])
def test_a_failure_of_jupyter_is_tried_once_more(first, tmp_path: Path, write_notebook, workers: list) -> None:
    path = write_notebook(tmp_path / "n.ipynb", "x = 1")
    workers += [first, [CELL, {"event": "executed", "index": 1}, {"event": "done"}]]
    steps: list[Progress] = []
    (outcome,) = runner.run([path], tmp_path / "out", progress=steps.append)
    assert outcome.passed
    assert outcome.retried
    retry = [step for step in steps if step.step == "retry"]
    assert [step.text for step in retry] == [WHERE[first[-1]["kind"]]]
    assert steps[-1].step == "done"


@pytest.mark.parametrize("always", [NO_START, LOST], ids=["no start", "a lost message"])
def test_the_second_time_it_is_an_error(always, tmp_path: Path, write_notebook, workers: list) -> None:
    path = write_notebook(tmp_path / "n.ipynb", "x = 1")
    workers += [always, always]
    (outcome,) = runner.run([path], tmp_path / "out")
    assert outcome.failure.kind == always[-1]["kind"]
    assert outcome.retried
    assert outcome.failure.describe("n.ipynb") == WHERE[outcome.failure.kind]


def test_what_a_worker_said_last_is_heard_after_its_end(tmp_path, write_notebook, workers, monkeypatch) -> None:
    real = runner._read

    def late(one: runner._Run, events: Any) -> None:
        one.process.wait()
        time.sleep(1)
        real(one, events)

    monkeypatch.setattr(runner, "_read", late)
    workers.append([CELL, {"event": "executed", "index": 1}, {"event": "done"}])
    (outcome,) = runner.run([write_notebook(tmp_path / "n.ipynb", "x = 1")], tmp_path / "out")
    assert outcome.passed, outcome.failure


def test_a_failure_of_the_notebook_is_not_tried_again(tmp_path: Path, write_notebook, workers: list) -> None:
    path = write_notebook(tmp_path / "n.ipynb", "x = 1")
    workers.append([CELL, {"event": "failed", "kind": "dead", "message": "it died", "detail": "", "cell": CELL}])
    (outcome,) = runner.run([path], tmp_path / "out")
    assert (outcome.failure.kind, outcome.retried) == ("dead", False)


def test_a_run_whose_every_wake_up_is_lost_ends_as_any_other(tmp_path: Path, write_notebook, monkeypatch) -> None:
    """The loop is never told of a message: whatever swallows a wake-up, this is the worst of it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'labkit.report.worker' in sys.orig_argv:\n"
        "    import zmq.asyncio\n"
        "    zmq.asyncio.Socket._handle_events = lambda *_: None\n"
        f"    open({str(tmp_path / 'deaf')!r}, 'w').close()\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    into_widget = "from ipywidgets import interactive\npanel = interactive(lambda n: print('n is', n), n=(1, 9))"
    path = write_notebook(tmp_path / "n.ipynb", into_widget, "print('after', panel.result, panel.out.outputs)")
    (outcome,) = runner.run([path], tmp_path / "out")
    assert (tmp_path / "deaf").exists()
    assert outcome.passed, outcome.failure
    assert not outcome.retried
    book = nbformat.read(outcome.output, 4)
    assert "n is 5" in book.cells[-1].outputs[0].text


@pytest.mark.parametrize(
    ("events", "kind", "retried"),
    [([], "start", True), ([CELL], "other", False), ([CELL, {"event": "executed", "index": 1}], "lost", True)],
    ids=["before the first cell", "in a cell", "after the last cell"],
)
def test_a_worker_that_falls_silent_is_given_up(events, kind, retried, tmp_path, write_notebook, monkeypatch) -> None:
    path = write_notebook(tmp_path / "n.ipynb", "x = 1")
    lines = "".join(json.dumps(event) + "\n" for event in events)
    real = subprocess.Popen
    mute = f"import sys, time; print({lines!r}, end='', flush=True); time.sleep(300)"
    monkeypatch.setattr(runner.subprocess, "Popen", lambda command, **kw: real([sys.executable, "-c", mute], **kw))
    monkeypatch.setattr(runner, "GRACE", 1)
    before = family()
    # A worker that says something has time for it, however slowly it starts; the patience for a start ends with it.
    (outcome,) = runner.run([path], tmp_path / "out", start_timeout=600 if events else 0, cell_timeout=0)
    assert (outcome.failure.kind, outcome.failure.cell) == (kind, 1 if events else None)
    assert "answer" in outcome.failure.message
    assert outcome.retried is retried
    assert family() <= before


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_when_the_command_ends_early_its_kernels_end_too(end: signal.Signals, tmp_path: Path, write_notebook) -> None:
    mark = tmp_path / "pid"
    path = write_notebook(
        tmp_path / "n.ipynb", f"import os, time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)"
    )
    run = "import sys; from labkit.report.commands import report; import typer; typer.run(report)"
    command = [sys.executable, "-c", run, str(path), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
        # A test run started in the background ignores SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (mark.exists() and mark.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    kernel = psutil.Process(int(mark.read_text()))
    process.send_signal(end)
    _, errors = process.communicate(timeout=600)
    assert not [left for left in psutil.wait_procs([kernel], timeout=600)[1] if left.status() != "zombie"]
    if end == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted: every notebook was stopped" in errors
        assert "Traceback" not in errors

"""Every committed notebook keeps the rules, refuses foreign parameters, and gives its stored outputs when run anew."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.report import guards, parameters
from labkit.resources import notebooks_folder

NOTEBOOKS = sorted(notebooks_folder().glob("*.ipynb"))
SANITIZE = Path(__file__).with_name("sanitize.cfg")

# Seconds of processors, not of a clock: a loaded machine changes them little. Several times what the slowest notebook
# takes with its imports, and room for compiling what a fresh machine has not compiled yet.
MOST_CPU_SECONDS = 240

by_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
    assert all(path.stem[:2].isdigit() for path in NOTEBOOKS)


@by_notebook
def test_keeps_every_rule(notebook: Path) -> None:
    assert guards.check(notebook) == []


@by_notebook
def test_refuses_an_unknown_parameter(notebook: Path) -> None:
    with pytest.raises(parameters.ParameterError, match="has no parameter 'no_such_thing'"):
        parameters.check(notebook, {"no_such_thing": "1"})


@by_notebook
def test_outputs_are_what_it_prints_when_run_anew(notebook: Path, tmp_path: Path) -> None:
    """Strict nbval: each cell's outputs are compared, unless the cell is tagged nbval-ignore-output."""
    command = [sys.executable, "-m", "pytest", "-p", "nbval.plugin", "--nbval", "--nbval-current-env"]
    # Less than this test may take: nbval then says which cell it was.
    command += ["--nbval-sanitize-with", str(SANITIZE), "--nbval-cell-timeout", "200", "-q", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(notebook.parent), str(notebook)]
    environment = os.environ | {"IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path), "LABKIT_STATIC": "1"}
    # Other plugins have nothing to do here, and take longer to import than some notebooks to run.
    environment |= {"TRANSFORMERS_VERBOSITY": "error", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    before = _cpu_seconds_of_children()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=notebook.parent.parent)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    taken = _cpu_seconds_of_children() - before
    assert taken < MOST_CPU_SECONDS, (
        f"{notebook.name} takes {taken:.0f} s of processors: quick mode is for 10 s of work"
    )


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

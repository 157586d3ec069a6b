"""The native graph is compiled beside the notebooks that load no model; those that load one start after it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.report import ahead, runner
from labkit.resources import notebooks_folder


@pytest.fixture
def notebooks(tmp_path: Path, write_notebook) -> list[Path]:
    return [
        write_notebook(tmp_path / "model.ipynb", "import labkit\nloaded = labkit.load('tiny-hybrid')"),
        write_notebook(tmp_path / "plain.ipynb", "x = 1"),
    ]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "this_device", lambda: SimpleNamespace(kind="cpu"))


def until_it_ends(notebooks: list[Path]) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    graph = ahead.Compilation(notebooks, lambda *step: told.append(step))
    while graph.busy:
        time.sleep(0.01)
    return told


@pytest.mark.parametrize(("module", "step", "text"), [("this", "done", " s"), ("nowhere", "failed", "nowhere")])
def test_its_start_and_end_are_told(notebooks, monkeypatch, module: str, step: str, text: str) -> None:
    monkeypatch.setattr(ahead, "MODULE", module)
    (start, _), (end, said) = until_it_ends(notebooks)
    assert (start, end) == ("start", step)
    assert text in said


def test_nothing_is_compiled_where_nobody_needs_it(notebooks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not until_it_ends(notebooks[1:])
    monkeypatch.setattr(ahead, "this_device", lambda: SimpleNamespace(kind="cuda"))
    assert not until_it_ends(notebooks)


def test_one_that_goes_on_is_ended(notebooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "goes_on.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ahead, "MODULE", "goes_on")
    graph = ahead.Compilation(notebooks, lambda *step: None)
    process = graph._process
    assert graph.busy
    graph.end()
    assert process.returncode
    assert not graph.busy


def test_every_committed_notebook_whose_model_it_computes_waits() -> None:
    waits = {path.stem[:2] for path in notebooks_folder().glob("*.ipynb") if ahead.loads_model(path)}
    assert {"02", "13", "25", "32"} <= waits  # by a name, a subject, an invariant mode, a small random model
    assert not {"04", "34"} & waits  # kernels alone; mlx-lm's module alone


class Started(Exception):
    """Enough was seen."""


@pytest.mark.parametrize(("busy", "first"), [(True, "plain"), (False, "model")])
def test_who_loads_a_model_starts_after_it(notebooks, tmp_path, monkeypatch, busy: bool, first: str) -> None:
    def start(source: Path, *arguments, **options):
        raise Started(source.stem)

    monkeypatch.setattr(runner, "Compilation", lambda *_: SimpleNamespace(busy=busy, end=lambda: None))
    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner.os, "cpu_count", lambda: 2)
    with pytest.raises(Started, match=first):
        runner.run(notebooks, tmp_path / "out")

"""Adopting new weights: what it names exists, and what stands in its way is said before anything changes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.tiny_hybrid import adopt

CLONE = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("step", adopt.steps(Path("run"), Path("work")), ids=lambda step: step.name)
def test_every_step_runs_a_module_that_exists_with_options_that_it_takes(step, monkeypatch, capsys):
    """The help of each recipe names every option that the step gives it."""
    for module, *rest in step.modules:
        assert importlib.util.find_spec(module), module
        if step.torch or not module.startswith("recipes."):
            continue
        command = rest[:1] if rest[0] in ("logits", "compare") else []
        monkeypatch.setattr(sys, "argv", [module, *command, "--help"])
        with pytest.raises(SystemExit):
            importlib.import_module(module).main()
        shown = capsys.readouterr().out
        for option in (word for word in rest if word.startswith("--")):
            assert option in shown, f"{module} {option}"


def test_all_that_depends_on_the_weights_is_found():
    notebooks = {path.name for path in adopt.depending("notebooks", "*.ipynb")}
    assert "02_teacher_forced_parity.ipynb" in notebooks
    assert "04_decode_attention.ipynb" not in notebooks  # kernels alone
    tests = {path.name for path in adopt.depending("tests", "test_*.py")}
    assert {"test_tiny_hybrid.py", "test_torch_goldens.py", "test_shipped_model.py"} <= tests


def adopting(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "recipes.tiny_hybrid.adopt", *words], cwd=CLONE, capture_output=True, text=True
    )


def test_a_folder_without_a_run_is_refused(tmp_path):
    found = adopting(str(tmp_path), "--work", str(tmp_path / "work"))
    assert found.returncode == 2
    assert "train first" in found.stderr
    assert not (tmp_path / "work").exists()


def test_a_step_that_does_not_exist_is_refused(tmp_path):
    found = adopting(str(tmp_path), "--from", "polish", "--work", str(tmp_path / "work"))
    assert found.returncode == 2
    assert "--from takes one of quantise, export, verify, card" in found.stderr


@pytest.mark.parametrize("changed", [True, False])
def test_changes_that_would_be_lost_are_refused(changed, tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "ROOT", tmp_path / "clone")
    (tmp_path / "clone" / "notebooks").mkdir(parents=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], cwd=adopt.ROOT, check=True)
    (adopt.ROOT / "notebooks" / "01.ipynb").write_text("{}")
    subprocess.run([*git, "add", "."], cwd=adopt.ROOT, check=True)
    subprocess.run([*git, "commit", "-qm", "one"], cwd=adopt.ROOT, check=True)
    if changed:
        (adopt.ROOT / "notebooks" / "01.ipynb").write_text("{ }")
    run = tmp_path / "run"
    run.mkdir()
    import mlx.core as mx

    said = {"step": "1", "parts": "1"}
    mx.save_safetensors(str(run / "weights-00.safetensors"), {"a": mx.ones(1)}, metadata=said)
    (run / "training.json").write_text("{}")
    assert "corpora.json" in adopt.check(run, sys.executable)
    (run / "corpora.json").write_text("{}")
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/sh\nexit 0\n")
    stand_in.chmod(0o755)
    assert "has no torch" in adopt.check(run, "false")
    found = adopt.check(run, str(stand_in))
    assert ("01.ipynb" in found) if changed else found is None

"""`labkit parity`: what it prints, what it refuses, and the exit codes that scripts rely on."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import labkit
from labkit.parity import commands
from labkit.parity.commands import DEFECT, MISUSE
from labkit.parity.fingerprints import trunk_fingerprint
from labkit.parity.forms import Form
from labkit.parity.goldens import write_golden
from labkit.parity.mutations import mutation
from labkit.parity.sides import MlxLmSide
from labkit.parity.windows import windows_of

app = typer.Typer()
app.command()(commands.parity)


def _run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "reference.txt"
    file.write_text("In the beginning was the word, and then another one, and so on. " * 4)
    return file


@pytest.fixture(scope="module")
def golden(tmp_path_factory, speaking_probe, text):
    """What the broken probe says: a golden that a correct engine must differ from, and one that it must meet."""
    loaded = labkit.load(speaking_probe)
    windows = windows_of(loaded.tokenizer.encode(text.read_text()), 60, 40)
    folder = tmp_path_factory.mktemp("goldens")
    known = {"fingerprint": trunk_fingerprint(loaded.path), "model": "probe", "versions": {}}
    model = MlxLmSide.open(speaking_probe, dtype="float32").model
    write_golden(folder / "right.safetensors", MlxLmSide(model, Form.incremental(30)), windows, **known)
    with mutation("permuted head")(model):
        write_golden(folder / "wrong.safetensors", MlxLmSide(model), windows, **known)
    return folder


@pytest.mark.parametrize(("graph", "difference"), [("adapter", 0.0), ("auto", 5e-4)])
def test_agreement_is_exit_code_0_and_one_json_object(speaking_probe, text, graph, difference):
    result = _run(speaking_probe, "--text", text, "--positions", 50, "--window", 30, "--graph", graph, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["verdict"], record["positions"], record["windows"]) == ("agrees", 50, 2)
    assert record["candidate"]["name"] == "labkit"
    assert record["reference"]["name"] == "mlx-lm"
    assert record["candidate"]["form"] == "whole sequence"
    assert record["max_logit_difference"] <= difference


def test_single_steps(speaking_probe, text):
    result = _run(speaking_probe, "--text", text, "--positions", 30, "--form", "incremental", "--prefill", 20, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["candidate"]["form"] == "prefill 20, then single steps"


def test_a_golden_decides_windows_and_form(speaking_probe, golden):
    result = _run(speaking_probe, "--against", golden / "right.safetensors", "--positions", 60, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["windows"] == 2
    assert record["candidate"]["form"] == record["reference"]["form"] == "prefill 30, then single steps"
    assert record["tolerance"]["max_logit_difference"] == 5e-4


@pytest.mark.parametrize("candidate", ["labkit", "mlx-lm"])
def test_a_defect_is_exit_code_1_with_its_reasons(speaking_probe, golden, candidate):
    result = _run(
        speaking_probe, "--against", golden / "wrong.safetensors", "--positions", 30, "--candidate", candidate
    )
    assert result.exit_code == DEFECT
    assert "beyond a near tie" in result.stderr
    assert "max logit difference" in result.stderr
    assert "same top-1 token" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "no-such-oracle"], "give a file, or one of: probe/torch-incremental, probe/torch-whole"),
        (["--against", "tiny-hybrid/torch-whole"], "made from other weights"),
        (["--positions", "100000"], "100000 predictions need 100001 tokens"),
    ],
)
def test_what_cannot_be_compared_is_exit_code_2(speaking_probe, text, arguments, message):
    result = _run(speaking_probe, "--text", text, *arguments)
    assert result.exit_code == MISUSE
    assert message in result.stderr


def test_a_text_that_is_none_is_named(speaking_probe, tmp_path):
    (tmp_path / "bytes").write_bytes(b"a\xff")
    result = _run(speaking_probe, "--text", tmp_path / "bytes")
    assert result.exit_code == MISUSE
    assert f"{tmp_path / 'bytes'} is no text in UTF-8 (invalid start byte at byte 1)" in result.stderr


def test_a_golden_takes_no_other_text(speaking_probe, text, golden):
    result = _run(speaking_probe, "--text", text, "--against", golden / "right.safetensors")
    assert result.exit_code == MISUSE
    assert "only about its own text" in result.stderr


def test_an_unknown_model_is_exit_code_2():
    result = _run("tiny-hybird", "--positions", 3)
    assert result.exit_code == MISUSE
    assert "tiny-hybrid" in result.stderr


def test_a_missing_torch_says_what_to_do(speaking_probe, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    result = _run(speaking_probe, "--against", "torch")
    assert result.exit_code == MISUSE
    assert "pip install torch" in result.stderr
    assert "golden" in result.stderr


def test_torch_itself_where_it_is_installed(speaking_probe, text):
    pytest.importorskip("torch", reason="torch is not installed: the goldens stand in for it")
    result = _run(speaking_probe, "--text", text, "--against", "torch", "--positions", 60, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert 0 < record["max_logit_difference"] < 5e-4


def test_the_held_out_texts_are_the_default(speaking_probe):
    loaded = labkit.load(speaking_probe, graph="adapter")
    windows = commands._windows(loaded, MlxLmSide(loaded.model.module), None, 100, 16)
    assert sum(len(window) - 1 for window in windows) == 100
    assert len({window.tobytes() for window in windows}) == len(windows)
    assert all(np.all(window < 256) for window in windows)

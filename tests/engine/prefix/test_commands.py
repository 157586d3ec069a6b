"""`labkit generate --prefix-store` and `labkit cache --prefix-store`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from tests.tiny_models import write_checkpoint

PROMPT = "a prompt of some length that is said more than once"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model") / "hybrid", "hybrid"))


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def generate(model: str, store, *more: str):
    options = ("--raw", "--max-tokens", "4", "--seed", "1", "--prefix-store", str(store), "--prefix-width", "16")
    return run("generate", model, PROMPT, *options, *more)


def test_the_second_answer_is_the_first_and_reads_what_it_left(model, tmp_path):
    first = json.loads(generate(model, tmp_path / "store", "--json").stdout)
    second = json.loads(generate(model, tmp_path / "store", "--json").stdout)
    plain = json.loads(run("generate", model, PROMPT, "--raw", "--max-tokens", "4", "--seed", "1", "--json").stdout)
    assert first["tokens"] == second["tokens"] == plain["tokens"]
    assert [answer["usage"]["cached_tokens"] for answer in (first, second, plain)] == [0, 48, 0]
    assert "48 of them stored" in generate(model, tmp_path / "store").stderr


def test_a_store_is_listed_and_cleared(model, tmp_path):
    store = tmp_path / "store"
    generate(model, store)
    listed = json.loads(run("cache", "list", "--prefix-store", str(store), "--json").stdout)
    assert [(entry["columns"], entry["state"]) for entry in listed["chains"].values()] == [(3, 3)]
    assert "blocks" in run("cache", "list", "--prefix-store", str(store)).stdout
    removed = json.loads(run("cache", "clear", "--prefix-store", str(store), "--json").stdout)["removed"]
    assert removed["files"] == 6
    assert removed["bytes"] > 0
    assert json.loads(run("cache", "list", "--prefix-store", str(store), "--json").stdout)["chains"] == {}
    assert json.loads(generate(model, store, "--json").stdout)["usage"]["cached_tokens"] == 0


def test_what_is_no_store_is_refused_and_left_alone(model, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    for command in (("cache", "clear"), ("cache", "list")):
        result = run(*command, "--prefix-store", str(tmp_path))
        assert result.exit_code == 2
        assert "no prefix store" in result.stderr.replace("\n", " ")
    result = generate(model, tmp_path)
    assert result.exit_code == 2
    assert "thesis.tex" in result.stderr
    assert (tmp_path / "thesis.tex").read_text() == "x"


def test_options_that_do_not_fit_together_are_refused(model, tmp_path):
    folder = tmp_path / "store"
    result = run("cache", "clear", "models", "--prefix-store", str(folder))
    assert (result.exit_code, "no kinds" in result.stderr) == (2, True)
    result = run("generate", model, "x", "--prefix-width", "16")
    assert (result.exit_code, "--prefix-store" in result.stderr) == (2, True)
    result = run("generate", model, "x", "--prefix-store", str(folder), "--prefix-width", "1")
    assert (result.exit_code, "width" in result.stderr) == (2, True)


def test_a_model_whose_caches_are_no_bytes_is_told_so(tmp_path):
    folder = write_checkpoint(tmp_path / "mamba", "mamba")
    result = run("generate", str(folder), "x", "--raw", "--prefix-store", str(tmp_path / "store"))
    assert result.exit_code == 2
    assert "prefix store" in result.stderr.replace("\n", " ")

"""`labkit generate`: pipes, JSON, Ctrl-C, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import labkit
from labkit.engine.commands import generate
from tests.tiny_models import write_checkpoint

PROCESS = [sys.executable, "-c", "import typer; from labkit.engine.commands import generate; typer.run(generate)"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "llama", "llama")


def run(*arguments: str, **options):
    app = typer.Typer()
    app.command()(generate)
    return CliRunner().invoke(app, list(arguments), **options)


def test_text_goes_to_standard_output_and_the_rest_to_standard_error(folder):
    result = run(str(folder), "hello", "--max-tokens", "12", "--seed", "3")
    assert result.exit_code == 0, result.stderr
    wanted = labkit.Engine(labkit.load(folder)).generate([{"role": "user", "content": "hello"}], max_tokens=12)
    assert result.stdout.rstrip("\n") == wanted.text.rstrip("\n")
    assert "seed 3" in result.stderr
    assert "ended by length" in result.stderr.replace("\n", " ")


def test_json_and_raw_and_sampling(folder):
    arguments = (str(folder), "-", "--raw", "--json", "--max-tokens", "9", "--temperature", "1", "--seed", "5")
    record = json.loads(run(*arguments, input="continue me").stdout)
    wanted = labkit.Engine(labkit.load(folder)).generate("continue me", max_tokens=9, temperature=1.0, seed=5)
    assert record["text"] == wanted.text
    assert record["tokens"] == list(wanted.tokens)
    assert (record["finish_reason"], record["seed"]) == (wanted.finish_reason, 5)
    assert record["usage"]["prompt_tokens"] == len("continue me")


def test_thinking_and_system_reach_the_template(folder):
    record = json.loads(run(str(folder), "hi", "--json", "--max-tokens", "1", "--no-thinking", "--system", "S").stdout)
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    wanted = labkit.load(folder).tokenizer.render_chat(said, thinking=False)
    assert record["usage"]["prompt_tokens"] == len(wanted.tokens)


def test_ctrl_c_stops_cleanly_with_the_text_so_far(folder, monkeypatch):
    step, steps = labkit.Engine.step, []

    def interrupted(self):
        steps.append(1)
        if len(steps) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(labkit.Engine, "step", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    result = run(str(folder), "hello", "--json", "--max-tokens", "4000", "--raw")
    assert result.exit_code == 130, result.stderr
    record = json.loads(result.stdout)
    assert record["finish_reason"] == "cancelled"
    whole = labkit.load(folder)
    monkeypatch.undo()
    wanted = labkit.Engine(whole).generate("hello", max_tokens=20).tokens
    assert record["tokens"] == list(wanted[: len(record["tokens"])])
    assert 2 <= len(record["tokens"]) <= 6
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_on_a_real_process_and_a_reader_that_leaves(folder):
    endless = [*PROCESS, str(folder), "hello", "--max-tokens", "4000"]
    both = [subprocess.Popen(endless, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) for _ in range(2)]
    interrupted, left = both
    assert interrupted.stdout.read(8)
    interrupted.send_signal(signal.SIGINT)
    _, err = interrupted.communicate(timeout=600)
    assert interrupted.returncode == 130, err.decode()
    assert b"cancelled" in err
    assert left.stdout.read(4)
    left.stdout.close()
    complaint = left.stderr.read()
    assert left.wait(timeout=600) == 0, complaint.decode()
    for text in (err, complaint):
        assert b"Traceback" not in text
        assert b"BrokenPipe" not in text


def test_ctrl_c_while_the_model_loads_gives_an_object_too(folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(labkit, "load", interrupted)
    result = run(str(folder), "hello", "--json", "--seed", "3")
    assert result.exit_code == 130
    record = json.loads(result.stdout)
    assert (record["finish_reason"], record["text"], record["seed"]) == ("cancelled", "", 3)


def test_a_handler_may_cancel_in_the_thread_that_holds_the_engines_lock(folder):
    engine = labkit.Engine(labkit.load(folder))
    cancelled = []

    def handler():
        with engine._register._lock:
            cancelled.append(engine.cancel("nobody"))

    thread = threading.Thread(target=handler, daemon=True)
    thread.start()
    thread.join(timeout=600)
    assert cancelled == [False]


def test_the_closing_line_is_one_line(folder):
    result = run(str(folder), "hello", "--max-tokens", "12", "--seed", str(2**200))
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["no-such-model", "x"], "labkit knows"),
        (["MODEL", "x", "--top-p", "7"], "top_p"),
        (["MODEL", "", "--raw"], "empty"),
        (["MODEL", "a\udcff"], "not valid Unicode"),
        (["MODEL", "x", "--raw", "--system", "y"], "--raw"),
    ],
)
def test_errors_are_words_and_exit_code_2(folder, arguments, word):
    result = run(*[str(folder) if item == "MODEL" else item for item in arguments])
    assert result.exit_code == 2
    assert word in result.stderr.replace("\n", " ")
    assert result.stdout == ""

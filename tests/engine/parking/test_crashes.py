"""kill -9 at any point of pausing and resuming: what was whole goes on exactly, and nothing wrong is ever served."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.parking import crash_child
from tests.nightly import many
from tests.tiny_models import write_checkpoint


class Engines:
    """Starts engines, one at a time, each a process of its own."""

    def __init__(self, model: Path, how: str) -> None:
        self.model = model
        command = [sys.executable, crash_child.__file__, how]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(
        self, mode: str, folder: Path, *, step: int = 0, lines: int = 0, seconds: float = 0.0, pauses: int = 0
    ) -> tuple[int, list[dict]]:
        self.process.stdin.write(f"{mode} {self.model} {folder} {step} {lines} {seconds} {pauses}\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        assert not any("error" in line for line in answer["said"]), answer
        return answer["signal"], answer["said"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "hybrid", "hybrid")


@pytest.fixture(scope="module")
def engines(model) -> Iterator[Engines]:
    parent = Engines(model, "fresh" if sys.platform == "darwin" else "forked")
    yield parent
    parent.close()


@pytest.fixture(scope="module")
def answer(engines, tmp_path_factory) -> list[int]:
    """What the request answers undisturbed."""
    ended, said = engines.run("plain", tmp_path_factory.mktemp("plain"))
    assert ended == 0
    return tokens_of(said)


def tokens_of(said: list[dict]) -> list[int]:
    return [line["token"] for line in said if "token" in line]


def kill_and_resume(engines: Engines, answer: list[int], folder: Path, rng: random.Random) -> str:
    """One engine killed, another after it; returns what was found."""
    folder.mkdir()
    how = rng.random()
    if how < 0.35:
        ended, said = engines.run("pause", folder, step=rng.randrange(20, 200))
    elif how < 0.7:
        ended, said = engines.run("pause", folder, pauses=rng.randrange(1, crash_child.ANSWER - 1))
    else:
        ended, said = engines.run("pause", folder, lines=rng.randrange(1, 31), seconds=rng.uniform(0, 0.03))
    told = tokens_of(said)
    assert told == answer[: len(told)]
    if ended == 0:
        assert told == answer, "it was through before it could die"
        return "through"
    assert ended == signal.SIGKILL
    paused = [line["kind"] for line in said if "kind" in line][-1:] == ["paused"]
    ended, after = engines.run("resume", folder)
    assert ended == 0
    rows = next(line["found"] for line in after if "found" in line)
    if not rows:
        assert not paused, "what was paused is found"
        assert tokens_of(after) == answer, "asked again, it answers the same"
        return "nothing"
    ((id, *before),) = rows
    assert id == "r"
    assert before == answer[: len(before)]
    assert before + tokens_of(after) == answer, "it goes on exactly"
    assert after[-1]["finished"] == "length"
    if paused:
        assert before == told, "its reader has been given all that it holds, and nothing more"
    return "row"


def check(engines, answer, folder: Path, rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    found = [kill_and_resume(engines, answer, folder / str(number), rng) for number in range(rounds)]
    # Whoever dies having said that it is paused leaves a row; what the other kills meet is a matter of their time.
    assert {"row", "nothing"} <= set(found), found


def test_twelve_kills_while_pausing_lose_nothing(engines, answer, tmp_path):
    check(engines, answer, tmp_path, 12, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(10))
def test_hundreds_of_kills_while_pausing_lose_nothing(engines, answer, tmp_path, seed):
    check(engines, answer, tmp_path, max(12, many(40)), seed=100 + seed)


def test_processes_that_begin_anew_are_killed_and_go_on_alike(model, answer, tmp_path):
    """What every kill is where nobody may fork, on Metal."""
    fresh = Engines(model, "fresh")
    ended, said = fresh.run("pause", tmp_path, pauses=3)
    assert ended == signal.SIGKILL
    ended, after = fresh.run("resume", tmp_path)
    fresh.close()
    assert ended == 0
    assert tokens_of(said) + tokens_of(after) == answer


def test_a_prompt_that_was_killed_begins_at_its_last_committed_block(engines, answer, tmp_path):
    ended, _ = engines.run("plain", tmp_path)
    assert ended == 0
    ended, said = engines.run("resume", tmp_path)
    assert said[0] == {"found": []}
    assert tokens_of(said) == answer
    assert said[-1]["cached"] == (crash_child.PROMPT - 1) // crash_child.WIDTH * crash_child.WIDTH

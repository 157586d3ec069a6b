"""Provenance names the machine's kind and never its folders or its people."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import labkit
from labkit.report import provenance
from labkit.report.provenance import scrub, scrub_value


def test_it_is_plain_data_that_says_enough() -> None:
    found = json.loads(json.dumps(provenance.collect({"n": 3, "model": "/data/of/someone/my-model"})))
    assert found["labkit"] == labkit.__version__
    assert {"mlx", "mlx-lm", "numpy"} <= set(found["packages"])
    assert found["parameters"] == {"n": 3, "model": "<path>/my-model"}
    assert found["device"]["memory_bytes"] > 2**28
    assert found["load"] >= 0
    assert found["cores"] >= 1
    assert str(Path.home()) not in json.dumps(found)


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_commit_and_changes_of_a_clone(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert provenance.commit(tmp_path) == {"commit": None, "changed": None}
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "one")
    assert provenance.commit(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "file").write_text("2")
    assert provenance.commit(tmp_path)["changed"] is True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{Path(labkit.__file__).resolve()}", "./labkit/__init__.py"),
        (f"File {sys.prefix}/lib/x.py", "File <python>/lib/x.py"),
        ("cannot open /home/jane.doe/models/x", "cannot open ~/models/x"),
        ("in /Users/jane/x and /Users/joe/y", "in ~/x and ~/y"),
        ("a ratio 3/4 and a link example.org/home/x", "a ratio 3/4 and a link example.org/home/x"),
        ("/usr/bin/python", "/usr/bin/python"),
    ],
)
def test_folders_of_a_machine_are_taken_out_of_texts(text: str, expected: str) -> None:
    assert scrub(text) == expected


def test_parameters_keep_names_only() -> None:
    assert scrub_value(["/a/b/c", "relative/d", 5, None]) == ["<path>/c", "relative/d", 5, None]

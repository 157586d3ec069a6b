"""The wheel works outside the clone: it holds the embedded model and runs it from an empty folder."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).with_name("uv")
pytestmark = pytest.mark.skipif(
    not ((CLONE / "pyproject.toml").exists() and UV.exists()), reason="needs a clone and its uv"
)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # No isolation: the build back end is already locked, so that this test needs no network.
    build = [UV, "build", "--wheel", "--quiet", "--no-build-isolation", "--out-dir", folder, CLONE]
    subprocess.run(build, check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(unpacked, *words, cwd):
    # -P and the path put the unpacked wheel, not the clone, first.
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "labkit.cli", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def test_the_wheel_holds_model_types_and_licence(unpacked):
    names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*")}
    assert "labkit/py.typed" in names
    assert "labkit/data/models/tiny-hybrid/model.safetensors" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith(".metal") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "book/"))]


def test_the_embedded_model_generates_outside_the_clone(unpacked, tmp_path):
    found = run(unpacked, "generate", "tiny-hybrid", "What is a table?", "--max-tokens", "8", "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["tokens"]


def test_the_code_that_ran_is_the_wheels(unpacked, tmp_path):
    program = "import labkit, labkit.resources as r; print(labkit.__file__); print(r.data_folder())"
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "PYTHONSAFEPATH": "1"}
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert all(line.startswith(str(unpacked)) for line in found.stdout.split())

"""Rules of the tree as a whole: size, paths, workflows."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]


def _tracked() -> list[Path]:
    if not shutil.which("git"):
        return []
    found = subprocess.run(["git", "ls-files", "-z"], cwd=CLONE, capture_output=True, text=True)
    return [CLONE / name for name in found.stdout.split("\0") if name]


TRACKED = _tracked()
pytestmark = pytest.mark.skipif(not TRACKED, reason="needs a git clone")


def test_tracked_tree_stays_within_36_mib():
    sizes = {path: path.stat().st_size for path in TRACKED if path.exists()}
    assert sum(sizes.values()) <= 36 << 20, sorted(sizes.items(), key=lambda item: -item[1])[:5]


def test_large_files_are_models_only():
    large = [path for path in TRACKED if path.exists() and path.stat().st_size > 5_000_000]
    assert all("data/models" in path.as_posix() for path in large), large


def test_no_file_carries_a_path_of_somebodys_machine():
    pattern = re.compile(r"(?<![\w.{}-])/(home|Users|root)/[a-z]")
    offenders = []
    for path in TRACKED:
        # Tests speak of such paths on purpose.
        if "tests" in path.parts or path.suffix in {".safetensors", ".npz", ".png", ".js"} or not path.exists():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        offenders += [f"{path.relative_to(CLONE)}: {match.group()}" for match in pattern.finditer(text)]
    assert not offenders


def test_workflows_parse_and_run_the_readmes_commands():
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((CLONE / ".github/workflows/test.yml").read_text())["jobs"]
    for job in ("linux", "macos"):
        commands = "\n".join(step.get("run", "") for step in jobs[job]["steps"])
        assert "make test" in commands
        assert "make report" in commands
    assert all(name.startswith("macos") for name in jobs["macos"]["strategy"]["matrix"]["os"])


def test_every_source_file_can_be_read_in_one_sitting():
    sources = [p for p in TRACKED if p.suffix in {".py", ".metal"} and p.exists() and "tests" not in p.parts]
    assert [f"{p.name}: {n}" for p in sources if (n := len(p.read_text().splitlines())) > 420] == []

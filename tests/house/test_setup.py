"""The set-up script: what a stranger sees on a machine where something is missing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not (CLONE / "scripts" / "setup.sh").exists(), reason="needs a clone")


def place(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path):
    """A bare machine: a copy of the script, and a PATH with nothing but what a test places there."""
    (tmp_path / "clone" / "scripts").mkdir(parents=True)
    shutil.copy(CLONE / "scripts" / "setup.sh", tmp_path / "clone" / "scripts")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dirname", "rm", "touch", "sh", "env", "mkdir", "cat", "chmod"):
        (tools / name).symlink_to(shutil.which(name))
    place(tools, "uname", 'case "$1" in -s) echo Linux;; -m) echo x86_64;; esac\n')

    def run(**environment):
        return subprocess.run(
            ["/bin/sh", str(run.clone / "scripts" / "setup.sh")],
            env={"PATH": str(tools), "HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            timeout=600,
        )

    run.tools = tools
    run.clone = tmp_path / "clone"
    return run


def place_python(machine, *, pip: int = 0, uv: int | str = 0) -> None:
    """A stand-in for Python whose venv holds a pip and a uv that end with the given codes."""
    place(
        machine.tools,
        "python3",
        f"""
if [ "$1" = -m ] && [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    cat > "$3/bin/python" <<'END'
#!/bin/sh
[ {pip} = 0 ] || exit {pip}
cat > .venv/bin/uv <<'UV'
#!/bin/sh
echo "uv $*"
exit {uv}
UV
chmod +x .venv/bin/uv
END
    chmod +x "$3/bin/python"
fi
exit 0
""",
    )


def test_no_python_at_all(machine):
    found = machine()
    assert found.returncode == 1
    assert "no Python 3.11 or newer" in found.stderr


def test_an_old_python_is_named_and_refused(machine):
    place(machine.tools, "python3", '[ "$1" = -V ] && echo Python 3.9.6 && exit 0\nexit 1\n')
    found = machine()
    assert found.returncode == 1
    assert "Python 3.9.6" in found.stderr
    assert "make PYTHON=" in found.stderr


def test_a_newer_python_beside_an_old_one_is_taken(machine):
    place_python(machine)
    (machine.tools / "python3").rename(machine.tools / "python3.12")
    place(machine.tools, "python3", "exit 1\n")
    assert machine().returncode == 0


def test_a_named_python_may_lie_in_a_folder_with_spaces(machine):
    place_python(machine)
    (machine.tools / "a folder").mkdir()
    named = (machine.tools / "python3").rename(machine.tools / "a folder" / "python3")
    assert machine(PYTHON=str(named)).returncode == 0


def test_a_named_python_that_is_none_is_not_passed_over_for_another(machine):
    place_python(machine)
    found = machine(PYTHON="/no/such/python3")
    assert found.returncode == 1
    assert "PYTHON names '/no/such/python3'" in found.stderr
    assert not (machine.clone / ".venv").exists()


def test_no_network_says_so(machine):
    place_python(machine, pip=1)
    found = machine()
    assert found.returncode == 1
    assert "network" in found.stderr


def test_a_venv_whose_making_was_interrupted_is_made_anew(machine):
    """Ctrl-C while pip is put into it leaves a Python without pip, and the next set-up would blame the network."""
    place_python(machine)
    half = machine.clone / ".venv" / "bin"
    half.mkdir(parents=True)
    place(half, "python", "exit 1\n")
    found = machine()
    assert found.returncode == 0, found.stderr
    assert "making .venv" in found.stderr


def test_a_finished_venv_is_kept(machine):
    place_python(machine)
    assert machine().returncode == 0
    mark = machine.clone / ".venv" / "mark"
    mark.write_text("")
    assert machine().returncode == 0
    assert mark.exists()


def test_a_moved_clone_is_set_up_anew(machine):
    """A venv's programs begin with the path of its Python, and the package is found by the clone's old path."""
    place_python(machine)
    assert machine().returncode == 0
    (machine.clone / ".venv" / "mark").write_text("")
    old, machine.clone = machine.clone, machine.clone.with_name("a clone elsewhere")
    old.rename(machine.clone)
    found = machine()
    assert found.returncode == 0, found.stderr
    assert f"moved here from {old}" in found.stderr
    assert not (machine.clone / ".venv" / "mark").exists()
    assert "moved" not in machine().stderr


@pytest.mark.parametrize(("stamp", "anew"), [("{clone}\n", False), ("/where/it/was\n", True), ("", False)])
def test_make_asks_for_set_up_where_the_clone_was_moved(tmp_path, stamp, anew):
    clone = tmp_path / "a clone"
    (clone / ".venv").mkdir(parents=True)
    (clone / "scripts").mkdir()
    for name in ("Makefile", "uv.lock", "pyproject.toml", "scripts/setup.sh"):
        shutil.copy(CLONE / name, clone / name)
    (clone / ".venv" / ".labkit-synced").write_text(stamp.format(clone=clone.resolve()))
    shown = subprocess.run(["make", "-n", "book"], cwd=clone, capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    assert ("scripts/setup.sh" in shown.stdout) is anew


def test_a_failing_sync_leaves_no_stamp(machine):
    place_python(machine, uv=2)
    found = machine()
    assert found.returncode == 1
    assert "check the network" in found.stderr
    assert not (machine.clone / ".venv" / ".labkit-synced").exists()


def test_without_nvidias_compiler_the_rest_is_set_up(machine):
    place_python(machine, uv='$(case "$*" in *cuda-compile*) echo 2;; *) echo 0;; esac)')
    found = machine()
    assert found.returncode == 0, found.stderr
    assert "without NVIDIA's compiler" in found.stderr
    assert (machine.clone / ".venv" / ".labkit-synced").exists()


@pytest.mark.parametrize("answers", [True, False])
def test_linux_takes_cuda_where_a_gpu_answers(machine, answers):
    place_python(machine)
    if answers:
        place(machine.tools, "nvidia-smi", "exit 0\n")
    found = machine()
    assert f"--extra {'cuda13' if answers else 'cpu'} " in found.stdout
    assert "override with LABKIT_MLX" in found.stderr
    assert (machine.clone / ".venv" / ".labkit-synced").exists()


def test_the_choice_of_build_can_be_overridden(machine):
    place_python(machine)
    place(machine.tools, "nvidia-smi", "exit 0\n")
    assert "--extra cuda12 " in machine(LABKIT_MLX="cuda12").stdout


def test_a_wrong_build_is_refused(machine):
    place_python(machine)
    found = machine(LABKIT_MLX="rocm")
    assert found.returncode == 1
    assert "'rocm'; it takes cpu, cuda12 or cuda13" in found.stderr


def test_a_mac_takes_plain_mlx(machine):
    place_python(machine)
    place(machine.tools, "uname", 'case "$1" in -s) echo Darwin;; -m) echo arm64;; esac\n')
    assert "--extra cpu" not in machine().stdout


def test_an_intel_mac_is_refused(machine):
    place_python(machine)
    place(machine.tools, "uname", 'case "$1" in -s) echo Darwin;; -m) echo x86_64;; esac\n')
    found = machine()
    assert found.returncode == 1
    assert "Apple silicon" in found.stderr


def test_paths_with_spaces_do_not_matter(machine, tmp_path):
    place_python(machine)
    spaced = tmp_path / "a clone with spaces"
    machine.clone.rename(spaced)
    found = subprocess.run(
        ["/bin/sh", str(spaced / "scripts" / "setup.sh")],
        env={"PATH": str(machine.tools), "HOME": os.devnull},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(("user", "told"), [(0, True), (1000, False)])
def test_jupyter_is_told_that_root_is_meant(tmp_path, user, told):
    """In a container there is often nobody else, and JupyterLab would end at once."""
    place(tmp_path, "id", f"echo {user}\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    shown = subprocess.run(
        ["make", "-n", "lab"], cwd=CLONE, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    assert "jupyter lab" in shown.stdout
    assert ("--allow-root" in shown.stdout) is told

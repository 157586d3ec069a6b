import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from typer.testing import CliRunner

import labkit.cli as cli_module
from labkit import devices

ROOT = Path(cli_module.__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def cli():
    from labkit.cli import app

    return lambda *words, **settings: CliRunner().invoke(app, list(words), **settings)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(devices.CACHE_VARIABLE, str(tmp_path))
    return tmp_path


def test_every_command_has_help_and_takes_json(cli):
    from typer.main import get_command

    from labkit.cli import app

    def leaves(command, words=()):
        if not hasattr(command, "list_commands"):
            yield words, command
            return
        with click.Context(command) as context:
            for name in command.list_commands(context):
                yield from leaves(command.get_command(context, name), (*words, name))

    found = dict(leaves(get_command(app)))
    assert {
        ("report",),
        ("generate",),
        ("parity", "forced"),
        ("doctor",),
        ("cache", "list"),
        ("kernels", "list"),
    } <= set(found)
    for words, command in found.items():
        assert command.help, f"labkit {' '.join(words)} has no help"
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, f"labkit {' '.join(words)} lacks --json"


def test_doctor_prints_one_json_object(cli):
    result = cli("doctor", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["healthy"] is True


def test_doctor_exit_code_says_that_something_is_missing(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("labkit.doctor.resources.data_folder", lambda: tmp_path)
    result = cli("doctor")
    assert result.exit_code == 1
    assert "missing or broken" in result.stderr


def test_cache_lists_and_clears_one_kind(cli, own_cache):
    for kind in ("kernels", "models"):
        (devices.cache_folder(kind) / "file").write_bytes(b"x" * 10)
    listed = json.loads(cli("cache", "list", "--json").stdout)
    assert listed["kinds"] == {"kernels": {"files": 1, "bytes": 10}, "models": {"files": 1, "bytes": 10}}
    assert cli("cache", "clear", "kernels").exit_code == 0
    assert sorted(path.name for path in own_cache.iterdir()) == ["models"]


@pytest.mark.parametrize("kind", ["nothing", "..", "/"])
def test_cache_clear_refuses_what_is_not_a_kind(cli, own_cache, kind):
    devices.cache_folder("kernels")
    result = cli("cache", "clear", kind)
    assert result.exit_code == 2
    assert "it holds: kernels" in result.stderr
    assert (own_cache / "kernels").is_dir()


def test_cache_commands_work_before_anything_was_cached(cli, tmp_path, monkeypatch):
    monkeypatch.setenv(devices.CACHE_VARIABLE, str(tmp_path / "not" / "there"))
    assert json.loads(cli("cache", "list", "--json").stdout)["kinds"] == {}
    assert cli("cache", "clear").exit_code == 0


@pytest.mark.parametrize("stdout", ["full", "closed", "a narrow locale", "a cache that is a file"])
def test_what_the_system_refuses_is_one_line_and_no_traceback(tmp_path, stdout):
    if stdout == "full" and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "file").touch()
    (tmp_path / "cache" / "modèles").mkdir(parents=True)
    redirect = {"full": ">/dev/full", "closed": ">&-"}.get(stdout, "")
    command, cache = "cache list", "cache"
    if stdout == "a cache that is a file":
        command, cache = "generate smollm2-135m x", "file"
    settings = {"PYTHONIOENCODING": "ascii", "LABKIT_CACHE_DIR": str(tmp_path / cache)}
    found = subprocess.run(
        f"'{sys.executable}' -m labkit.cli {command} {redirect}",
        shell=True,
        capture_output=True,
        text=True,
        env=os.environ | settings,
    )
    assert "Traceback" not in found.stderr
    assert len(found.stderr.splitlines()) <= 1, found.stderr
    assert found.returncode == (1 if stdout in ("full", "a cache that is a file") else 0), found.stderr


def test_cache_clear_takes_links_and_what_vanishes_meanwhile(cli, own_cache, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "kept").touch()
    (own_cache / "link").symlink_to(elsewhere)
    (devices.cache_folder("kernels") / "file").touch()
    measure = cli_module._measure

    def vanishing(folder):
        found = measure(folder)
        (folder / "file").unlink(missing_ok=True)
        if folder.name == "kernels":
            folder.rmdir()
        return found

    monkeypatch.setattr(cli_module, "_measure", vanishing)
    result = cli("cache", "clear", "--json")
    assert result.exit_code == 0, result.output
    assert (elsewhere / "kept").exists()
    assert not list(own_cache.iterdir())


@pytest.mark.parametrize("command", ["list", "clear"])
def test_a_cache_folder_that_is_a_file_is_refused(cli, tmp_path, monkeypatch, command):
    (tmp_path / "file").touch()
    monkeypatch.setenv(devices.CACHE_VARIABLE, str(tmp_path / "file"))
    result = cli("cache", command)
    assert result.exit_code == 2
    assert "is no folder" in result.stderr


def test_importing_labkit_and_its_command_stays_light():
    heavy = ["mlx.core", "mlx_lm", "transformers", "numba", "numpy", "matplotlib", "nbformat", "papermill", "torch"]
    program = f"import sys, labkit, labkit.cli; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_an_interrupt_during_imports_ends_without_a_traceback():
    program = """
import sys
class Interrupt:
    def find_spec(self, name, *rest):
        if name == "labkit.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from labkit.start import main
main()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (130, "")


def test_nothing_is_imported_before_an_interrupt_is_caught():
    program = "import os, sys; before = set(sys.modules); import labkit.start; print(sorted(set(sys.modules) - before))"
    found = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "['labkit', 'labkit.start']"


def ends(monkeypatch, capsys, *words):
    """How the console script ends on these words: its exit code, what it printed, and what it said."""
    monkeypatch.setattr(sys, "argv", ["labkit", *words])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts its own there
    with pytest.raises(SystemExit) as end:
        cli_module.main()
    return end.value.code, *capsys.readouterr()


@pytest.mark.parametrize("json_too", [False, True])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("nonsense", "nonsense"),
        ("doctor --nope", "--nope"),
        ("generate tiny-hybrid", "prompt"),
        ("generate tiny-hybrid x --max-tokens 1e3", "--max-tokens"),
        ("generate tiny-hybrid x --max-tokens 0", "max_tokens"),
        ("generate tiny-hybrid x --temperature -1", "temperature must be a finite number from 0 to 1000000, not -1.0"),
        ("generate tiny-hybrid x --prefix-width 16", "--prefix-store"),
        ("generate no-such-model x", "no-such-model"),
        ("parity tiny-hybrid --positions 0", "--positions"),
        ("parity tiny-hybrid --prefill -3", "--prefill"),
        ("parity replay tiny-hybrid --seed -5", "--seed"),
        ("parity tiny-hybrid --text /no/such/text", "/no/such/text"),
        ("trace decode tiny-hybrid --picture step.xyz", "must end in .svg or .png"),
        ("schedule --svg /no/such/folder/a.svg", "/no/such/folder/a.svg"),
        ("bench end-to-end tiny-hybrid --plot .", "must end in .svg or .png"),
        ("report no-such-notebook", "no-such-notebook"),
        ("cache list --prefix-store /no/such/store", "/no/such/store"),
    ],
)
def test_whoever_asks_wrongly_is_told_so_before_any_work(monkeypatch, capsys, words, named, json_too):
    code, out, err = ends(monkeypatch, capsys, *words.split(), *["--json"] * json_too)
    assert code == 2
    assert "Traceback" not in err
    if json_too:
        error = json.loads(out)["error"]
        assert named in error["message"]
        assert error["exit_code"] == 2
    else:
        assert out == ""
        assert named in " ".join(err.replace("│", " ").split())


@pytest.mark.parametrize(("fault", "code"), [(KeyboardInterrupt, 130), (PermissionError(13, "denied", "/x"), 1)])
def test_what_ends_a_command_is_in_its_json(monkeypatch, capsys, fault, code):
    monkeypatch.setattr(cli_module.doctor, "examine", lambda: _raise(fault))
    ended, out, err = ends(monkeypatch, capsys, "doctor", "--json")
    assert ended == json.loads(out)["error"]["exit_code"] == code
    assert "Traceback" not in err


def test_a_fault_of_our_own_keeps_its_traceback_and_is_in_the_json_too(monkeypatch, capsys):
    monkeypatch.setattr(cli_module.doctor, "examine", lambda: _raise(ZeroDivisionError("by nought")))
    with pytest.raises(ZeroDivisionError):
        ends(monkeypatch, capsys, "doctor", "--json")
    assert json.loads(capsys.readouterr().out)["error"] == {"message": "ZeroDivisionError: by nought", "exit_code": 1}


def _raise(error):
    raise error


def test_unknown_names_of_the_package_are_refused():
    import labkit

    with pytest.raises(AttributeError, match="no attribute 'engin'"):
        labkit.engin  # noqa: B018

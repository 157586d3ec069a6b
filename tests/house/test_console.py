import json
import logging

import pytest
import typer
from typer.testing import CliRunner

from labkit import cli, console, doctor
from labkit.doctor import Finding


def test_json_goes_to_standard_output_alone(capsys):
    console.show({"a": 1.5, "name": "π"}, as_json=True, render="never shown")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": 1.5, "name": "π"}
    assert err == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_json_cannot_hold_becomes_null(capsys, value):
    console.show({"deep": [{"value": value}]}, as_json=True, render="")
    assert json.loads(capsys.readouterr().out) == {"deep": [{"value": None}]}


def test_tables_print_brackets_as_they_are(capsys):
    console.show({}, as_json=False, render=console.table("t", ["what"], [["mlx[cpu]"]]))
    assert "mlx[cpu]" in capsys.readouterr().out


def test_a_title_is_not_broken_at_its_table_s_width(capsys):
    title = "/a/folder/with/a/long/name that holds what is listed"
    console.show({}, as_json=False, render=console.table(title, ["kind"], [["kernels"]]))
    assert title in capsys.readouterr().out


def test_what_labkit_says_while_it_works_appears_on_standard_error(capsys):
    log = logging.getLogger("labkit")
    before, level = list(log.handlers), log.level
    try:
        console.show_log()
        logging.getLogger("labkit.kernels").info("compiling")
    finally:
        log.handlers, log.level = before, level
    out, err = capsys.readouterr()
    assert (out, err) == ("", "compiling\n")


def test_fail_speaks_on_standard_error_and_sets_the_code(capsys):
    with pytest.raises(typer.Exit) as stopped:
        console.fail("bad value 'x[y]': use 3", code=2)
    assert stopped.value.exit_code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "bad value 'x[y]': use 3" in err


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (1 << 41, "2.0 TiB")]
)
def test_human_bytes(count, text):
    assert console.human_bytes(count) == text


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_failing_command_that_was_to_print_json_prints_one_object(option):
    ran = CliRunner().invoke(cli.app, ["cache", "clear", "no-such-kind", *option])
    assert ran.exit_code == 2
    assert "no-such-kind" in ran.stderr
    if option:
        error = json.loads(ran.stdout)["error"]
        assert "no-such-kind" in error["message"]
        assert error["exit_code"] == 2
    else:
        assert ran.stdout == ""


def test_a_result_that_is_itself_a_failure_is_not_followed_by_a_second_object(monkeypatch):
    broken = Finding("thing", "broken", "gone", "bring it back", required=True)
    monkeypatch.setattr(doctor, "examine", lambda: [broken])
    ran = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert ran.exit_code == 1
    assert "thing" in json.dumps(json.loads(ran.stdout))

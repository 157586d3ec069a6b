import json

import pytest
import typer

from labkit import console


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

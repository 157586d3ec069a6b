"""A notebook's parameters: read as Python reads them, and given values checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.report.parameters import Parameter, ParameterError, check, convert, declared, parse, parse_assignments

SOURCE = """\
model: str = "a#b=c"  # which = one # really
sizes: list[int] = [1, 2]  # in tokens
# the cap
limit: int | None = None
rate: float = 1e-3  # a rate
many: list[float] = [
    1.0,
    2.0,
]  # over lines
"""


def test_reads_annotations_defaults_and_comments() -> None:
    found = parse(SOURCE, "n.ipynb")
    assert found["model"] == Parameter("model", "str", "a#b=c", "which = one # really")
    assert found["limit"] == Parameter("limit", "int | None", None, "the cap")
    assert found["many"] == Parameter("many", "list[float]", [1.0, 2.0], "over lines")


def test_papermill_sees_the_same_names(tmp_path: Path, write_notebook) -> None:
    import papermill

    path = write_notebook(tmp_path / "n.ipynb")
    assert set(papermill.inspect_notebook(str(path))) == set(declared(path)) == {"quick", "steps", "name"}


@pytest.mark.parametrize("source", ["import os", "x = 1", "x: int", "x: int = max(1, 2)", "f(3)"])
def test_anything_but_annotated_literals_is_refused(source: str) -> None:
    with pytest.raises(ParameterError):
        parse(source, "n.ipynb")


def test_an_unknown_name_is_refused_with_the_nearest_known(tmp_path: Path, write_notebook) -> None:
    path = write_notebook(tmp_path / "n.ipynb")
    with pytest.raises(ParameterError, match=r"no parameter 'step': did you mean 'steps'\? it has quick, steps, name"):
        check(path, {"step": "3"})


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("int", "3", 3),
        ("int", 3, 3),
        ("float", "2", 2.0),
        ("bool", "false", False),
        ("bool", "True", True),
        ("str", "007", "007"),
        ("str", "a=b", "a=b"),
        ("list[int]", "[1,2]", [1, 2]),
        ("list[float]", [1, 2.5], [1.0, 2.5]),
        ("int | None", "None", None),
        ("int | None", "4", 4),
        ("list[str]", "['a', 'b']", ["a", "b"]),
    ],
)
def test_values_become_the_declared_type(kind: str, given, expected) -> None:
    value = convert(given, Parameter("p", kind, None, ""), "n.ipynb")
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("kind", "given"),
    [("int", "3.5"), ("int", True), ("int", "many"), ("bool", "1"), ("float", "fast"), ("list[int]", "[1,'a']")],
)
def test_values_that_do_not_fit_are_refused_by_name(kind: str, given) -> None:
    with pytest.raises(ParameterError, match="parameter p is"):
        convert(given, Parameter("p", kind, None, ""), "n.ipynb")


def test_assignments_of_the_command_line() -> None:
    assert parse_assignments(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for bad in (["a"], ["=1"], ["a b=1"], ["a=1", "a=2"]):
        with pytest.raises(ParameterError):
            parse_assignments(bad)


def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text("not json")
    with pytest.raises(ParameterError, match="cannot be read"):
        declared(path)

"""A notebook's own parameters: read from its parameters cell, and every given value checked against them."""

from __future__ import annotations

import ast
import difflib
import io
import json
import tokenize
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAG = "parameters"


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, annotated type as written, default value and the comment that explains it."""

    name: str
    type: str
    default: Any
    help: str


class ParameterError(ValueError):
    """A parameter that the notebook does not have, or a value that does not fit its type."""


def declared(notebook: Path) -> dict[str, Parameter]:
    """The parameters of a notebook, by name, as its cell tagged `parameters` declares them.

    Raises:
        ParameterError: the notebook cannot be read, or its parameters cell is not what `parse` asks for.
    """
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError) as error:
        raise ParameterError(f"{notebook} cannot be read as a notebook ({error})") from None
    tagged = [cell for cell in cells if TAG in cell.get("metadata", {}).get("tags", ())]
    return parse("".join(tagged[0]["source"]), notebook.name) if tagged else {}


def parse(source: str, where: str) -> dict[str, Parameter]:
    """The parameters that a cell declares: lines such as `steps: int = 10  # optimiser steps`.

    Read with Python's own parser: papermill's reads a line by a pattern that stops at the first "#" or "=" of a string
    or comment and knows no `int | None`.

    Raises:
        ParameterError: a statement that is not an annotated assignment of a literal.
    """
    comments = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    # A comment explains the line below itself only where it stands alone.
    lines = source.splitlines()
    above = {number: text for number, text in comments.items() if lines[number - 1].lstrip().startswith("#")}
    result = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or node.value is None:
            raise ParameterError(f"{where}: {ast.unparse(node)!r} in the parameters cell is not `name: type = literal`")
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            raise ParameterError(f"{where}: parameter {node.target.id} has no literal default") from None
        help = comments.get(node.end_lineno) or above.get(node.lineno - 1, "")
        result[node.target.id] = Parameter(node.target.id, ast.unparse(node.annotation), default, help)
    return result


def check(notebook: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values, converted to the types that the notebook declares.

    Args:
        given: values by name. Strings, as a command line gives them, are converted; other values must already fit.

    Raises:
        ParameterError: an unknown name (with the nearest known ones) or a value that does not fit.
    """
    known = declared(notebook)
    unknown = [name for name in given if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ParameterError(
            f"{notebook.name} has no parameter {unknown[0]!r}: {hint}it has {', '.join(known) or 'none'}"
        )
    return {name: convert(value, known[name], notebook.name) for name, value in given.items()}


def convert(value: Any, parameter: Parameter, where: str) -> Any:
    """`value` as the parameter's type.

    Raises:
        ParameterError: it does not fit; the message names parameter, type and value.
    """
    alternatives = [part.strip() for part in parameter.type.split("|")]
    for kind in alternatives:
        converted = _as_kind(value, kind)
        if converted is not _MISFIT:
            return converted
    raise ParameterError(f"{where}: parameter {parameter.name} is {parameter.type}; {value!r} does not fit")


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """`["name=value", ...]` as a command line gives them.

    Raises:
        ParameterError: one without a name and an equals sign, or a name given twice.
    """
    result: dict[str, str] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ParameterError(f"{text!r} is not name=value")
        if name.strip() in result:
            raise ParameterError(f"parameter {name.strip()!r} is given twice")
        result[name.strip()] = value
    return result


_MISFIT = object()


def _as_kind(value: Any, kind: str) -> Any:
    if kind in ("None", "NoneType"):
        return None if value is None or value == "None" else _MISFIT
    if kind == "str":
        return value if isinstance(value, str) else _MISFIT
    if kind == "bool":
        return {"true": True, "false": False}.get(str(value).lower(), _MISFIT)
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return _MISFIT
    if kind == "int":
        return value if isinstance(value, int) and not isinstance(value, bool) else _MISFIT
    if kind == "float":
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _MISFIT
    outer, _, inner = kind.partition("[")
    if outer in ("list", "tuple") and isinstance(value, (list, tuple)):
        kinds = [part.strip() for part in inner.rstrip("]").split(",") if part.strip() not in ("", "...")]
        items = [_as_kind(item, kinds[0]) if kinds else item for item in value]
        return _MISFIT if any(item is _MISFIT for item in items) else items
    return _MISFIT

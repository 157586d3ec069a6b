"""Every command that a notebook shows is one: `labkit` and a recipe take its words, a notebook its parameters."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter
from typer.core import TyperGroup
from typer.main import get_command

from labkit.cli import app
from labkit.report import parameters
from labkit.report.commands import find_notebooks
from labkit.report.executed import read
from labkit.resources import notebooks_folder

NOTEBOOKS = sorted(notebooks_folder().glob("*.ipynb"))
CLONE = Path(__file__).resolve().parents[2]


def commands_of(text: str) -> list[str]:
    """The lines of the code blocks in a Markdown text that call `labkit` or `python -m`."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [line.removeprefix(".venv/bin/") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(("labkit ", "python -m "))]


def hold(line: str) -> None:
    """Raise ValueError if a command would be refused for its words; nothing is run."""
    program, *words = shlex.split(line, comments=True)
    if program == "python":
        if importlib.util.find_spec(words[1]) is None:
            raise ValueError(f"there is no {words[1]}")
        return
    context = parsed(words)
    if context.info_name == "report":
        given = parameters.parse_assignments(context.params["parameter"] or [])
        for notebook in find_notebooks(context.params["pattern"]):
            parameters.check(notebook, given)


def parsed(words: list[str]) -> Any:
    """The context of the innermost command that `labkit WORDS` calls."""
    name, command, context = "labkit", get_command(app), None
    try:
        while isinstance(command, TyperGroup):
            context = command.make_context(name, [*words], parent=context)
            # A group may have put its default command in front of the words.
            left = [*context._protected_args, *context.args]
            name, command, words = command.resolve_command(context, left)
        return command.make_context(name, words, parent=context)
    except BadParameter.__base__ as error:  # a usage error of any kind
        raise ValueError(error.format_message()) from None


PAGES = [*NOTEBOOKS, *sorted((CLONE / "book").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=[path.stem for path in PAGES])
def test_every_command_that_is_shown_would_be_taken(page: Path) -> None:
    if page.suffix == ".md":
        text = page.read_text(encoding="utf-8")
    else:
        text = "\n".join(cell.source for cell in read(page).cells if cell.cell_type == "markdown")
    for line in commands_of(text):
        hold(line)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("labkit report 34 -p shape qwen3.6-35b-a3b", "unexpected extra argument"),
        ("labkit report 34 -p memory=32", "no parameter 'memory'"),
        ("labkit report 34 -p shape", "name=value"),
        ("labkit trace decode", "Missing argument"),
        ("labkit parity replays tiny-hybrid", "unexpected extra argument"),
        ("python -m recipes.measured.no_such_recipe", "there is no"),
    ],
)
def test_one_that_would_not_is_found(line: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){reason}"):
        hold(line)

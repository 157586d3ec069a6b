"""The `labkit` command's own help as a page: usage, arguments and options of every sub-command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command

from labkit.cli import app as labkit

COMMANDS_HERE = "<!-- commands -->"


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", _with_commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _with_commands(app: Any, page: str, source: list[str]) -> None:
    if COMMANDS_HERE in source[0]:
        source[0] = source[0].replace(COMMANDS_HERE, "\n".join(_described(get_command(labkit), "labkit", None)))


def _described(command: Any, name: str, parent: Any) -> Iterator[str]:
    """A section for each command that does something, in the order of `labkit --help`."""
    context = command.context_class(command, info_name=name, parent=parent)
    if isinstance(command, TyperGroup):
        for below in command.list_commands(context):
            yield from _described(command.get_command(context, below), below, context)
        return
    usage = command.get_usage(context).removeprefix("Usage: ")
    yield from (f"## {context.command_path}", "", command.help or "", "", "```", usage, "```", "")
    rows = [one for one in (parameter.get_help_record(context) for parameter in command.params) if one]
    if rows:
        yield from ("| argument or option | what it is |", "|---|---|")
        yield from (f"| `{_cell(shape)}` | {_cell(meaning)} |" for shape, meaning in rows)
        yield ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("*", "\\*").replace("<br>", " ").split())

"""The book's contents: its parts, each notebook's title and question, and a page of all parameters."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.report import executed, parameters

NOTEBOOKS_HERE = "<!-- notebooks -->"
"""Where a page of the book's sources says this, the list of notebooks stands in the finished one."""

_QUESTION = re.compile(r"\*\*Question\.\*\*\s+(.+?)(?:\n\n|\Z)", re.S)


@dataclass(frozen=True)
class Heading:
    """What stands at the top of a notebook: its title and the question that it asks, "" if it asks none."""

    title: str
    question: str

    @classmethod
    def of(cls, notebook: Path) -> Heading:
        """Read from the notebook's first cell."""
        cells = executed.read(notebook).cells
        text = cells[0].source if cells and cells[0].cell_type == "markdown" else ""
        title = re.match(r"# +(.+)", text)
        question = _QUESTION.search(text)
        return cls(
            title.group(1).strip() if title else notebook.stem,
            " ".join(question.group(1).split()) if question else "",
        )


def table_of_contents(table: Any, pages: Iterable[str]) -> Any:
    """The table of contents with the pages that are there: a pattern becomes the pages it matches, an empty part goes.

    Args:
        table: `_toc.yml` as read: mappings and lists, with `glob: notebooks/0[1-3]*` in the place of files.
        pages: every page of the site without its suffix: "notebooks/01_the_machine_and_the_model".
    """
    known = sorted(pages)
    if not isinstance(table, dict):
        return table
    result = {}
    for key, value in table.items():
        if isinstance(value, list):
            value = [entry for found in value for entry in _expanded(found, known)]
            if not value:
                continue
        result[key] = value
    return result


def _expanded(entry: Any, pages: Sequence[str]) -> list[Any]:
    if "glob" in entry:
        return [{"file": name} for name in fnmatch.filter(pages, entry["glob"])]
    kept = table_of_contents(entry, pages)
    # A part or a chapter that has lost all that it held: only a page of its own keeps it there.
    return [kept] if "file" in kept or any(isinstance(value, list) for value in kept.values()) else []


def list_of_notebooks(table: Any, notebooks: Sequence[Path]) -> str:
    """The notebooks with their questions, part by part, as Markdown.

    Args:
        table: what `table_of_contents` gave.
        notebooks: their files.
    """
    files = {f"notebooks/{path.stem}": path for path in notebooks}
    lines: list[str] = []
    for part in table.get("parts", [table]):
        own = [entry["file"] for entry in part.get("chapters", ()) if entry.get("file") in files]
        if own and "caption" in part:
            lines += [f"### {part['caption']}", ""]
        for name in own:
            heading = Heading.of(files[name])
            lines += [f"[{heading.title}]({name}.ipynb)", f": {heading.question or 'A notebook.'}", ""]
    return "\n".join(lines)


def parameters_page(notebooks: Sequence[Path]) -> str:
    """Every notebook's parameters as a Markdown page: name, type, default and meaning."""
    lines = [
        "# Parameters of the notebooks",
        "",
        "What `labkit report NN -p NAME=VALUE` takes, from each notebook's own first code cell. A name that is not here"
        " is refused before anything runs, and so is a value of another type. Lists are written as in Python, in quotes"
        " for the shell: `-p contexts='[512, 4096]'`. `--full` is short for `-p quick=false`.",
        "",
    ]
    for path in notebooks:
        declared = parameters.declared(path)
        lines += [f"## [{Heading.of(path).title}](notebooks/{path.name})", ""]
        if not declared:
            lines += ["It has none.", ""]
            continue
        lines += ["| parameter | type | default | what it is |", "|---|---|---|---|"]
        for one in declared.values():
            default = f'"{one.default}"' if isinstance(one.default, str) else repr(one.default)
            cells = [f"`{one.name}`", f"`{one.type}`", f"`{default}`", one.help]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def adopted(text: str, pages: Mapping[str, str] | None = None) -> str:
    """A page of the repository as a page of the book: links to files of the repository become plain text.

    Args:
        text: the page. pages: by what a link on it says (`measured.md`), the book's own page of that file.
    """
    known = pages or {}

    def link(found: re.Match[str]) -> str:
        page = known.get(found["target"])
        return f"[{found['words']}]({page})" if page else found["words"]

    return re.sub(r"(?<!!)\[(?P<words>[^\]]+)\]\((?!https?:|#)(?P<target>[^)]+)\)", link, text)

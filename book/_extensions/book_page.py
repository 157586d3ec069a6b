"""Fits pages to this book: nothing that reaches for the network, docstrings as they are written, links to notebooks."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes

_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:", "Note:", "Notes:", "Example:", "Examples:")


def setup(app: Any) -> dict[str, Any]:
    # Jupyter Book always loads sphinx-thebe, which offers to run cells on a public server and declares its settings
    # once for each builder start, so that a page with two of them stops with a script error.
    app.connect("html-page-context", _without_thebe, priority=900)
    # Before napoleon, which reads the sections of a docstring.
    app.connect("autodoc-process-docstring", _as_written, priority=100)
    app.connect("autodoc-process-signature", _without_objects)
    app.connect("doctree-read", _link_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _as_written(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings here mark code with backticks, examples by indentation (with or without `::`), and nothing else.

    So what reStructuredText would read as more is escaped, an indented paragraph becomes a code block, and a package's
    list of files, a line or a row of a table each, a list.
    """
    if lines and lines[0].startswith("Alias for field number "):
        lines.clear()  # Python's own words for a named tuple's field: they say less than its name
    result: list[str] = []
    example = False
    for index, line in enumerate(lines):
        if _TABLE_HEAD.match(line):
            continue
        if entry := _FILE.match(line) or _ROW.match(line):
            name = entry["name"] if "`" in entry["name"] else f"`{entry['name']}`"
            if result and result[-1] and not result[-1].startswith("* "):
                result.append("")
            result.append(f"* {_escaped(name)}: {_escaped(entry['text'])}")
            continue
        indented = line.startswith("    ")
        if line.strip() and not indented:
            example = False
        elif indented and not example and _opens_example(lines, index):
            announced = next(place for place in reversed(range(len(result))) if result[place].strip())
            # Whoever writes `::` means the same: left as it is, it would take the directive for its literal block.
            result[announced] = re.sub("::$", ":", result[announced])
            result += [".. code-block:: python", ""]
            example = True
        result.append(line if example else _escaped(line))
    lines[:] = _one_name_each(result)
    if what in ("property", "attribute"):
        lines[:0] = ["..", ""]  # a comment: napoleon takes what stands before a first line's colon for a type


_NAMES = re.compile(r"    (?P<names>\w+(?:, \w+)+): (?P<text>.+)")


def _one_name_each(lines: list[str]) -> list[str]:
    """Attributes described together (`first, last: text`) one by one: napoleon takes all but the last for a type."""
    result: list[str] = []
    section, place = "", 0
    while place < len(lines):
        line, place = lines[place], place + 1
        if line.strip() and not line.startswith(" "):
            section = line.strip()
        together = _NAMES.fullmatch(line) if section == "Attributes:" else None
        if together is None:
            result.append(line)
            continue
        begin = place
        while place < len(lines) and lines[place].startswith("     "):
            place += 1
        for name in together["names"].split(", "):
            result += [f"    {name}: {together['text']}", *lines[begin:place]]
    return result


def _without_objects(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """A default that prints as an object (`<function ...>`) becomes `...`: Sphinx could not read the whole signature,
    and would print every type in it by its full name, without a link."""
    return signature and re.sub(r"<(?:[^<>]|<[^<>]*>)*>", "...", signature), returned


_FILE = re.compile(r"(?P<name>[\w./]+(?:\.py|/)) +(?P<text>\S.*)")
_ROW = re.compile(r"\| (?P<name>.+?) \| (?P<text>.+) \|$")
_TABLE_HEAD = re.compile(r"\| (?:[a-z ]+ \| )+[a-z ]+ \|$|\| -+ \|")


def _opens_example(lines: list[str], index: int) -> bool:
    if index == 0 or lines[index - 1].strip():
        return False
    before = next((line for line in reversed(lines[:index]) if line.strip()), "")
    return bool(before) and not before.startswith(" ") and before.strip() not in _SECTIONS


def _escaped(line: str) -> str:
    mark = "* " if line.startswith("* ") else ""  # an entry of a list
    parts = re.split(r"(`+[^`]+`+)", line.removeprefix(mark))
    return mark + "".join(part if part.startswith("`") else re.sub(r"([|*])", r"\\\1", part) for part in parts)


def _without_thebe(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    scripts = context.get("script_files", [])
    context["script_files"] = [script for script in scripts if not _is_thebe(script)]
    sheets = context.get("css_files", [])
    context["css_files"] = [sheet for sheet in sheets if "thebe" not in str(getattr(sheet, "filename", sheet))]


def _is_thebe(script: Any) -> bool:
    body = getattr(script, "attributes", {}).get("body") or ""
    return "thebe" in str(getattr(script, "filename", script) or "") or "THEBE" in body


_NUMBERS = re.compile(r"(?:(?<=otebook )|(?<=otebooks ))\d\d(?:(?:, | and | to )\d\d)*\b")


def _link_notebooks(app: Any, doctree: Any) -> None:
    """Where prose says "notebook 11" or "notebooks 11 and 13", the numbers lead to the notebooks that this book has."""
    pages = {page.removeprefix("notebooks/")[:2]: page for page in app.env.found_docs if page.startswith("notebooks/")}
    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.reference | addnodes.pending_xref):
            continue
        pieces = _pieces(str(text), pages, app.env.docname)
        if len(pieces) > 1:
            text.parent.replace(text, pieces)


def _pieces(text: str, pages: dict[str, str], here: str) -> list[nodes.Node]:
    """`text` as nodes: a link for each number of a notebook that has a page, but the one that is being read."""
    found, done = [], 0
    for group in _NUMBERS.finditer(text):
        for number in re.finditer(r"\d\d", group.group()):
            page, start = pages.get(number.group()), group.start() + number.start()
            if page is None or page == here:
                continue
            link = addnodes.pending_xref(
                "", nodes.inline("", number.group()), refdomain="std", reftype="doc", refexplicit=True,
                reftarget=f"/{page}", refwarn=True, refdoc=here,
            )  # fmt: skip
            found += [nodes.Text(text[done:start]), link]
            done = start + 2
    return [*found, nodes.Text(text[done:])]

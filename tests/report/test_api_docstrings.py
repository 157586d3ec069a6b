"""What breaks the API reference, found without building it: the book fails at any warning, a minute later."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from collections import Counter, namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docutils.core import publish_doctree
from docutils.nodes import list_item, system_message
from sphinx.ext.napoleon import Config, GoogleDocstring

from labkit.report import book

as_written = runpy.run_path(str(Path(__file__).parents[2] / "book/_extensions/book_page.py"))["_as_written"]

_MEMBERS = re.compile(r"automodule:: (\S+)\n(?: +:.*\n)*? +:members: (.+)")


def described() -> Iterator[tuple[str, str, Any]]:
    """(module, name, object) of everything that a page of the reference lists by name."""
    for page in book.api_pages().values():
        for module, names in _MEMBERS.findall(page):
            for name in names.split(", "):
                yield module, name, getattr(importlib.import_module(module), name)


def docstrings() -> Iterator[tuple[str, str]]:
    """(place, docstring) of these and of their public members."""
    for module, name, found in described():
        if not inspect.isclass(found) and not inspect.isroutine(found):
            continue
        yield f"{module}.{name}", inspect.getdoc(found) or ""
        if inspect.isclass(found):
            for member, value in vars(found).items():
                if not member.startswith("_") and (text := inspect.getdoc(value)) and callable(value):
                    yield f"{module}.{name}.{member}", text


def complaints(text: str) -> list[str]:
    """What docutils says of a docstring on the book's way to Sphinx: its own step, then Google's form. Roles and
    directives of Sphinx's own are not docutils' to know."""
    lines = text.splitlines()
    as_written(None, "", "", None, None, lines)
    tree = publish_doctree(str(GoogleDocstring(lines, Config())), settings_overrides={"report_level": 5})
    messages = [message.astext() for message in (*tree.findall(system_message), *tree.parse_messages)]
    return [
        message for message in messages if not re.search(r"Unknown (interpreted|directive)|No role|No dir", message)
    ]


def test_the_pages_list_most_of_the_library():
    assert len({module for module, _, _ in described()}) > 15
    assert len(list(docstrings())) > 300


def test_a_listed_name_is_found_by_whoever_looks_through_its_package():
    absent = [f"{module}.{name}" for module, name, _ in described() if name not in dir(importlib.import_module(module))]
    assert absent == []


def test_nothing_is_described_twice():
    homes = Counter(
        f"{found.__module__}.{found.__qualname__}"
        for _, _, found in described()
        if inspect.isclass(found) or inspect.isfunction(found)
    )
    assert [home for home, times in homes.items() if times > 1] == []


def test_docstrings_are_markup_that_sphinx_reads():
    found = {place: told for place, text in docstrings() if (told := complaints(text))}
    assert found == {}


def test_packages_docstrings_are_markup_and_their_files_a_list():
    named = {name for page in book.api_pages().values() for name in re.findall(r"automodule:: (\S+)", page)}
    texts = {name: inspect.getdoc(importlib.import_module(name)) or "" for name in named}
    assert {name: told for name, text in texts.items() if (told := complaints(text))} == {}
    files = ["| file | what |", "| --- | --- |", "| `a.py`, `b.py` | one |", "c.py   two | three", "d/  four"]
    lines = ["Files.", "", *files, "", "End."]
    as_written(None, "", "", None, None, lines)
    entries = ["* `a.py`, `b.py`: one", r"* `c.py`: two \| three", "* `d/`: four"]
    assert lines == ["Files.", "", *entries, "", "End."]


@pytest.mark.parametrize(
    "text",
    [
        'One.\n\n* ("a", b): what it is; ("c", d): more of it\n  ("e"): and\n    deeper\n  again\n',
        "One.\n\nA list:\n    * a\n  b\n",
        "An `unclosed ``literal.\n",
    ],
)
def test_broken_markup_is_found(text):
    assert complaints(text)


@pytest.mark.parametrize("colons", [":", "::"])
def test_an_example_is_a_code_block_however_it_is_announced(colons):
    text = f"One.\n\nUse it{colons}\n\n    with it:\n        ...\n    print()\n\nAnd so on."
    assert complaints(text) == []


def test_what_python_says_of_a_field_by_itself_is_left_out():
    lines = (namedtuple("Pair", "left right").left.__doc__ or "").splitlines()
    assert lines
    as_written(None, "", "", None, None, lines)
    assert lines == []


def written(text: str, what: str = "class") -> str:
    """A docstring as Sphinx gets it: the book's own step, then Google's form."""
    lines = text.splitlines()
    as_written(None, what, "", None, None, lines)
    return str(GoogleDocstring(lines, Config(napoleon_use_ivar=True), what=what, name="labkit.it"))


def test_attributes_described_together_are_each_described():
    text = "What it is.\n\nAttributes:\n    first, last: positions,\n        both inside.\n    count: how many."
    assert re.findall(r":ivar (.+)", written(text)) == ["first: positions,", "last: positions,", "count: how many."]
    assert written(text).count("both inside") == 2


def test_a_list_stays_a_list_whatever_its_entries_hold():
    tree = publish_doctree(written("What it is:\n\n* (1, id) - a * b\n* (2, id) - c"))
    assert [entry.astext() for entry in tree.findall(list_item)] == ["(1, id) - a * b", "(2, id) - c"]


def test_a_colon_in_a_property_s_line_ends_no_type():
    text = "What may be used: the hard line."
    assert publish_doctree(written(text, what="property")).astext().strip() == text

"""What README.md and book/architecture.md say is so: links, commands, names, the example."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
README, ARCHITECTURE = CLONE / "README.md", CLONE / "book" / "architecture.md"
pytestmark = pytest.mark.skipif(not ARCHITECTURE.exists(), reason="needs a clone")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


def test_every_make_target_that_the_readme_names_exists():
    makefile = (CLONE / "Makefile").read_text()
    named = set(re.findall(r"`make\s([a-z-]+)", README.read_text()))
    assert {"report", "test", "lab", "book"} <= named
    assert all(re.search(rf"^{name}:", makefile, re.M) for name in named), named


@pytest.mark.parametrize("path", [README, ARCHITECTURE], ids=lambda path: path.name)
def test_every_link_leads_to_a_file(path):
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text())
    assert path != README or links
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_readme_lists_every_notebook():
    listed = README.read_text()
    assert [p.name for p in sorted((CLONE / "notebooks").glob("*.ipynb")) if p.name not in listed] == []


def test_each_notebook_has_a_state_and_leads_to_the_code_that_it_reads():
    rows = [line for line in README.read_text().splitlines() if line.startswith("| [") and ".ipynb)" in line]
    assert len(rows) == len(list((CLONE / "notebooks").glob("*.ipynb")))
    state_and_code = re.compile(r"\| complete[^|]* \| \[[\w/.]+\]\(labkit/[\w/]+(\.py)?\) \|$")
    assert [row for row in rows if not state_and_code.search(row)] == []


def test_every_command_of_the_readme_is_one():
    from typer.main import get_command

    from labkit.cli import app

    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
    assert lines
    for line in lines:
        program, name, *arguments = shlex.split(line, comments=True)
        assert program == ".venv/bin/labkit"
        with get_command(app).make_context("labkit", [name]) as context:
            # Parses the words, and ends the test if the command does not take them; nothing is run.
            get_command(app).get_command(context, name).make_context(name, arguments)


def test_the_goldens_that_the_readme_names_are_there():
    from labkit.parity.goldens import stored_goldens

    named = re.findall(r"--against (\S+/\S+)", README.read_text())
    assert named
    assert set(named) <= set(stored_goldens())


def test_the_example_of_the_readme_runs(capsys):
    (example,) = blocks(README, "python")
    exec(example, {})
    assert capsys.readouterr().out.strip()


def test_every_name_and_path_of_the_architecture_page_exists():
    text = ARCHITECTURE.read_text()
    names = set(re.findall(r"`(labkit(?:\.\w+)+)`", text))
    paths = set(re.findall(r"`((?:tests|recipes|data|notebooks|kernels)/[\w/.]*)`", text))
    assert len(names) > 3
    assert len(paths) > 3
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute) or importlib.util.find_spec(name), name
    missing = [path for path in paths if not any((root / path).exists() for root in (CLONE, CLONE / "labkit"))]
    assert missing == []


def test_the_architecture_page_names_every_package_in_its_order():
    import tomllib

    house = blocks(ARCHITECTURE, "")[0].split()
    layers = tomllib.loads((CLONE / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    for lower, upper in zip(reversed(layers), list(reversed(layers))[1:], strict=False):
        for below in lower.split(" | "):
            for above in upper.split(" | "):
                places = [next(i for i, word in enumerate(house) if word.strip(",") == name) for name in (below, above)]
                assert places == sorted(places), (below, above)

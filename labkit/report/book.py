"""The Jupyter Book: built from notebooks that papermill executed, whole or not at all, without any external request."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import labkit
from labkit import resources
from labkit.report import contents, runner, summary
from labkit.report.executed import without_colours
from labkit.report.outcomes import Progress

BUILD_TIMEOUT = 1800  # seconds that Jupyter Book may take
SOURCES = Path(labkit.__file__).resolve().parent.parent / "book"

_BUILT = {"html", "sources", "reports", "_build"}  # what a build puts into its folder
# Pages of the repository that are pages of the book too, by their names there.
_ADOPTED = {
    "kernels.md": "labkit/kernels/README.md",
    "kernels_measured.md": "labkit/kernels/measured.md",
    "tiny_hybrid.md": "data/models/tiny-hybrid/MODEL_CARD.md",
}
# Modules that are entry points, not an interface.
_NOT_API = ("commands", "worker", "cli", "start", "__main__")


class BookError(RuntimeError):
    """The book was not built; the message says why."""


@dataclass(frozen=True)
class Book:
    """A finished site: its first page, all its pages, and those made of notebooks."""

    index: Path
    pages: tuple[Path, ...]
    notebooks: tuple[Path, ...]


def build(
    output: Path,
    *,
    reports: Path | None = None,
    jobs: int | None = None,
    sources: Path | None = None,
    packages: Sequence[str] | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> Book:
    """Build the site into `output`/html.

    Args:
        output: folder for the site and its staged sources.
        reports: folder that `labkit report` wrote; without it the laboratory's notebooks are run first.
        jobs: notebooks at a time, if they are run.
        sources: the book's own pages and settings; those of the clone by default.
        packages: packages that the API reference describes ("models"); all public ones by default.
        progress: called for every step of a notebook.
        say: called with a line on what is happening.

    Raises:
        BookError: a notebook failed, a source or tool is missing, a warning came up, a page is missing, or `output`
            holds what no build left there.
    """
    sources = sources or SOURCES
    if not (sources / "_config.yml").is_file():
        raise BookError(f"the book's sources are not in {sources}: build it from a clone, not from an installed wheel")
    output = output.resolve()
    _refuse_what_is_not_ours(output)
    if reports is None:
        reports = output / "reports"
        outcomes = runner.run(
            sorted(resources.notebooks_folder().glob("*.ipynb")), reports, jobs=jobs, progress=progress
        )
        summary.write(summary.summarise(outcomes), reports)
    notebooks = _executed(reports)
    stage = output / "sources"
    _stage(stage, sources, reports, notebooks, packages)
    say(f"building {len(notebooks)} notebooks and the API reference")
    _sphinx(stage, output)
    return _finished(output / "html", stage, notebooks)


def _refuse_what_is_not_ours(output: Path) -> None:
    """A build begins by removing the last one: nobody's `html` and `sources` but its own."""
    if output.exists() and not output.is_dir():
        raise BookError(f"{output} is no folder: name one for the site")
    found = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    for name in found:
        if name not in _BUILT and not name.startswith("."):
            raise BookError(f"{output} holds {name!r}, which is no part of a book: name a folder of its own")


def api_pages(packages: Sequence[str] | None = None) -> dict[str, str]:
    """The API reference as Markdown pages by file name: an index, and a page for each public package.

    A package that lists its names in `__all__` is described by them; of one without such a list, every module is.
    """
    pages, entries = {}, []
    public = sorted(module.name for module in pkgutil.iter_modules(labkit.__path__) if _is_api(module.name))
    for package in packages or public:
        name = f"labkit.{package}"
        blocks = [f"# {name}", "", *_api_blocks(name)]
        pages[f"{name}.md"] = "\n".join(blocks)
        says = (importlib.import_module(name).__doc__ or "").strip().partition("\n")[0]
        entries.append(f"| {{doc}}`{name}` | {says} |")
    short = ", ".join(f"{{py:obj}}`labkit.{name} <{home}.{name}>`" for name, home in labkit._HOMES.items())
    index = [
        "# API reference",
        "",
        "The public names of every package, from their docstrings.",
        f"`import labkit` itself offers what most programs need: {short}.",
        "",
        *("| package | what it is |", "|---|---|", *entries, ""),
    ]
    pages["index.md"] = "\n".join(index)
    return pages


def _is_api(name: str) -> bool:
    return not name.startswith("_") and name not in _NOT_API


def _api_blocks(name: str) -> list[str]:
    module = importlib.import_module(name)
    if not hasattr(module, "__path__"):
        return _automodule(name, [":members:"])
    listed = getattr(module, "__all__", None)
    below = sorted(entry.name for entry in pkgutil.iter_modules(module.__path__) if _is_api(entry.name))
    if listed is None:
        blocks, chosen = _automodule(name, []), below
    else:
        # A listed name may be a submodule: that one is described by its own members.
        names = [entry for entry in listed if not inspect.ismodule(getattr(module, entry))]
        packages = {entry.name for entry in pkgutil.iter_modules(module.__path__) if entry.ispkg}
        # What a package below offers too is described there alone.
        own = [entry for entry in names if _package_below(module, entry) not in packages]
        blocks = _automodule(name, [f":members: {', '.join(own)}", ":imported-members:"] if own else [])
        chosen = [entry for entry in below if entry in packages or (entry in listed and entry not in names)]
    for entry in chosen:
        blocks += [f"## {name.removeprefix('labkit.')}.{entry}", "", *_api_blocks(f"{name}.{entry}")]
    return blocks


def _package_below(module: Any, entry: str) -> str | None:
    """The part of `module` in which the object that it offers as `entry` is defined, if that offers it too."""
    home = getattr(getattr(module, entry), "__module__", None) or ""
    if not home.startswith(f"{module.__name__}."):
        return None
    part = home.removeprefix(f"{module.__name__}.").partition(".")[0]
    offered = getattr(importlib.import_module(f"{module.__name__}.{part}"), "__all__", ())
    return part if entry in offered else None


def _automodule(name: str, options: Sequence[str]) -> list[str]:
    return ["```{eval-rst}", f".. automodule:: {name}", *(f"   {option}" for option in options), "```", ""]


def _executed(reports: Path) -> list[Path]:
    """The executed notebooks of a report in which everything passed."""
    table = reports / "summary.json"
    if not table.is_file():
        how = f"`make report`, or `labkit report --output {reports}`"
        raise BookError(f"{reports} holds no report (summary.json is missing): run {how}")
    result = json.loads(table.read_text(encoding="utf-8"))
    failed = [one["failure"] for one in result["notebooks"] if not one["passed"]]
    if failed:
        raise BookError(f"{len(failed)} of {len(result['notebooks'])} notebooks failed: {'; '.join(failed)}")
    notebooks = [reports / one["notebook"] for one in result["notebooks"]]
    missing = [path.name for path in notebooks if not path.is_file()]
    if missing or not notebooks:
        raise BookError(f"{reports} lacks executed notebooks: {', '.join(missing) or 'it lists none'}")
    return notebooks


def _stage(
    stage: Path, sources: Path, reports: Path, notebooks: Sequence[Path], packages: Sequence[str] | None
) -> None:
    """Put everything that the site is made of into one fresh folder."""
    if stage.exists():
        shutil.rmtree(stage)
    shutil.copytree(sources, stage, ignore=shutil.ignore_patterns("_build", "reports", "vendor", "__pycache__"))
    (stage / "notebooks").mkdir()
    for path in notebooks:
        shutil.copy2(path, stage / "notebooks" / path.name)
    shutil.copy2(reports / "summary.md", stage / "results.md")
    (stage / "parameters.md").write_text(contents.parameters_page(notebooks), encoding="utf-8")
    (stage / "api").mkdir()
    for name, text in api_pages(packages).items():
        (stage / "api" / name).write_text(text, encoding="utf-8")
    for name, source in _ADOPTED.items():
        page = SOURCES.parent / source
        beside = {Path(other).name: own for own, other in _ADOPTED.items() if Path(other).parent == Path(source).parent}
        (stage / name).write_text(contents.adopted(page.read_text(encoding="utf-8"), beside), encoding="utf-8")
        for picture in page.parent.glob("*.svg"):
            shutil.copy2(picture, stage / picture.name)
    _write_contents(stage, notebooks)
    vendor = stage / "_assets" / "vendor"
    vendor.mkdir(parents=True)
    shutil.copy2(_mathjax(), vendor / "tex-svg.js")


def _write_contents(stage: Path, notebooks: Sequence[Path]) -> None:
    """The table of contents of what this book has, and the list of its notebooks where a page asks for it."""
    import yaml

    files = [path.relative_to(stage) for path in stage.rglob("*") if path.suffix in (".md", ".ipynb")]
    table = yaml.safe_load((stage / "_toc.yml").read_text(encoding="utf-8"))
    table = contents.table_of_contents(table, [path.with_suffix("").as_posix() for path in files])
    (stage / "_toc.yml").write_text(yaml.safe_dump(table, sort_keys=False), encoding="utf-8")
    for page in stage.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if contents.NOTEBOOKS_HERE in text:
            listed = contents.list_of_notebooks(table, notebooks)
            page.write_text(text.replace(contents.NOTEBOOKS_HERE, listed), encoding="utf-8")


def _mathjax() -> Path:
    """MathJax 3 as one script with its fonts inside, from the Python package that carries it."""
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None or not spec.submodule_search_locations:
        raise BookError("the book's tools are missing: install them with `uv sync --group book`")
    return Path(spec.submodule_search_locations[0]) / "static" / "mathjax" / "tex-svg.js"


def _sphinx(stage: Path, output: Path) -> None:
    if importlib.util.find_spec("jupyter_book") is None:
        raise BookError("Jupyter Book is missing: install it with `uv sync --group book`")
    shutil.rmtree(output / "_build", ignore_errors=True)
    # The package cannot be run with -m, and its script's place on PATH is not certain.
    command = [sys.executable, "-c", "import sys; from jupyter_book.cli.main import main; sys.exit(main())"]
    command += ["build", "-W", "--keep-going", "--all", "--path-output", str(output)]
    command.append(str(stage))
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_TIMEOUT
        )
    except subprocess.TimeoutExpired:
        raise BookError(f"the build took longer than {BUILD_TIMEOUT} s and was stopped") from None
    if done.returncode:
        lines = without_colours(done.stdout).splitlines()
        told = [line for line in lines if re.search(r"WARNING|ERROR|[Ee]rror:", line)]
        raise BookError("the book has warnings or errors:\n" + "\n".join(told or lines[-30:]))
    shutil.rmtree(output / "html", ignore_errors=True)
    (output / "_build" / "html").rename(output / "html")


def _finished(html: Path, stage: Path, notebooks: Sequence[Path]) -> Book:
    pages = {path.relative_to(stage).with_suffix(".html") for path in stage.rglob("*.md")}
    own = [Path("notebooks") / path.with_suffix(".html").name for path in notebooks]
    missing = sorted(str(page) for page in {*pages, *own} if not (html / page).is_file())
    if missing:
        raise BookError(f"the book lacks pages: {', '.join(missing)}")
    return Book(
        html / "index.html", tuple(sorted(html / page for page in {*pages, *own})), tuple(html / p for p in own)
    )

"""The book: every page there, outputs inside, nothing fetched, and no build from a failed report."""

from __future__ import annotations

import errno
import html
import json
import re
from pathlib import Path

import pytest

from labkit.report import book, contents
from labkit.resources import notebooks_folder

# The first test builds the book, or waits until another process has.
pytestmark = pytest.mark.timeout(900)

# What names an address without fetching it: links to follow, XML namespaces, the generators' own credits.
LOADING = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["'](?:https?:)?//
    |<link\b(?![^>]*rel=["'](?:canonical|author|license)["'])[^>]*\bhref=["'](?:https?:)?//
    |@import\s+url\(["']?https?:""",
    re.VERBOSE,
)


def test_every_notebook_has_a_page_with_its_outputs(built_book: book.Book) -> None:
    names = {path.stem for path in notebooks_folder().glob("*.ipynb")}
    assert {page.stem for page in built_book.notebooks} == names
    for page in built_book.notebooks:
        text = page.read_text(encoding="utf-8")
        assert text.count("cell_output") >= 5, page.name
        assert "cell_input" in text


def test_packages_have_a_page_with_their_names(built_book: book.Book) -> None:
    pages = {page.name: page for page in built_book.pages}
    for package, name in (("measure", "ModelCosts"), ("report", "record"), ("caches", "Cache")):
        assert name in pages[f"labkit.{package}.html"].read_text(encoding="utf-8")


def test_the_reference_prints_signatures_that_sphinx_could_read(built_book: book.Book) -> None:
    """One default that prints as an object, and a signature's types stand there by their full names, without links."""
    pages = [page for page in built_book.pages if page.parent.name == "api"]
    heads = [head for page in pages for head in re.findall(r'<dt class="sig.*?</dt>', main_of(page), re.S)]
    plain = [html.unescape(re.sub("<[^>]+>", "", head)) for head in heads]
    assert len(plain) > 300
    assert [head for head in plain if re.search(r"[<>~]| at 0x", head)] == []


def test_pages_of_the_repository_lead_to_each_other(built_book: book.Book) -> None:
    kernels = main_of(built_book.index.with_name("kernels.html"))
    assert 'href="kernels_measured.html"' in kernels


def test_only_code_is_coloured(built_book: book.Book) -> None:
    """A block without a language is a shell's or a sample's: Python's keywords are words there."""
    card = main_of(built_book.index.with_name("tiny_hybrid.html"))
    blocks = re.findall(r'<div class="highlight-(\w+) notranslate">', card)
    assert blocks
    assert set(blocks) == {"text"}


def main_of(page: Path) -> str:
    """The HTML of a page's own text, without side bars."""
    (text,) = re.findall(r'<article class="bd-article.*?</article>', page.read_text(encoding="utf-8"), re.S)
    return text


def test_the_front_page_leads_to_every_notebook_with_its_question(built_book: book.Book) -> None:
    text = main_of(built_book.index.with_name("intro.html"))
    for path in notebooks_folder().glob("*.ipynb"):
        assert f'href="notebooks/{path.stem}.html"' in text
    assert "Foundations" in text
    assert "How fast could this machine possibly run this model" in text
    assert contents.NOTEBOOKS_HERE not in text


def test_prose_that_names_a_notebook_leads_to_it(built_book: book.Book) -> None:
    pages = {page.name[:2]: page for page in built_book.notebooks}
    text = main_of(pages["11"])
    assert re.search(r'notebooks <a [^>]*href="13_end[^>]*>.*?13.*?</a> and <a [^>]*href="14_what', text)
    assert 'href="11_' not in text  # nothing leads to the page that is being read


def test_every_command_and_parameter_has_its_line(built_book: book.Book) -> None:
    commands, parameters = (main_of(built_book.index.with_name(f"{name}.html")) for name in ("commands", "parameters"))
    for name in ("labkit report", "labkit generate", "labkit kernels check", "labkit cache clear", "--positions"):
        assert name in commands
    assert parameters.count("<table") == len(built_book.notebooks)
    assert "rows that decode together" in parameters


def test_no_page_loads_anything_from_elsewhere(built_book: book.Book) -> None:
    for page in built_book.pages:
        found = LOADING.search(page.read_text(encoding="utf-8"))
        assert not found, f"{page.name}: {found.group()}"


def test_search_knows_the_notebooks(built_book: book.Book) -> None:
    index = (built_book.index.parent / "searchindex.js").read_text(encoding="utf-8")
    for page in built_book.notebooks:
        assert page.stem in index


def test_the_results_page_holds_the_records(built_book: book.Book) -> None:
    text = (built_book.index.parent / "results.html").read_text(encoding="utf-8")
    assert "decode step at 4K" in text
    assert "counted" in text


def test_the_api_reference_misses_no_public_package() -> None:
    pages = book.api_pages()
    assert {"labkit.devices.md", "labkit.kernels.md", "labkit.models.md", "labkit.engine.md"} <= set(pages)
    assert not any("commands" in text or "labkit.cli" in text for text in pages.values())


class TestWhatIsRefused:
    def report(self, folder: Path, **notebook) -> Path:
        entry = {"notebook": "01_x.ipynb", "passed": True, "failure": None} | notebook
        (folder / "summary.json").write_text(json.dumps({"notebooks": [entry]}))
        return folder

    @pytest.mark.parametrize("theirs", ["sources/notes.md", "site"])
    def test_a_folder_of_something_else_is_left_alone(self, tmp_path: Path, theirs: str) -> None:
        kept = tmp_path / "project" / theirs
        kept.parent.mkdir(parents=True)
        kept.write_text("mine")
        (tmp_path / "project" / "README.md").write_text("mine too")
        output = kept if theirs == "site" else tmp_path / "project"
        with pytest.raises(book.BookError, match=r"no folder|holds 'README.md', which is no part of a book"):
            book.build(output, reports=self.report(tmp_path))
        assert kept.read_text() == "mine"

    def test_what_cannot_be_removed_is_named_with_its_reason(self, tmp_path: Path, write_notebook, monkeypatch) -> None:
        """On a read-only disk; copying over the last build would say that a file exists."""
        write_notebook(tmp_path / "01_x.ipynb")
        (tmp_path / "site" / "sources").mkdir(parents=True)

        def refuse(path: Path, ignore_errors: bool = False) -> None:
            if not ignore_errors:
                raise OSError(errno.EROFS, "Read-only file system", str(path))

        monkeypatch.setattr(book.shutil, "rmtree", refuse)
        with pytest.raises(OSError, match=r"Read-only file system: '.*/site/sources'"):
            book.build(tmp_path / "site", reports=self.report(tmp_path))

    def test_a_failed_notebook_is_named(self, tmp_path: Path) -> None:
        reports = self.report(tmp_path, passed=False, failure="01_x.ipynb, In [3] (1/0): ZeroDivisionError")
        with pytest.raises(book.BookError, match=r"1 of 1 notebooks failed: 01_x.ipynb, In \[3\]"):
            book.build(tmp_path / "site", reports=reports)
        assert not (tmp_path / "site").exists()

    def test_a_missing_notebook(self, tmp_path: Path) -> None:
        with pytest.raises(book.BookError, match=r"lacks executed notebooks: 01_x\.ipynb"):
            book.build(tmp_path / "site", reports=self.report(tmp_path))

    def test_a_folder_without_a_report(self, tmp_path: Path) -> None:
        with pytest.raises(book.BookError, match=r"holds no report .*make report"):
            book.build(tmp_path / "site", reports=tmp_path)

    def test_an_installed_wheel(self, tmp_path: Path) -> None:
        with pytest.raises(book.BookError, match="build it from a clone"):
            book.build(tmp_path / "site", reports=tmp_path, sources=tmp_path)

    def test_a_warning_fails_the_build_and_is_shown(self, tmp_path: Path, write_notebook, monkeypatch) -> None:
        reports = self.report(tmp_path)
        write_notebook(reports / "01_x.ipynb", "x = 1")
        (reports / "summary.md").write_text("# Results\n\n{doc}`no-such-page`\n")
        site = tmp_path / "sources"
        site.mkdir()
        (site / "_config.yml").write_text("title: t\nexecute: {execute_notebooks: 'off'}\nonly_build_toc_files: true\n")
        (site / "_toc.yml").write_text(
            "format: jb-book\nroot: results\nchapters:\n- glob: notebooks/*\n- glob: api/*\n"
        )
        (site / "_assets").mkdir()
        monkeypatch.setattr(book, "api_pages", lambda packages: {"index.md": "# API\n"})
        with pytest.raises(book.BookError, match="no-such-page"):
            book.build(tmp_path / "site", reports=reports, sources=site)
        assert not (tmp_path / "site" / "html").exists()

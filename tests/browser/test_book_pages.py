"""The book's pages in a real browser, opened as files: math, plots, sliders, search, and not one external request."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from labkit.report.book import Book

# The first test builds the book, or waits until another process has.
pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

# First lines of code, of printed outputs and of samples that are wider than their box in the window of 1280 pixels.
CUT_OFF = """[...document.querySelectorAll('.cell_input pre, .cell_output pre, .highlight-text pre')]
    .filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.innerText.split('\\n')[0])"""
FIRST = "notebooks/01_the_machine_and_the_model.html"


def test_every_page_is_quiet_and_as_wide_as_its_window(built_book: Book, open_page: Any) -> None:
    watched = open_page()
    for path in built_book.pages:
        watched.page.goto(path.as_uri(), wait_until="load")
        watched.typeset()
        assert watched.page.title()
        for width in (400, 1280):
            watched.page.set_viewport_size({"width": width, "height": 1000})
            watched.page.wait_for_function("width => innerWidth === width", arg=width)
            assert watched.page.evaluate("document.documentElement.scrollWidth") <= width, (path.name, width)
        assert watched.page.evaluate(CUT_OFF) == [], path.name
    watched.assert_quiet()


def test_math_and_plots_are_drawn(built_book: Book, open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    page.goto((built_book.index.parent / FIRST).as_uri())
    page.wait_for_selector("mjx-container svg")
    watched.typeset()
    assert page.locator("mjx-container").count() >= 5
    assert "\\max" not in page.locator("main").inner_text()
    pictures = page.locator("main .cell_output img")
    assert pictures.count() >= 3
    for index in range(pictures.count()):
        assert pictures.nth(index).evaluate("image => image.decode().then(() => image.naturalWidth > 100)")
    assert page.locator("main .cell_output table").count() >= 3
    watched.assert_quiet()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_slider_moves_the_picture(scheme: str, built_book: Book, open_page: Any) -> None:
    watched = open_page(color_scheme=scheme)
    page = watched.page
    page.goto((built_book.index.parent / FIRST).as_uri())
    box = page.locator(".labkit-frames").first
    slider = box.locator("input[type=range]")
    marks = "box => [...box.querySelectorAll('[data-mark]')].map(mark => mark.getAttribute('d'))"
    before, note = box.evaluate(marks), box.locator("p").inner_text()
    slider.focus()
    page.keyboard.press("End")
    last = slider.get_attribute("max")
    assert slider.input_value() == last
    assert box.evaluate(marks) != before
    assert box.locator("p").inner_text() != note
    assert box.locator("output").inner_text() == slider.get_attribute("aria-valuetext")
    slider.scroll_into_view_if_needed()
    # Text must stand out from what lies behind it in either scheme.
    assert contrast(box) > 7
    watched.assert_quiet()


def test_two_sliders_of_a_page_are_independent(built_book: Book, open_page: Any) -> None:
    page = open_page().page
    page.goto((built_book.index.parent / FIRST).as_uri())
    outputs = page.locator(".labkit-frames output")
    assert outputs.count() >= 2
    second = outputs.nth(1).inner_text()
    page.locator(".labkit-frames input").first.focus()
    page.keyboard.press("Home")
    assert outputs.nth(1).inner_text() == second


def test_the_first_position_stands_there_without_scripts(built_book: Book, open_page: Any) -> None:
    page = open_page(java_script_enabled=False).page
    page.goto((built_book.index.parent / FIRST).as_uri())
    box = page.locator(".labkit-frames").first
    assert box.locator("[data-mark]").first.get_attribute("d").startswith("M")
    assert "tokens" in box.locator("output").inner_text()


@pytest.fixture
def served(built_book: Book) -> Iterator[str]:
    """The book's address on this machine: a browser lets no page opened as a file read another one."""
    handler = functools.partial(_Silent, directory=str(built_book.index.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def test_search_finds_pages_and_quotes_them(served: str, open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    page.goto(f"{served}/search.html?q=recurrence")
    # Results come one by one, each with its quotation behind it: waited for by name, not read at some moment.
    result = page.locator("#search-results li", has_text="machine and the model").first
    result.locator("a").first.wait_for()
    result.locator("p.context").first.wait_for()
    watched.assert_quiet()


def contrast(box: Any) -> float:
    """WCAG contrast of a block's text against the nearest opaque background behind it."""
    colours = box.evaluate(
        """element => {
          const text = getComputedStyle(element.querySelector('label')).color;
          let behind = element;
          while (behind) {
            const colour = getComputedStyle(behind).backgroundColor;
            if (!/rgba\\(.*, 0\\)|transparent/.test(colour)) return [text, colour];
            behind = behind.parentElement;
          }
          return [text, 'rgb(255, 255, 255)'];
        }"""
    )
    light, dark = sorted((_luminance(colour) for colour in colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(float(part)) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

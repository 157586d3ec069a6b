"""A real Chromium, and a page that remembers everything it asked for and every error it met."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from labkit.doctor import find_browser

REQUIRED = "LABKIT_REQUIRE_BROWSER"
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync"]
QUIET += ["--disable-dev-shm-usage"]  # a container's is too small for a large page
PATIENCE = 200_000  # milliseconds until a wait is given up: what is waited for comes, on a busy machine late


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """For one file: while it lives an event loop runs in this thread, and no other file's test could start its own."""
    program = find_browser()
    if program is None:
        message = "no Chromium found: apt-get install chromium, or name one in LABKIT_BROWSER"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{message}; {REQUIRED}=1 requires it")
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=QUIET, timeout=PATIENCE)
        yield running
        running.close()
    assert asyncio._get_running_loop() is None


@dataclass
class Watched:
    """A page and what happened on it."""

    page: Any
    external: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true, however long the page takes to come to it."""
        self.page.wait_for_function(f"() => {condition}")

    def typeset(self) -> None:
        """Wait until the page's math and its fonts are drawn, where it has any: both come after its load event."""
        self.page.evaluate("async () => { await window.MathJax?.startup?.promise; await document.fonts.ready }")

    def assert_quiet(self) -> None:
        """Nothing asked of another machine, nothing missing, no script error."""
        assert self.external == []
        assert self.failed == []
        assert self.errors == []


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """`open_page(**context options)` gives a `Watched` page.

    Where LABKIT_SCREENSHOTS names a folder, every page's last picture is kept there.
    """
    contexts: list[tuple[Any, Watched]] = []

    def start(**options: Any) -> Watched:
        context = browser.new_context(viewport={"width": 1280, "height": 1000}, **options)
        context.set_default_timeout(PATIENCE)
        watched = Watched(context.new_page())
        page = watched.page
        page.on("request", lambda r: None if _is_local(r.url) else watched.external.append(r.url))
        page.on("requestfailed", lambda r: None if _was_left(r) else watched.failed.append(f"{r.url} ({r.failure})"))
        page.on("response", lambda r: watched.failed.append(f"{r.url} ({r.status})") if r.status >= 400 else None)
        page.on("pageerror", lambda error: watched.errors.append(error.message))
        contexts.append((context, watched))
        return watched

    yield start
    for number, (context, watched) in enumerate(contexts):
        if folder := os.environ.get("LABKIT_SCREENSHOTS"):
            name = f"{os.environ['PYTEST_CURRENT_TEST'].split('::')[-1].split(' ')[0]}-{number}.png"
            watched.page.screenshot(path=str(Path(folder) / name.replace("/", "_")), full_page=True)
        context.close()


def _was_left(request: Any) -> bool:
    """Whether the browser itself gave the request up, since the test went on to another page: nothing was missing.

    An icon, say, is asked for after the load event. A file that does not exist fails otherwise (ERR_FILE_NOT_FOUND).
    """
    return request.failure == "net::ERR_ABORTED"


def _is_local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:", "ws://127.0.0.1:"))

"""What a watched page counts as a failure: what is missing, never what the test itself did not wait for."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser


@pytest.fixture
def slow_site() -> Iterator[str]:
    """A page whose picture is never answered before the page is left, and one that is complete."""
    left = threading.Event()

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/never.svg":
                left.wait()
                return
            text = b"<script>new Image().src = 'never.svg'</script>" if self.path == "/slow" else b"<title>next</title>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    left.set()
    server.shutdown()
    server.server_close()


def test_a_request_that_the_test_left_behind_is_no_failure(slow_site: str, open_page: Any) -> None:
    watched = open_page()
    aborted: list[str] = []
    watched.page.on("requestfailed", lambda request: aborted.append(request.failure))
    with watched.page.expect_request("**/never.svg"):
        watched.page.goto(f"{slow_site}/slow", wait_until="commit")
    with watched.page.expect_event("requestfailed"):
        watched.page.goto(f"{slow_site}/next")
    assert aborted == ["net::ERR_ABORTED"]
    watched.assert_quiet()


def test_a_missing_file_is_a_failure(tmp_path: Path, open_page: Any) -> None:
    (tmp_path / "page.html").write_text("<img src='missing.svg'>")
    watched = open_page()
    watched.page.goto((tmp_path / "page.html").as_uri())
    with pytest.raises(AssertionError, match=r"missing\.svg"):
        watched.assert_quiet()


def test_a_request_to_another_machine_is_a_failure(tmp_path: Path, open_page: Any) -> None:
    (tmp_path / "page.html").write_text("<img src='http://192.0.2.1/far.svg'>")
    watched = open_page()
    watched.page.goto((tmp_path / "page.html").as_uri(), wait_until="commit")
    watched.page.wait_for_function("document.images.length == 1")
    with pytest.raises(AssertionError, match=r"192\.0\.2\.1"):
        watched.assert_quiet()

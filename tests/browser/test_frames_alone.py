"""A slider over whole pictures on a page that brings no styles of its own, as in JupyterLab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

from labkit.report.frames import figures_html

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("start", [0, 1])
def test_one_picture_is_seen_and_moving_changes_which(tmp_path: Path, open_page: Any, start: int) -> None:
    draw = lambda value: plt.figure(figsize=(1, 1))
    html = figures_html(range(3), draw, title="Pictures", slider="which", start=start)
    (tmp_path / "page.html").write_text(html)
    watched = open_page()
    watched.page.goto((tmp_path / "page.html").as_uri())
    pictures = watched.page.locator("img")
    seen = lambda: [pictures.nth(index).is_visible() for index in range(pictures.count())]
    assert seen() == [index == start for index in range(3)]
    watched.page.locator("input").focus()
    watched.page.keyboard.press("End")
    assert seen() == [False, False, True]
    watched.assert_quiet()

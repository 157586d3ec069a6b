"""JupyterLab in a real browser: a notebook opens, runs to its end, a widget moves and its output changes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.browser

TOKEN = "for-this-test"
PANEL = "window.jupyterapp.shell.currentWidget"
CELLS = [
    "import matplotlib.pyplot as plt\nfrom labkit.report import frames, live, record, style\nstyle.use()",
    "plt.plot([1, 2, 3], [1, 4, 9])\nplt.show()",
    "live(lambda n: print('n squared is', n * n), n=(1, 9))",
    "frames.plot([frames.Frame(str(i), {'y': ([0, 1], [0, i])}) for i in (1, 2, 3)], title='t', slider='i',\n"
    "            x=frames.Axis('x', 0, 1), y=frames.Axis('y', 0, 3))",
    "record('done', basis='checked', steps=steps)",
]


@pytest.fixture
def lab(tmp_path: Path, write_notebook) -> Iterator[str]:
    """The address of a JupyterLab of its own: none of the user's settings, kernels or news."""
    work = tmp_path / "work"
    work.mkdir()
    write_notebook(work / "small.ipynb", *CELLS)
    settings = tmp_path / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={work}"]
    command += ["--LabApp.news_url=None", "--LabApp.expose_app_in_browser=True"]
    with (tmp_path / "lab.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=work)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{address}/api?token={TOKEN}", server, tmp_path / "lab.log")
        yield address
    finally:
        server.terminate()
        server.wait(timeout=20)


def test_a_notebook_runs_to_its_end_and_its_widget_computes(lab: str, open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    page.goto(f"{lab}/lab/tree/small.ipynb?token={TOKEN}&reset")
    page.wait_for_function("() => window.jupyterapp?.shell?.currentWidget?.context?.isReady", timeout=60_000)
    # Running before the session is there would open a dialog that asks for a kernel.
    page.evaluate(f"async () => {{ await {PANEL}.context.ready; await {PANEL}.sessionContext.ready }}")
    assert page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')") is True
    page.wait_for_selector(".jp-OutputArea .widget-slider")

    prompts = page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts()
    assert prompts == [f"[{number}]:" for number in range(1, len(CELLS) + 2)]
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
    assert page.locator(".jp-RenderedSVG, .jp-OutputArea-output img").count() >= 1

    panel = page.locator(".widget-interact").first
    assert "n squared is 25" in panel.inner_text()
    panel.locator(".widget-readout").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.widget-interact').innerText.includes('n squared is 49')")

    # The slider of the static book works here too.
    slider = page.locator(".labkit-frames input")
    mark = page.locator(".labkit-frames [data-mark]").first
    before = mark.get_attribute("d")
    slider.focus()
    page.keyboard.press("End")
    assert mark.get_attribute("d") != before
    watched.assert_quiet()


def _wait_for(address: str, server: subprocess.Popen, log: Path, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer:\n{log.read_text(errors='replace')[-3000:]}")

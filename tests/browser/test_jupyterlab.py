"""JupyterLab in a real browser: a notebook opens, runs to its end, a widget moves and its output changes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

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
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    # It takes a free port by itself, and writes down which.
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1", "--port=0"]
    command += [f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={work}"]
    command += ["--LabApp.news_url=None", "--LabApp.expose_app_in_browser=True"]
    with (tmp_path / "lab.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=work)
    try:
        yield _wait_for(server, tmp_path / "runtime", tmp_path / "lab.log")
    finally:
        _end(server)


def test_a_notebook_runs_to_its_end_and_its_widget_computes(lab: str, open_page: Any) -> None:
    watched = open_page()
    page = watched.page
    page.goto(f"{lab}/lab/tree/small.ipynb?token={TOKEN}&reset")
    watched.until("window.jupyterapp?.shell?.currentWidget?.context?.isReady")
    # Running before the session is there would open a dialog that asks for a kernel.
    page.evaluate(f"async () => {{ await {PANEL}.context.ready; await {PANEL}.sessionContext.ready }}")
    assert page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')") is True
    page.wait_for_selector(".jp-OutputArea .widget-slider")

    # All has run, but the page draws when it finds the time: each thing is waited for, none looked for at some moment.
    prompts = [f"[{number}]:" for number in range(1, len(CELLS) + 2)]
    shown = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(prompt => prompt.innerText)"
    watched.until(f"JSON.stringify({shown}) === JSON.stringify({json.dumps(prompts)})")
    page.locator(".jp-RenderedSVG, .jp-OutputArea-output img").first.wait_for()
    watched.until("document.querySelector('.widget-interact').innerText.includes('n squared is 25')")
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0

    page.locator(".widget-interact .widget-readout").first.click()
    page.keyboard.press("Control+A")
    page.keyboard.type("7")
    page.keyboard.press("Enter")
    watched.until("document.querySelector('.widget-interact').innerText.includes('n squared is 49')")

    # The slider of the static book works here too.
    mark = page.locator(".labkit-frames [data-mark]").first
    before = mark.get_attribute("d")
    page.locator(".labkit-frames input").focus()
    page.keyboard.press("End")
    drawn = "document.querySelector('.labkit-frames [data-mark]').getAttribute('d')"
    watched.until(f"{drawn} !== {json.dumps(before)}")
    watched.assert_quiet()


def _wait_for(server: subprocess.Popen, runtime: Path, log: Path, seconds: float = 200) -> str:
    """The address of the server once it answers."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.poll() is None:
        try:
            (written,) = runtime.glob("jpserver-*.json")
            address = f"http://127.0.0.1:{json.loads(written.read_text())['port']}"
            with urllib.request.urlopen(f"{address}/api?token={TOKEN}", timeout=60):
                return address
        except (ValueError, urllib.error.URLError, ConnectionError, TimeoutError):  # not yet written, not yet listening
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer:\n{log.read_text(errors='replace')[-3000:]}")


def _end(server: subprocess.Popen) -> None:
    """End the server and its kernels, whether or not it finds the time to end them itself."""
    family = psutil.Process(server.pid).children(recursive=True) if server.poll() is None else []
    server.terminate()
    try:
        server.wait(timeout=60)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    for left in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()

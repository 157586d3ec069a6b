"""The native graph compiled in a process of its own, beside the notebooks that load no model: so none waits for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from labkit.devices import this_device

MODULE = "labkit.models.hybrid.native.ahead"
SECONDS = 600
"""That it may take; a notebook compiles what it misses by itself."""


CALLS = ("labkit.load(", "open_subject(", "small_hybrid(compiled")
"""What gives a notebook a model that the native graph may compute."""


def loads_model(notebook: Path) -> bool:
    """Whether a notebook loads a model, and so may need the native graph."""
    text = notebook.read_text(encoding="utf-8")
    return any(call in text for call in CALLS)


class Compilation:
    """Of the native graph, where MLX's device is a CPU and one of the notebooks loads a model.

    Args:
        notebooks: that are about to run.
        tell: told (step, text) at its start and end; step is "start", "done" or "failed".
    """

    def __init__(self, notebooks: Sequence[Path], tell: Callable[[str, str], None]):
        self._tell, self._began, self._process = tell, time.monotonic(), None
        if this_device().kind == "cpu" and any(map(loads_model, notebooks)):
            # In a session of its own Ctrl-C reaches its parent alone, which then ends it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            tell("start", "")

    @property
    def busy(self) -> bool:
        """Whether it goes on."""
        if self._process is None:
            return False
        seconds, code = time.monotonic() - self._began, self._process.poll()
        if code is None and seconds < SECONDS:
            return True
        said = self.end().strip().splitlines()
        if code == 0:
            self._tell("done", f"{seconds:.1f} s")
        else:
            self._tell("failed", f"native graph: notebooks compile it themselves ({said[-1] if said else code})")
        return False

    def end(self) -> str:
        """End it if it goes on; what it said."""
        if self._process is None:
            return ""
        process, self._process = self._process, None
        process.kill()
        return process.communicate()[1]

"""A figure with controls: a live widget where a kernel listens, one picture in a static page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from labkit.report.worker import STATIC_VARIABLE

AT_ONCE = 0.1
"""Seconds: a drawing that takes longer is drawn when a slider is let go, not at each place on the way."""


def is_static() -> bool:
    """Whether this notebook is being executed for a report or a book, where no kernel will answer a widget."""
    return bool(os.environ.get(STATIC_VARIABLE))


def live(draw: Callable[..., Any], **controls: Any) -> None:
    """Show `draw(**values)` under one control for each keyword, redrawn when a control moves.

    In a report it is drawn once, at the controls' first values; readers of a static page get `labkit.report.frames`
    beside it. Cells that call this carry the tag `nbval-ignore-output`.

    Args:
        draw: draws or prints with the given values.
        controls: an ipywidgets widget each, or what `ipywidgets.interactive` makes one of: (low, high, step), a list of
            choices, a bool.
    """
    from IPython.display import display
    from ipywidgets import interactive

    # A manual panel does not draw by itself: in a report the picture belongs in the cell, not in an Output widget.
    begin = time.perf_counter()
    panel = interactive(draw, {"manual": is_static()}, **controls)
    if not is_static():
        if time.perf_counter() - begin > AT_ONCE:
            for control in panel.kwargs_widgets:
                if control.has_trait("continuous_update"):
                    control.continuous_update = False
        display(panel)
        return
    names = [name for name, _, _ in panel.find_abbreviations(dict(controls))]
    draw(**{name: control.get_interact_value() for name, control in zip(names, panel.kwargs_widgets, strict=True)})

"""One look for every plot: matplotlib as SVG whose bytes repeat, and the colours that the figures share."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's palette: told apart by readers with any kind of colour vision, on white and on black.
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY = COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#b8a800",
    "#7f7f7f",
)

SETTINGS: dict[str, Any] = {
    "figure.figsize": (7.2, 3.6),
    "figure.dpi": 100,
    "figure.facecolor": "white",
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    # Ticks of a logarithmic axis as plain numbers, from 0.0001 to 10000.
    "axes.formatter.min_exponent": 5,
    "lines.linewidth": 2.0,
    "lines.markersize": 5,
    "legend.frameon": False,
    # Text stays text: a page can be searched and read aloud, and the file is a third of its size with glyph outlines.
    "svg.fonttype": "none",
    # Ids inside an SVG come from this salt and the drawing, no longer from chance.
    "svg.hashsalt": "labkit",
}

# A date or a version inside the file would change its bytes at every run.
SVG_METADATA = {"Date": None, "Creator": None}


def use() -> None:
    """Give every later plot the one style; inside a notebook, show figures as SVG whose bytes repeat.

    Equal drawings give equal bytes on one machine with one matplotlib. Another matplotlib lays text out a little
    differently, so cells that plot carry the tag `nbval-ignore-output`.
    """
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcParams.update(SETTINGS)
    mpl.rcParams["axes.prop_cycle"] = cycler(color=COLOURS)
    shell = _notebook_shell()
    if shell is None:
        return
    from matplotlib_inline.config import InlineBackend

    backend = InlineBackend.instance(parent=shell)
    backend.print_figure_kwargs = {"metadata": SVG_METADATA, "bbox_inches": None}
    backend.figure_formats = {"svg"}
    import matplotlib.pyplot as plt

    # After each cell pyplot would draw all figures for their windows. Here are none, and what is shown is drawn as SVG.
    plt.switch_backend(mpl.get_backend())
    plt.uninstall_repl_displayhook()


def svg(figure: Any) -> str:
    """`figure` as an SVG document; equal drawings give equal text."""
    import io

    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": SETTINGS["svg.hashsalt"], "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata=SVG_METADATA)
    return buffer.getvalue()


def _notebook_shell() -> Any | None:
    try:
        from IPython import get_ipython
    except ImportError:
        return None
    shell = get_ipython()
    return shell if shell is not None and hasattr(shell, "kernel") else None

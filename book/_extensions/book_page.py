"""Takes out of every page what reaches for the network or fails without it."""

from __future__ import annotations

from typing import Any


def setup(app: Any) -> dict[str, Any]:
    # Jupyter Book always loads sphinx-thebe, which offers to run cells on a public server and declares its settings
    # once for each builder start, so that a page with two of them stops with a script error.
    app.connect("html-page-context", _without_thebe, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _without_thebe(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    scripts = context.get("script_files", [])
    context["script_files"] = [script for script in scripts if not _is_thebe(script)]
    sheets = context.get("css_files", [])
    context["css_files"] = [sheet for sheet in sheets if "thebe" not in str(getattr(sheet, "filename", sheet))]


def _is_thebe(script: Any) -> bool:
    body = getattr(script, "attributes", {}).get("body") or ""
    return "thebe" in str(getattr(script, "filename", script) or "") or "THEBE" in body

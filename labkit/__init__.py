"""labkit: local LLM inference with MLX, as a working engine and as a laboratory that takes it apart.

The names below are imported on first use, so that ``import labkit`` costs nothing.
"""

TYPE_CHECKING = False  # checkers take it for typing's; importing typing is most of what this module would cost

_HOMES = {
    "load": "labkit.models",
    "LoadedModel": "labkit.models",
    "Engine": "labkit.engine",
    "Request": "labkit.engine",
    "SamplingParams": "labkit.engine",
    "Event": "labkit.engine",
}

__all__ = ["Engine", "Event", "LoadedModel", "Request", "SamplingParams", "__version__", "load"]

if TYPE_CHECKING:
    from labkit.engine import Engine, Event, Request, SamplingParams
    from labkit.models import LoadedModel, load


def __getattr__(name: str):
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'labkit' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("labkit")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"


def __dir__() -> list[str]:
    return sorted(__all__)

"""`load`: a name, a folder, a GGUF file or a hub id -> a model and its tokenizer, everything checked first."""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx

from labkit import devices
from labkit.models import files, zoo
from labkit.models.contract import Model
from labkit.models.files import LoadError
from labkit.models.tokenizer import Tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DTYPES = (mx.float32, mx.float16, mx.bfloat16)
Graph = Literal["auto", "specialised", "native", "adapter"]
"""Who computes a model: labkit's own graph of its architecture (its kernels, or a CPU's compiled loops), or mlx-lm's
module behind the adapter."""

PROVED: frozenset[str] = frozenset()
"""Kinds of GPU on which the specialised graph has passed its parity runs: where "auto" takes it."""

_HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: the forward.
        tokenizer: text to tokens and back, and chats to prompts.
        config: the checkpoint's config.json.
        path: the folder it came from.
        name: what `load` was asked for.
        weights_bytes: bytes of all parameters in memory.
    """

    model: Model
    tokenizer: Tokenizer
    config: dict[str, Any]
    path: Path
    name: str
    weights_bytes: int

    @property
    def notes(self) -> tuple[str, ...]:
        """What the checkpoint holds and the model leaves out, a sentence each."""
        return getattr(self.model, "notes", ())

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) over config.json and the weight files; read from disk when first asked for."""
        digest = hashlib.sha256()
        for path in [self.path / "config.json", *files.weight_files(self.path)]:
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()


def load(
    name_or_path: str | Path, *, dtype: mx.Dtype | None = None, graph: Graph = "auto", invariant: bool = False
) -> LoadedModel:
    """Load a model.

    Args:
        name_or_path: "tiny-hybrid"; "smollm2-135m"; a folder in mlx-lm's format; a llama-family GGUF file in Q4_0,
            Q4_1 or Q8_0; or a hub id such as "mlx-community/Qwen3-0.6B-4bit".
        dtype: of floating parameters and activations. Default: float32 on a CPU, where MLX's bfloat16 is several times
            slower; the checkpoint's own on a GPU. Packed codes stay as they are.
        graph: "specialised": labkit's own graph (Qwen3.5 and 3.6 hybrids); "native": the same in compiled loops, where
            the device is a CPU, in float32; "adapter": mlx-lm's module; "auto": the native graph on a CPU, on a GPU the
            specialised one, where it covers the checkpoint and has been proved on this kind of device.
        invariant: no bit of an answer may depend on its neighbours, on padding, on how its prompt is cut into chunks or
            on pauses. labkit's own graphs can: the native one always, the specialised one at a price.

    Raises:
        LoadError: anything that is wrong with the name, the folder, the files or their size, before weights are read.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise LoadError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, not {dtype!r}")
    if graph not in get_args(Graph):
        raise LoadError(f"graph is one of {', '.join(get_args(Graph))}, not {graph!r}")
    name = str(name_or_path)
    folder = resolve(name_or_path)
    config = files.read_config(folder)
    chosen = _choose_graph(config, graph, dtype, invariant)
    headers = [tensor for path in files.weight_files(folder) for tensor in files.read_header(path)]
    files.check_layers(folder, config, headers)
    files.check_tokenizer(folder)
    if dtype is None and devices.this_device().kind == "cpu":
        dtype = mx.float32
    files.check_fits(name, files.bytes_in_memory(headers, None if dtype is None else dtype.size))
    tokenizer = _read_tokenizer(folder)
    instead: Graph | None = "adapter" if graph == "auto" and not invariant else None
    model, size = _read_model(folder, config, dtype, chosen, instead, invariant)
    if tokenizer.base_vocab_size > model.vocab_size:
        raise LoadError(
            f"the tokenizer in {folder} has {tokenizer.base_vocab_size} tokens and the model {model.vocab_size}: "
            "it is another model's"
        )
    return LoadedModel(model, tokenizer, model.config, folder, name, size)


def resolve(name_or_path: str | Path) -> Path:
    """The folder in mlx-lm's format that a name stands for; converts or fetches what is not there yet.

    Raises:
        LoadError: nothing goes by that name.
    """
    name = str(name_or_path)
    if name in zoo.NAMES:
        return zoo.NAMES[name]()
    path = Path(os.path.expanduser(name))
    # os.path's tests say no where pathlib's raise: a name too long for the system, or with a NUL in it.
    if name and os.path.isdir(path):
        return path
    if name and os.path.isfile(path):
        if path.suffix == ".gguf":
            return zoo.gguf(path)
        raise LoadError(f"{path} is a file: give its folder (safetensors), or a .gguf file")
    if _HUB_ID.fullmatch(name) and not os.path.isdir(path.parent):
        return _fetch(name)
    near = difflib.get_close_matches(name.strip().lower(), zoo.NAMES, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise LoadError(
        f"no model {name[:200]!r}: {hint}labkit knows {', '.join(zoo.NAMES)}, "
        "and takes a model's folder, a .gguf file or a hub id (owner/name)"
    )


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client raises its transport's own errors, of many kinds
        raise LoadError(
            f"{hub_id!r} is no folder here, and the model hub did not give it ({_reason(error)}): "
            "check the name and the network, or give a local folder"
        ) from error


def _choose_graph(config: dict[str, Any], graph: Graph, dtype: mx.Dtype | None, invariant: bool) -> Graph:
    """Who computes this checkpoint. Raises LoadError if a graph was asked for that does not cover it."""
    if graph == "adapter":
        if invariant:
            raise LoadError("mlx-lm's graph has no invariant mode: leave out graph, or take labkit's own")
        return graph
    from labkit.models.hybrid.config import HybridConfig

    device = devices.this_device().kind
    if invariant and graph == "auto":
        graph = "native" if device == "cpu" and dtype in (None, mx.float32) else "specialised"
    if graph in ("specialised", "native"):
        HybridConfig.read(config)
        if graph == "native" and device != "cpu":
            raise LoadError(f'graph="native" is for CPUs, and MLX\'s device is {device}: take "specialised"')
    elif graph == "auto":
        graph = "adapter"
        own = "native" if device == "cpu" else "specialised"
        if device in PROVED or (device == "cpu" and (dtype is None or dtype == mx.float32)):
            with contextlib.suppress(LoadError):
                HybridConfig.read(config)
                graph = own
    return graph


def _read_model(
    folder: Path,
    config: dict[str, Any],
    dtype: mx.Dtype | None,
    graph: Graph,
    instead: Graph | None,
    invariant: bool,
) -> tuple[Model, int]:
    """A model and the bytes of its weights. instead: who takes a checkpoint that `graph` turns out not to cover."""
    if graph == "adapter":
        return _read_adapted(folder, config, dtype)
    from labkit.models.hybrid.config import NotSpecialised

    try:
        return _read_specialised(folder, config, dtype, graph, invariant)
    except NotSpecialised:
        if instead is None:
            raise
        return _read_adapted(folder, config, dtype)


def _read_specialised(
    folder: Path, config: dict[str, Any], dtype: mx.Dtype | None, graph: Graph, invariant: bool
) -> tuple[Model, int]:
    """labkit's own graph: tensors go from the files into its layout, a layer at a time."""
    import importlib

    from labkit.models.adapter import activation_dtype

    if graph == "native":
        from labkit.models.hybrid.native import NativeHybrid as Hybrid
    else:
        from labkit.models.hybrid import Hybrid

    tensors = {}
    for path in files.weight_files(folder):
        tensors |= mx.load(str(path))
    dtype = dtype or activation_dtype(tensors.values())
    architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    # What converters left undone (names, norms, the convolution's layout) mlx-lm's module finishes.
    tensors = architecture.Model(architecture.ModelArgs.from_dict(copy.deepcopy(config))).sanitize(tensors)
    options = {"invariant": invariant} if graph == "specialised" else {}  # the native graph knows no other mode
    model = Hybrid.from_tensors(tensors, config, dtype, **options)
    return model, model.weights_bytes


def _read_adapted(folder: Path, config: dict[str, Any], dtype: mx.Dtype | None) -> tuple[Model, int]:
    """mlx-lm's module behind the adapter."""
    from mlx.utils import tree_flatten

    from labkit.models.adapter import Adapter

    module, config = _read_weights(folder, config, dtype)
    size = sum(parameter.nbytes for _, parameter in tree_flatten(module.parameters()))
    return Adapter(module, config), size


def _read_weights(folder: Path, config: dict[str, Any], dtype: mx.Dtype | None) -> tuple[Any, dict[str, Any]]:
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import load_model

    try:
        module, config = load_model(folder, lazy=True, strict=True)
    except Exception as error:  # mlx-lm's classes take a config's values as they are, and stumble in their own ways
        raise LoadError(
            f"{folder} does not load as a {config['model_type']} model ({_reason(error)}): "
            "its config and weights do not fit together, or mlx-lm does not know the architecture"
        ) from error
    if dtype is not None:
        may_cast = getattr(module, "cast_predicate", lambda path: True)

        def cast(path: str, parameter: mx.array) -> mx.array:
            floating = mx.issubdtype(parameter.dtype, mx.floating)
            return parameter.astype(dtype) if floating and (dtype == mx.float32 or may_cast(path)) else parameter

        module.update(tree_map_with_path(cast, module.parameters()))
    mx.eval(module.parameters())
    return module, config


def _read_tokenizer(folder: Path) -> Tokenizer:
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from mlx_lm.utils import load_config

    try:
        # generation_config.json, where there is one, has the last word on the end tokens.
        ends = load_config(folder).get("eos_token_id")
        with _without_rope_remarks():
            # A tokenizer that comes with code of its own is refused: transformers would ask the terminal otherwise.
            return Tokenizer(load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=ends))
    except Exception as error:  # transformers raises what its tokenizer classes chose
        raise LoadError(
            f"the tokenizer in {folder} cannot be read, or not the config beside it ({_reason(error)})"
        ) from error


@contextmanager
def _without_rope_remarks() -> Iterator[None]:
    """transformers reads the model's config beside the tokenizer, and remarks on rotary keys that only models use."""
    logger = logging.getLogger("transformers.modeling_rope_utils")

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Unrecognized keys in `rope_parameters`")

    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _reason(error: Exception) -> str:
    """An error's message in one line, cut to a readable length."""
    return " ".join(str(error).split())[:300] or type(error).__name__

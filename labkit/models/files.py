"""A model's folder, looked at before anything is loaded: what is there, whether it is whole, how big it is."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from labkit import devices

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json", "vocab.txt")
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_SIZES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8}
_FLOATING = {"F64", "F32", "F16", "BF16"}


class LoadError(ValueError):
    """A model cannot be loaded; the message says what is wrong and what to do."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a safetensors file: its dtype as the format names it, its shape and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_config(folder: Path) -> dict[str, Any]:
    """config.json.

    Raises:
        LoadError: missing, unreadable, or not a model's.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{folder} is no model folder: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"), parse_constant=_number)
    except (ValueError, OSError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise LoadError(f"{path} names no model_type: it is not a language model's config")
    if not isinstance(config.get("text_config", {}), dict):
        raise LoadError(f"{path}: text_config must be an object, not {config['text_config']!r}")
    context = config.get("text_config", config).get("max_position_embeddings", 1)
    if context is not None and (type(context) is not int or context < 1):
        raise LoadError(f"{path}: max_position_embeddings must be a whole number of tokens, not {context!r}")
    if config.get("model_file"):
        raise LoadError(f"{path} asks to run the folder's own code ({config['model_file']}): only mlx-lm's own are run")
    return config


def _number(constant: str) -> float:
    # Some models' limits are Infinity; nothing that a model computes with is a NaN.
    if constant == "NaN":
        raise ValueError("a value is NaN")
    return float(constant)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that mlx-lm would read, all shards of the index present.

    Raises:
        LoadError: none, or some missing.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if others:
            raise LoadError(
                f"{folder} holds weights only as pickles ({', '.join(others[:3])}), which can run code when read: "
                "convert them to safetensors first"
            )
        strays = sorted(path.name for path in folder.glob("*.safetensors"))
        hint = f"; {strays[0]} is not named model*.safetensors" if strays else ""
        raise LoadError(f"{folder} holds no weights (model*.safetensors){hint}")
    if broken := [path.name for path in files if not path.is_file()]:
        raise LoadError(f"{folder / broken[0]} is no file (a link that leads nowhere?): fetch it again")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LoadError(f"{index} cannot be read: {error}") from error
        if missing := sorted(named - {path.name for path in files}):
            raise LoadError(
                f"{folder} lacks {len(missing)} of {len(named)} weight files, first {missing[0]}: fetch again"
            )
    return files


def read_header(path: Path) -> list[TensorHeader]:
    """The tensors of one safetensors file, without their data.

    Raises:
        LoadError: a file that is cut short or is no safetensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 0 < length <= size - 8:
            raise LoadError(f"{path} is cut short or is no safetensors file ({size} bytes): fetch it again")
        raw = file.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(raw).items() if name != "__metadata__"}
        tensors = [_tensor(name, entry) for name, entry in entries.items()]
        spans = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
        if any(start < end for (_, end), (start, _) in pairwise(spans)):
            raise ValueError("two tensors share bytes")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path} has a damaged header: {error}") from error
    end = spans[-1][1] if spans else 0
    if 8 + length + end > size:
        raise LoadError(f"{path} is cut short: {size} bytes where its header announces {8 + length + end}: fetch again")
    return tensors


def _tensor(name: str, entry: dict[str, Any]) -> TensorHeader:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"{name} has the shape {shape} at bytes {begin} to {end}")
    if dtype in _SIZES and end - begin != math.prod(shape) * _SIZES[dtype]:
        raise ValueError(f"{name} of shape {shape} in {dtype} cannot be {end - begin} bytes")
    return TensorHeader(name, dtype, shape, end - begin)


def check_layers(folder: Path, config: dict[str, Any], tensors: list[TensorHeader]) -> None:
    """Raises:
    LoadError: more layers in the config than tensors in the files: each would be made before one is missed.
    """
    layers = config.get("text_config", config).get("num_hidden_layers")
    if isinstance(layers, int) and layers > len(tensors):
        raise LoadError(
            f"the config in {folder} announces {layers} layers, and its weights are {len(tensors)} tensors: "
            "its config and weights do not fit together"
        )


def bytes_in_memory(tensors: list[TensorHeader], floating_size: int | None) -> int:
    """Bytes of the tensors once loaded, floating ones in `floating_size` bytes an element (None: as stored)."""
    total = 0
    for tensor in tensors:
        if floating_size is not None and tensor.dtype in _FLOATING:
            total += tensor.nbytes // _SIZES[tensor.dtype] * floating_size
        else:
            total += tensor.nbytes
    return total


def memory_limit() -> int:
    """Bytes that weights may take: a GPU's working set, or the RAM that is free now."""
    device = devices.this_device()
    if device.kind == "cpu":
        import psutil

        return psutil.virtual_memory().available
    return device.working_set_bytes


def check_fits(name: str, needed: int) -> None:
    """Raises:
    LoadError: weights of `needed` bytes that do not fit.
    """
    limit = memory_limit()
    if needed > limit:
        raise LoadError(
            f"the weights of {name} take {needed / 2**30:.1f} GiB and {limit / 2**30:.1f} GiB are to be had on "
            f"{devices.this_device().name}: use a smaller or a more strongly quantised model"
        )


def check_tokenizer(folder: Path) -> None:
    """Raises:
    LoadError: a folder without a tokenizer.
    """
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        raise LoadError(
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model): copy it from the model's source"
        )

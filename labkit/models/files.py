"""A model's folder, looked at before anything is loaded: what is there, whether it is whole, how big it is."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit import devices

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "vocab.json", "vocab.txt")
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
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
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise LoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise LoadError(f"{path} names no model_type: it is not a language model's config")
    if config.get("model_file"):
        raise LoadError(f"{path} asks to run the folder's own code ({config['model_file']}): only mlx-lm's own are run")
    return config


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
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
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
        tensors = [
            TensorHeader(
                name, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][1] - entry["data_offsets"][0]
            )
            for name, entry in entries.items()
        ]
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise LoadError(f"{path} has a damaged header: {error}") from error
    if 8 + length + end > size:
        raise LoadError(f"{path} is cut short: {size} bytes where its header announces {8 + length + end}: fetch again")
    return tensors


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

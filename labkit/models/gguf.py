"""GGUF files: the header read by hand, so that what cannot be loaded is refused by name before any byte is used.

Format: ggml's docs/gguf.md. Only little-endian versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.models.files import LoadError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

# ggml's type number -> (name, elements a block, bytes a block)
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
LOADED = {"F32", "F16", "Q4_0", "Q4_1", "Q8_0"}


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: `shape` in row-major order (GGUF itself lists the fastest axis first), `offset` into the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """Metadata and tensors of one file."""

    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]


class _Reader:
    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        if length > len(self.data) - self.at:
            raise struct.error("a string that is longer than the file")
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, count = self.scalar("<I"), self.scalar("<Q")
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(count)]
        form = _SCALARS[inner]
        values = struct.unpack_from(f"<{count}{form[1]}", self.data, self.at)
        self.at += count * struct.calcsize(form)
        return list(values)


def read_gguf_header(path: Path) -> GgufHeader:
    """The header of `path`.

    Raises:
        LoadError: no GGUF, a version that is not read, or a file that is cut short.
    """
    if path.stat().st_size < 24:
        raise LoadError(f"{path} is no GGUF file")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise LoadError(f"{path} is no GGUF file")
        reader = _Reader(data)
        reader.at = 4
        try:
            version, count, pairs = reader.scalar("<I"), reader.scalar("<Q"), reader.scalar("<Q")
            if version not in (2, 3):
                raise LoadError(f"{path} is GGUF version {version}: versions 2 and 3 are read")
            metadata = {}
            for _ in range(pairs):
                key = reader.string()
                metadata[key] = reader.value(reader.scalar("<I"))
            infos = [_tensor_info(reader) for _ in range(count)]
        except (struct.error, KeyError, OverflowError, MemoryError, RecursionError) as error:
            raise LoadError(f"{path} has a damaged or cut header ({error}): fetch it again") from error
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment % 8:
            raise LoadError(f"{path} has general.alignment = {alignment!r}, which is no multiple of 8")
        start = math.ceil(reader.at / alignment) * alignment
        tensors = tuple(_placed(path, start, *info) for info in infos)
        end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=start)
        if end > len(data):
            raise LoadError(f"{path} is cut short: {len(data)} bytes of {end}: fetch it again")
    return GgufHeader(metadata, tensors)


def _tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name = reader.string()
    shape = tuple(reader.scalar("<Q") for _ in range(reader.scalar("<I")))
    kind, offset = reader.scalar("<I"), reader.scalar("<Q")
    return name, shape[::-1], kind, offset


def _placed(path: Path, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    if kind not in TYPES:
        raise LoadError(f"{path}: tensor {name} has ggml type {kind}, which labkit does not know")
    type_name, elements, size = TYPES[kind]
    return GgufTensor(name, type_name, shape, start + offset, math.prod(shape) // elements * size)


def refuse_unsupported(path: Path, header: GgufHeader) -> None:
    """Raises:
    LoadError: another architecture than llama's, or tensor types that would not stay as they are stored.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture != "llama":
        raise LoadError(f"{path} is of the architecture {architecture!r}: of GGUF, only llama's is loaded")
    if header.metadata.get("llama.expert_count", 0):
        raise LoadError(f"{path} is a mixture of experts: of GGUF, only dense llama models are loaded")
    kinds = sorted({tensor.type for tensor in header.tensors} - LOADED)
    if kinds:
        raise LoadError(
            f"{path} holds tensors in {', '.join(kinds)}: of GGUF, {', '.join(sorted(LOADED))} are loaded "
            "(quantise the model as Q4_0, Q4_1 or Q8_0, or use its safetensors)"
        )
    scaling = header.metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or any(tensor.name == "rope_freqs.weight" for tensor in header.tensors):
        raise LoadError(
            f"{path} scales its rotary positions ({scaling}): that is not read from GGUF; use its safetensors"
        )

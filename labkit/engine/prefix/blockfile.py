"""A record as one safetensors file that proves itself.

The header's metadata carries the format, what the record says about itself, a CRC-32 of every MiB of the data, and a
SHA-256 of the header. Whatever is cut off, flipped or put in another's place is noticed before a byte is used. Any
safetensors reader opens the file. Nothing here knows MLX: a writer thread runs it.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from labkit.engine.prefix.record import Record, Tensor

FORMAT = "labkit-block-1"
SEGMENT = 1 << 20  # bytes under one CRC, small enough that one CRC-32 guards few bits
MAX_HEADER = 1 << 24
THREADS = 4  # that compute checksums

_TO_FILE = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
}
_FROM_FILE = {code: name for name, code in _TO_FILE.items()}
_OPEN = "0" * 64


class Damaged(ValueError):
    """Bytes that are not what was written."""


class Foreign(ValueError):
    """A sound file of another format."""


def encode(record: Record) -> tuple[bytes, list[bytes | memoryview]]:
    """A record -> the file's head (length and header) and its data, piece by piece in the order of the file."""
    pieces = [tensor.data for tensor in record.tensors.values()]
    entries, position = {}, 0
    for name, tensor in record.tensors.items():
        end = position + len(tensor.data)
        shape = list(tensor.shape)
        entries[name] = {"dtype": _TO_FILE[tensor.dtype], "shape": shape, "data_offsets": [position, end]}
        position = end
    # The header's own checksum stands first, so that it is the first run of 64 zeros in it.
    about = {"sha": _OPEN, **record.about, "format": FORMAT, "crc": _crc_text(pieces)}
    header = json.dumps({"__metadata__": about, **entries}).encode()
    header += b" " * (-len(header) % 8)
    header = header.replace(_OPEN.encode(), hashlib.sha256(header).hexdigest().encode(), 1)
    return struct.pack("<Q", len(header)) + header, pieces


def decode(data: bytes | memoryview) -> Record:
    """The record in a file's bytes; its tensors are views of them.

    Raises:
        Damaged: anything but what `encode` wrote.
        Foreign: a header of another format.
    """
    about, entries, begin = read_header(data, len(data))
    body = memoryview(data)[begin:]
    if _crc_text([body]) != about["crc"]:
        raise Damaged("the data do not match their checksums")
    tensors = {}
    for name, entry in entries.items():
        first, last = entry["data_offsets"]
        tensors[name] = Tensor(_FROM_FILE[entry["dtype"]], tuple(entry["shape"]), body[first:last])
    return Record(tensors, {key: value for key, value in about.items() if key not in ("format", "crc", "sha")})


def read_header(data: bytes | memoryview, size: int) -> tuple[dict[str, str], dict, int]:
    """(metadata, entries, where the data begin) of a file of `size` bytes that begins with `data`.

    Raises:
        Damaged, Foreign: as `decode`, but for the data themselves, which are not looked at.
    """
    if len(data) < 8:
        raise Damaged(f"{len(data)} bytes are no file")
    (length,) = struct.unpack("<Q", data[:8])
    if length > MAX_HEADER or len(data) < 8 + length:
        raise Damaged(f"a header of {length} bytes in a file of {size}")
    header = bytes(data[8 : 8 + length])
    try:
        entries = json.loads(header)
        about = entries.pop("__metadata__")
        written = about["sha"]
        if about["format"] != FORMAT:
            raise Foreign(f"format {about['format']!r}, not {FORMAT!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, Foreign):
            raise
        raise Damaged(f"the header cannot be read: {error}") from error
    blank = header.replace(str(written).encode(), _OPEN.encode(), 1)
    if len(str(written)) != len(_OPEN) or hashlib.sha256(blank).hexdigest() != written:
        raise Damaged("the header does not match its checksum")
    ends = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if size != 8 + length + ends:
        raise Damaged(f"{size} bytes where the header speaks of {8 + length + ends}")
    return about, entries, 8 + length


def size_of(head: bytes, pieces: list[bytes | memoryview]) -> int:
    """Bytes of the file."""
    return len(head) + sum(len(piece) for piece in pieces)


def _crc_text(pieces: list[bytes | memoryview]) -> str:
    """CRC-32 of every SEGMENT bytes of the pieces laid end to end, by several threads where there are many: zlib lets
    Python's lock go, and a row that is paused or comes back waits for this."""
    segments = list(_segments(pieces))
    if len(segments) < 2 * THREADS:
        return "".join(map(_crc, segments))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="labkit-checksum") as pool:
        return "".join(pool.map(_crc, segments))


def _crc(segment: list[memoryview]) -> str:
    crc = 0
    for part in segment:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"


def _segments(pieces: list[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """The parts of pieces that make up each SEGMENT bytes; the last may be shorter."""
    segment, room = [], SEGMENT
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            segment.append(view[:room])
            view, room = view[room:], room - len(segment[-1])
            if room == 0:
                yield segment
                segment, room = [], SEGMENT
    if segment:
        yield segment

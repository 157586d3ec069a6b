"""A record as one safetensors file that proves itself.

The header's metadata carries the format, what the record says about itself, a CRC-32 of every MiB of the data, and a
SHA-256 of the header. Whatever is cut off, flipped or put in another's place is noticed before a byte is used. Any
safetensors reader opens the file. Nothing here knows MLX: a writer thread runs it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator

from labkit.engine.prefix.beside import beside
from labkit.engine.prefix.filesystem import Fill, Parts, pages
from labkit.engine.prefix.record import Record, Tensor

try:
    from isal.isal_zlib import crc32
except ImportError:  # the same numbers, at a quarter of the speed
    from zlib import crc32

FORMAT = "labkit-block-1"
SEGMENT = 1 << 20  # bytes under one CRC, small enough that one CRC-32 guards few bits
MAX_HEADER = 1 << 24
RUN = 2  # segments that a thread takes at a time, soon enough to find them in the processor's cache
MANY = 3  # segments from which on threads, which are there already, are worth being asked: 0.02 ms each time

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
_OPENING = '{"__metadata__": {'


class Damaged(ValueError):
    """Bytes that are not what was written."""


class Foreign(ValueError):
    """A sound file of another format."""


class Encoded:
    """A record laid out as a file.

    Attributes:
        size: bytes of the file.
    """

    def __init__(self, record: Record):
        self._pieces = [piece for tensor in record.tensors.values() for piece in tensor.pieces if len(piece)]
        entries, position = {}, 0
        for name, tensor in record.tensors.items():
            end = position + tensor.nbytes
            shape = list(tensor.shape)
            entries[name] = {"dtype": _TO_FILE[tensor.dtype], "shape": shape, "data_offsets": [position, end]}
            position = end
        # What is known before the data are written; the two checksums stand before it.
        self._rest = json.dumps({"__metadata__": {**record.about, "format": FORMAT}, **entries})[len(_OPENING) :]
        self._begin = 8 + len(self._header("0" * (8 * -(-position // SEGMENT))))
        self.size = self._begin + position

    def write(self, put: Callable[[Parts, int], None]) -> None:
        """Hand everything to `put` with its place in the file, a segment at most at a time. The head comes last: its
        checksums are computed while the data are written."""
        segments, at, checksums = list(_segments(self._pieces)), self._begin, []
        with beside(len(segments) >= MANY) as begin:
            for first in range(0, len(segments), RUN):
                run = segments[first : first + RUN]
                checksums.append(begin(lambda run: "".join(map(_crc, run)), run))
                for segment in run:
                    put(segment, at)
                    at += SEGMENT  # but for the last, behind which nothing is put
            head = self._head("".join(result() for result in checksums))
        put([head], 0)

    def _header(self, crc: str) -> bytes:
        """The header without its own checksum; as long whatever the checksums are."""
        header = f'{_OPENING}"sha": "{_OPEN}", "crc": "{crc}", {self._rest}'.encode()
        return header + b" " * (-len(header) % 8)

    def _head(self, crc: str) -> bytes:
        """Length and header."""
        header = self._header(crc)
        header = header.replace(_OPEN.encode(), hashlib.sha256(header).hexdigest().encode(), 1)
        return struct.pack("<Q", len(header)) + header


Place = Callable[[dict[str, str], dict[str, tuple[str, tuple[int, ...]]]], dict[str, tuple[memoryview, ...]]]
"""Told what a file says of itself, and its tensors (dtype, shape): memory for those that are to lie elsewhere, in one
piece or several, as many bytes as the tensor has. What is in it counts only once the file has proved sound."""


def load(size: int, fill: Fill, place: Place = lambda about, tensors: {}) -> Record:
    """The record in a file of `size` bytes; its tensors are views of one buffer, or lie where `place` says.

    Args:
        fill: fills buffers from a place in the file on; called by several threads. Each segment of the data is checked
            as soon as it is there.

    Raises:
        Damaged: anything but what `Encoded` wrote.
        Foreign: a header of another format.
    """
    head = memoryview(bytearray(min(size, 8)))
    fill([head], 0)
    length = int.from_bytes(head, "little")
    if length <= MAX_HEADER:
        head = memoryview(bytearray(min(size, 8 + length)))
        fill([head], 0)
    about, entries, begin = read_header(head, size)
    kinds = {name: (_FROM_FILE[entry["dtype"]], tuple(entry["shape"])) for name, entry in entries.items()}
    own = {key: value for key, value in about.items() if key not in ("format", "crc", "sha")}
    pieces = _places(entries, place(own, kinds))
    segments = list(_segments([piece for some in pieces.values() for piece in some]))

    def checked(first: int) -> str:
        checksums = []
        for index, segment in enumerate(segments[first : first + RUN], first):
            fill(segment, begin + index * SEGMENT)
            checksums.append(_crc(segment))
        return "".join(checksums)

    with beside(len(segments) >= MANY) as start:
        *firsts, last = range(0, max(len(segments), 1), RUN)
        runs = [start(checked, first) for first in firsts]
        here = checked(last)  # this thread would only wait
        crc = "".join(result() for result in runs) + here
    if crc != about["crc"]:
        raise Damaged("the data do not match their checksums")
    tensors = {}
    for name, (dtype, shape) in kinds.items():
        data = tuple(piece.toreadonly() for piece in pieces[name])
        tensors[name] = Tensor(dtype, shape, data[0] if len(data) == 1 else data)
    return Record(tensors, own)


def _places(entries: dict, given: dict[str, tuple[memoryview, ...]]) -> dict[str, tuple[memoryview, ...]]:
    """Where the data of each tensor go: where they were given room, else into one new buffer."""
    sizes = {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in entries.items()}
    rest, at, places = pages(sum(size for name, size in sizes.items() if name not in given)), 0, {}
    for name, size in sizes.items():
        if name in given:
            places[name] = given[name]
        else:
            places[name], at = (rest[at : at + size],), at + size
    return places


def read_header(data: bytes | memoryview, size: int) -> tuple[dict[str, str], dict, int]:
    """(metadata, entries, where the data begin) of a file of `size` bytes that begins with `data`.

    Raises:
        Damaged, Foreign: as `load`, but for the data themselves, which are not looked at.
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


def checksums(pieces: list[bytes | memoryview]) -> str:
    """What the header of a file with these data says of them: the CRC-32 of each SEGMENT bytes, in hexadecimal."""
    return "".join(map(_crc, _segments(pieces)))


def _crc(segment: list[memoryview]) -> str:
    crc = 0
    for part in segment:
        crc = crc32(part, crc)
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

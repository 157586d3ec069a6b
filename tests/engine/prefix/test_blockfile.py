"""One record, one file: whatever is cut, flipped or exchanged is noticed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import zlib
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.prefix import blockfile
from labkit.engine.prefix.record import Record, Tensor
from tests.engine.prefix.memory_file import MemoryFile


def record(seed: int = 0, size: int = 40) -> Record:
    data = random.Random(seed).randbytes(size * 2)
    tensors = {
        "0.keys": Tensor("bfloat16", (2, size // 2), data),
        "1.state0": Tensor("float32", (1, 3), np.arange(3, dtype=np.float32).tobytes()),
        "1.empty": Tensor("float32", (0, 3), b""),
    }
    return Record(tensors, {"key": "0" * 64, "part": "columns", "quoted": 'a "b" é'})


def bytes_of(value: Record) -> bytes:
    file = blockfile.Encoded(value)
    disk = MemoryFile(file.size)
    file.write(disk.put)
    assert len(disk.data) == file.size
    assert disk.order[-1] == 0, "a file whose writing ends half way has no head"
    return bytes(disk.data)


def decode(data: bytes) -> Record:
    return blockfile.load(len(data), MemoryFile(data).fill)


def test_a_record_comes_back():
    data = bytes_of(record())
    found = decode(data)
    assert found.about == record().about
    assert {n: (t.dtype, t.shape, bytes(t.data)) for n, t in found.tensors.items()} == dict(record().tensors)
    assert found.nbytes == record().nbytes


def test_any_reader_of_safetensors_opens_it(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "block.safetensors"
    path.write_bytes(bytes_of(record()))
    with safe_open(path, "np") as file:
        assert set(file.keys()) == set(record().tensors)
        assert file.metadata()["format"] == blockfile.FORMAT
    arrays = mx.load(str(path))
    assert arrays["0.keys"].dtype == mx.bfloat16
    assert bytes(memoryview(arrays["0.keys"].view(mx.uint8))) == record().tensors["0.keys"].data


def test_every_truncation_is_noticed():
    data = bytes_of(record())
    for length in range(len(data)):
        with pytest.raises(blockfile.Damaged):
            decode(data[:length])
    with pytest.raises(blockfile.Damaged):
        decode(data + b"\0")


def test_every_flipped_bit_is_noticed():
    data = bytes_of(record(size=10))
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises((blockfile.Damaged, blockfile.Foreign)):
                decode(bytes(flipped))


LARGE = bytes_of(record(size=3 << 19))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, len(LARGE) - 1), st.integers(1, 2 << 20), st.integers(0, 9))
def test_a_burst_anywhere_in_a_large_file_is_noticed(start, length, seed):
    data = bytearray(LARGE)
    end = min(len(data), start + length)
    noise = random.Random(seed).randbytes(end - start)
    if data[start:end] == noise:
        return
    data[start:end] = noise
    with pytest.raises((blockfile.Damaged, blockfile.Foreign)):
        decode(bytes(data))


def test_exchanged_segments_are_noticed():
    data = bytearray(bytes_of(record(size=2 << 20)))
    a, b = slice(len(data) - (2 << 20), len(data) - (1 << 20)), slice(len(data) - (1 << 20), len(data))
    data[a], data[b] = data[b], data[a]
    with pytest.raises(blockfile.Damaged):
        decode(bytes(data))


def test_another_format_is_told_apart_from_damage(tmp_path):
    path = tmp_path / "other.safetensors"
    mx.save_safetensors(str(path), {"x": mx.zeros((3,))}, {"format": "labkit-block-9", "sha": "0" * 64})
    with pytest.raises(blockfile.Foreign, match="labkit-block-9"):
        decode(path.read_bytes())
    mx.save_safetensors(str(path), {"x": mx.zeros((3,))})
    with pytest.raises(blockfile.Damaged):
        decode(path.read_bytes())


def test_a_header_alone_says_what_a_file_is():
    data = bytes_of(record())
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    about, _, begin = blockfile.read_header(head, len(data))
    assert about["part"] == "columns"
    assert begin == len(head)
    with pytest.raises(blockfile.Damaged, match="bytes"):
        blockfile.read_header(head, len(data) - 1)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 40), min_size=1), st.booleans())
def test_pages_that_a_power_cut_kept_from_the_disk_are_noticed(lost, head):
    """A file has its name before its data are flushed: any of its pages may be missing then, the header's too."""
    data = bytes_of(record(size=80_000))
    torn = bytearray(data)
    for page in lost | ({0} if head else set()):
        at = slice(page * 4096, min((page + 1) * 4096, len(data)))
        torn[at] = bytes(len(torn[at]))
    assert torn != data
    with pytest.raises((blockfile.Damaged, blockfile.Foreign)):
        decode(bytes(torn))


def test_many_checksums_at_once_are_those_of_one_thread(monkeypatch):
    monkeypatch.setattr(blockfile, "MANY", 8)
    rng = random.Random(3)
    pieces = [rng.randbytes(size) for size in (1, 700_001, 0, (1 << 20) - 5, 3 << 20, 17, 5_000_003)]
    whole = b"".join(pieces)
    wanted = [zlib.crc32(whole[at : at + blockfile.SEGMENT]) for at in range(0, len(whole), blockfile.SEGMENT)]
    assert len(wanted) > blockfile.MANY, "by several threads"
    tensors = {str(n): Tensor("uint8", (len(piece),), piece) for n, piece in enumerate(pieces)}
    data = bytes_of(Record(tensors))
    about, _, begin = blockfile.read_header(data, len(data))
    assert data[begin:] == whole
    assert about["crc"] == "".join(f"{crc:08x}" for crc in wanted)
    assert b"".join(bytes(tensor.data) for tensor in decode(data).tensors.values()) == whole
    damaged = bytearray(data)
    damaged[begin + 6 * blockfile.SEGMENT + 9] ^= 1
    with pytest.raises(blockfile.Damaged, match="checksums"):
        decode(bytes(damaged))


def test_when_a_read_fails_no_thread_touches_the_file_any_more(monkeypatch):
    """Its number may be another file's by then, and the memory another row's."""
    monkeypatch.setattr(blockfile, "MANY", 1)
    monkeypatch.setattr(blockfile, "RUN", 1)
    data = bytes_of(Record({"0.keys": Tensor("uint8", (6 << 20,), bytes(6 << 20))}))
    at_work, disk = [], MemoryFile(data)

    def fill(buffers, offset):
        at_work.append(offset)
        if offset > 1 << 20:
            time.sleep(0.05)
        elif offset:
            raise OSError("it breaks")
        disk.fill(buffers, offset)
        at_work.remove(offset)

    with pytest.raises(OSError, match="breaks"):
        blockfile.load(len(data), fill)
    assert [offset for offset in at_work if offset > 1 << 20] == []


FORKED = """
import os, sys
from tests.engine.prefix.crash_child import light
light()  # Metal's runtime does not survive a fork, and nothing here needs it
from labkit.engine.prefix import blockfile
from labkit.engine.prefix.record import Record, Tensor
from tests.engine.prefix.memory_file import MemoryFile

def there_and_back():
    file = blockfile.Encoded(Record({"x": Tensor("uint8", (8 << 20,), bytes(8 << 20))}))
    disk = MemoryFile(file.size)
    file.write(disk.put)
    return blockfile.load(file.size, disk.fill).nbytes

assert there_and_back() == 8 << 20
child = os.fork()
if child == 0:
    os._exit(0 if there_and_back() == 8 << 20 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_reads_and_writes_with_threads_of_its_own():
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=60, cwd=Path(__file__).parents[3]).returncode == 0

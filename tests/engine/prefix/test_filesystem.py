"""What the store asks of the system: all bytes, whatever one request takes, and begun on their way to the disk."""

from __future__ import annotations

import os
import random

import pytest

from labkit.engine.prefix import filesystem
from labkit.engine.prefix.filesystem import FileSystem

SIZES = (0, 1, 4096, 70_001, 3)


def parts(*sizes: int) -> list[bytes]:
    return [random.Random(size).randbytes(size) for size in sizes]


@pytest.fixture(params=["whole", "by a few bytes", "one part a request"])
def requests(request, monkeypatch):
    """How much of what it is asked for the system does at a time."""
    if request.param == "one part a request":
        monkeypatch.delattr(os, "preadv", raising=False)
        monkeypatch.delattr(os, "pwritev", raising=False)
    elif request.param == "by a few bytes":
        write, read = os.pwrite, os.pread

        def some(pieces):
            return b"".join(bytes(piece) for piece in pieces)[:5000]

        def preadv(descriptor, buffers, offset):
            data, done = read(descriptor, min(5000, sum(map(len, buffers))), offset), 0
            for buffer in buffers:
                got = data[done : done + len(buffer)]
                buffer[: len(got)] = got
                done += len(got)
            return done

        monkeypatch.setattr(os, "pwritev", lambda descriptor, pieces, offset: write(descriptor, some(pieces), offset))
        monkeypatch.setattr(os, "preadv", preadv)
    return request.param


def test_parts_lie_end_to_end_and_come_back_to_theirs(tmp_path, requests):
    path, system, wanted = tmp_path / "file", FileSystem(), parts(*SIZES)
    descriptor = system.create(path, 10 + sum(SIZES))
    system.write(descriptor, wanted, 10)
    system.write(descriptor, [], 0)
    system.close(descriptor)
    assert path.read_bytes() == bytes(10) + b"".join(wanted)
    with system.reading(path) as (size, fill):
        assert size == 10 + sum(SIZES)
        back = [memoryview(bytearray(len(part))) for part in wanted]
        fill(back, 10)
        assert [bytes(part) for part in back] == wanted
        with pytest.raises(OSError, match="ends"):
            fill([memoryview(bytearray(size)), memoryview(bytearray(1))], 0)


def test_more_parts_than_one_request_takes(tmp_path):
    path, system = tmp_path / "file", FileSystem()
    wanted = [bytes([n % 256]) * (n % 3) for n in range(2 * filesystem.MOST_PARTS + 7)]
    descriptor = system.create(path, sum(map(len, wanted)))
    system.write(descriptor, wanted, 0)
    system.close(descriptor)
    back = [memoryview(bytearray(len(part))) for part in wanted]
    with system.reading(path) as (_, fill):
        fill(back, 0)
    assert [bytes(part) for part in back] == wanted


def test_what_is_written_is_on_its_way_to_the_disk(tmp_path, monkeypatch):
    """A pause waits for the disk: it begins with the first bytes, not with the flush."""
    asked = []
    monkeypatch.setattr(filesystem, "_sync_file_range", lambda: lambda *request: asked.append(request))
    descriptor = FileSystem().create(tmp_path / "file", 300)
    FileSystem().write(descriptor, parts(100, 50), 20)
    os.close(descriptor)
    assert asked == [(descriptor, 20, 150, 2)]


def test_linux_is_asked_and_others_need_not_have_it(tmp_path, monkeypatch):
    begin = filesystem._sync_file_range()
    assert (begin is not None) == (os.uname().sysname == "Linux")
    descriptor = FileSystem().create(tmp_path / "file", 3)
    if begin is not None:
        assert begin(descriptor, 0, 3, 2) == 0
        assert begin(10_000, 0, 3, 2) == -1, "no such file: said, not raised"
    monkeypatch.setattr(filesystem, "_sync_file_range", lambda: None)
    FileSystem().write(descriptor, parts(3), 0)
    FileSystem().close(descriptor)
    assert (tmp_path / "file").read_bytes() == parts(3)[0]


@pytest.mark.parametrize("size", [0, 1, filesystem.LARGE - 1, filesystem.LARGE, filesystem.LARGE + 4097])
def test_a_file_is_read_whole_whatever_its_size(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(random.Random(size).randbytes(size))
    with FileSystem().reading(path) as (told, fill):
        assert told == size
        data = filesystem.pages(size)
        fill([data], 0)
        assert bytes(data) == path.read_bytes()
    assert FileSystem().read(path, 10) == path.read_bytes()[:10]

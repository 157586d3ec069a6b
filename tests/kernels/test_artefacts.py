"""The cache of compiled kernels: by content, for several processes, within its limit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from labkit.kernels.artefacts import ArtefactCache, content_key


def writes(size: int):
    return lambda folder: (folder / "file").write_bytes(b"x" * size)


def test_an_entry_is_built_once(tmp_path):
    cache, built = ArtefactCache(tmp_path), []

    def build(folder):
        built.append(folder)
        (folder / "file").write_text("made")

    for _ in range(2):
        assert (cache.get(content_key("a"), build) / "file").read_text() == "made"
    assert len(built) == 1


def test_keys_tell_parts_apart():
    assert content_key("ab", "c") != content_key("a", "bc")
    assert content_key("a") == content_key(b"a")


def test_a_failed_build_leaves_nothing(tmp_path):
    cache = ArtefactCache(tmp_path)

    def fails(folder):
        (folder / "half").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.get("00", fails)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    assert cache.get("00", writes(3)).is_dir()


def test_the_least_recently_used_goes_first(tmp_path):
    import os

    cache = ArtefactCache(tmp_path, limit_bytes=250)
    for age, key in enumerate(["00", "01"]):
        os.utime(cache.get(key, writes(100)), (age, age))
    cache.get("00", writes(100))  # used again: now the youngest
    cache.get("02", writes(100))
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"00", "02"}


def test_what_lies_there_is_not_looked_through_after_each_build(tmp_path, monkeypatch):
    cache, looks, look = ArtefactCache(tmp_path, limit_bytes=64 * 100), [], ArtefactCache._entries
    monkeypatch.setattr(ArtefactCache, "_entries", lambda self: looks.append(1) or look(self))
    for number in range(100):
        cache.get(f"{number:02x}", writes(10))
    assert len(looks) == 10
    (tmp_path / "00" / "more").write_bytes(b"x" * 6400)
    for number in range(100, 110):
        cache.get(f"{number:02x}", writes(10))
    kept = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert kept <= 6400


def test_an_entry_over_the_limit_still_serves_who_asked(tmp_path):
    assert (ArtefactCache(tmp_path, limit_bytes=10).get("00", writes(100)) / "file").exists()


def test_limit_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="limit_bytes must be positive, not 0"):
        ArtefactCache(tmp_path, limit_bytes=0)


def test_of_many_processes_one_builds(tmp_path):
    code = """
import sys, time
from pathlib import Path
from labkit.kernels.artefacts import ArtefactCache
def build(folder):
    time.sleep(0.3)
    (folder / "file").write_text("whole")
    with open(sys.argv[1] + "/log", "a") as log:
        log.write("built\\n")
print((ArtefactCache(Path(sys.argv[1])).get("00", build) / "file").read_text())
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in processes] == ["whole"] * 3
    assert (tmp_path / "log").read_text() == "built\n"


def test_the_default_folder_is_labkits(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_CACHE_DIR", str(tmp_path))
    assert ArtefactCache().folder == tmp_path.resolve() / "kernels"

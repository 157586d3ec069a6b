"""Engines that are killed, and machines that lose power, at any point of a write."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.engine.prefix.disk import DiskTier
from labkit.engine.prefix.filesystem import FileSystem, Parts
from labkit.engine.prefix.folder import Folder
from tests.engine.prefix import crash_child
from tests.nightly import many


class Killer:
    """The writers' parent: `round` starts one and returns what it had written when it was killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-S", crash_child.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def round(self, folder: Path, *, limit: int, first: int, step: int = 0, seconds: float = 0.0) -> list[int]:
        self.process.stdin.write(f"{folder} {limit} {first} {step} {seconds}\n")
        self.process.stdin.flush()
        signal_number, *durable = (int(word) for word in self.process.stdout.readline().split())
        assert signal_number == signal.SIGKILL, "the writer ended by itself"
        return durable


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    parent = Killer()
    yield parent
    parent.process.stdin.close()
    parent.process.wait()
    parent.process.stdout.close()


def sound(tier: DiskTier, number: int) -> bool:
    """Whether the record is there; one that is there must be right."""
    expect = {"root": crash_child.ROOT, "key": f"{number:064x}", "part": "columns"}
    found = tier.read(crash_child.name(number), expect)
    if found is not None:
        assert bytes(found.tensors["0.keys"].data) == crash_child.record(number).tensors["0.keys"].data
    return found is not None


def kills(killer: Killer, folder: Path, rounds: int, seed: int, limit: int = 1 << 30) -> None:
    rng = random.Random(seed)
    durable: set[int] = set()
    for number in range(rounds):
        first = number * 1000
        if number % 2:
            written = killer.round(folder, limit=limit, first=first, seconds=rng.uniform(0.001, 0.03))
        else:
            # Two dozen steps are about two writes: every kind of step is hit, in first writes and in later ones.
            written = killer.round(folder, limit=limit, first=first, step=rng.randrange(1, 25))
        tier = DiskTier(Folder(folder, crash_child.ROOT), limit_bytes=limit)
        names = set(tier.sweep())
        assert not tier.counts["damaged"]
        assert tier.counts["swept"] == 0, "a rename shows whole files only"
        assert tier.counts["dead_owners_swept"] <= 1
        assert [path.name for path in (folder / "owners").iterdir()] == [tier.folder.own.name]
        durable |= set(written)
        if limit == 1 << 30:
            assert {crash_child.name(n) for n in durable} <= names, "what was said to be on the disk is there"
        if number % 5 == 0 or number == rounds - 1:
            there = {int(name.partition(".")[0], 16) for name in names}
            assert all(sound(tier, n) for n in there)
        tier.close()


def test_fifty_kills_lose_nothing_that_was_written(killer, tmp_path):
    kills(killer, tmp_path / "store", rounds=38, seed=1)
    kills(killer, tmp_path / "small", rounds=12, seed=2, limit=100_000)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
def test_hundreds_of_kills_lose_nothing_that_was_written(killer, tmp_path, seed):
    kills(killer, tmp_path / "store", rounds=many(60), seed=seed)
    kills(killer, tmp_path / "small", rounds=many(40), seed=seed, limit=100_000)


class PowerCut(FileSystem):
    """Loses, when the power goes, what no flush had reached: any of a file's pages, a name in a folder."""

    class Now(BaseException):
        """The power goes."""

    def __init__(self, step: int, rng: random.Random):
        self.left, self.rng = step, rng
        self.unflushed: dict[Path, int] = {}
        self.names: list[tuple[Path, Path]] = []
        self.open: dict[int, Path] = {}

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.Now

    def create(self, path: Path, size: int) -> int:
        self._step()
        descriptor = super().create(path, size)
        self.open[descriptor] = path
        self.unflushed[path] = size
        return descriptor

    def write(self, descriptor: int, parts: Parts, offset: int) -> None:
        self._step()
        super().write(descriptor, parts, offset)

    def sync(self, descriptor: int) -> None:
        self._step()
        super().sync(descriptor)
        self.unflushed.pop(self.open[descriptor], None)

    def close(self, descriptor: int) -> None:
        self.open.pop(descriptor)
        super().close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        self._step()
        super().replace(source, target)
        self.names.append((source, target))
        if source in self.unflushed:
            self.unflushed[target] = self.unflushed.pop(source)
        self.open = {descriptor: target if path == source else path for descriptor, path in self.open.items()}

    def sync_folder(self, folder: Path) -> None:
        self._step()
        super().sync_folder(folder)
        self.names = [(a, b) for a, b in self.names if b.parent != folder]

    def unlink(self, path: Path) -> None:
        if self.left > 0:  # nobody cleans up after the power has gone
            super().unlink(path)

    def cut(self) -> None:
        """What the disk holds when the power is back."""
        for path, size in self.unflushed.items():
            if path.exists() and not path.is_dir():
                if self.rng.random() < 0.3:
                    os.truncate(path, self.rng.randrange(size))
                else:  # the size was flushed, some of the data were not
                    data = bytearray(path.read_bytes())
                    for at in range(0, size, 4096):
                        if self.rng.random() < 0.5:
                            data[at : at + 4096] = bytes(len(data[at : at + 4096]))
                    path.write_bytes(data)
        for _, target in self.names:
            if self.rng.random() < 0.5:
                target.unlink(missing_ok=True)


def write_all(tier: DiskTier, durable: list[int]) -> None:
    for number in range(100):
        tier.write(crash_child.name(number), crash_child.record(number))
        durable.append(number)


def test_a_power_cut_at_any_step_loses_nothing_that_was_written(tmp_path):
    for step in range(1, 40):
        rng, folder, durable = random.Random(step), tmp_path / str(step), []
        system = PowerCut(step, rng)
        tier = DiskTier(Folder(folder, crash_child.ROOT), limit_bytes=1 << 30, system=system)
        with pytest.raises(PowerCut.Now):
            write_all(tier, durable)
        system.cut()
        os.close(tier.folder._alive)
        after = DiskTier(Folder(folder, crash_child.ROOT), limit_bytes=1 << 30)
        after.sweep()
        assert [n for n in range(100) if sound(after, n)][: len(durable)] == durable
        after.close()

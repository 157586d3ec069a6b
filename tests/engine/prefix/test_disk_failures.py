"""The disk tier over a system that fails at any step, and over a full volume."""

from __future__ import annotations

import os
import subprocess

import pytest

from labkit.engine.prefix.disk import NoRoom
from tests.engine.prefix.disk_records import disk, expected, held, name, record, size_of_folder
from tests.engine.prefix.faults import BROKEN, FULL, STEPS, Failing


@pytest.mark.parametrize("step", ["create", "write", "sync", "close", "replace", "sync_folder", "free_bytes"])
@pytest.mark.parametrize("code", [FULL, BROKEN], ids=["full", "broken"])
def test_a_write_that_fails_leaves_nothing_and_says_so(tmp_path, step, code):
    system = Failing()
    tier = disk(tmp_path, system=system)
    tier.write(name(1), record(1))
    before = size_of_folder(tmp_path)
    system.failing, system.half = {step: code}, True
    with pytest.raises(OSError, match=os.strerror(code)):
        tier.write(name(2), record(2), pin=True)
    system.failing = {}
    assert sum(count for what, count in tier.counts.as_dict().items() if what.startswith("write_failed")) == 1
    assert not tier.has(name(2))
    assert size_of_folder(tmp_path) == before
    assert held(tier, [1]) == [1]
    tier.write(name(2), record(2))
    assert held(tier, [1, 2]) == [1, 2]


@pytest.mark.parametrize("step", STEPS)
def test_no_step_that_fails_crashes_a_reader(tmp_path, step):
    system = Failing()
    tier = disk(tmp_path, system=system)
    tier.write(name(1), record(1))
    system.failing = {step: BROKEN}
    found = tier.read(name(1), expected(1))
    assert (found is None) == (step == "read")
    tier.touch([name(1)])
    tier.pin(name(1))
    tier.unpin(name(1))
    tier.sweep()
    tier.drop(name(1))
    system.failing = {}
    assert tier.counts["pins_not_shared"] == (step == "link")


def test_where_files_have_one_name_only_a_pin_holds_in_its_engine(tmp_path):
    system = Failing()
    system.failing = {"link": BROKEN}
    tier = disk(tmp_path, limit=8_000, system=system)
    tier.write(name(1), record(1), pin=True)
    for number in range(2, 12):
        tier.write(name(number), record(number))
    assert held(tier, [1]) == [1]
    assert tier.counts["pins_not_shared"] == 1


@pytest.fixture
def small_volume(tmp_path):
    """A real file system of 64 KiB."""
    place = tmp_path / "volume"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small volume cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_volume_costs_blocks_and_nothing_else(small_volume):
    tier = disk(small_volume, limit=1 << 30)
    for number in range(20):
        tier.write(name(number), record(number, size=5_000))
    assert tier.counts["evicted"], "what the volume takes is a limit too"
    survivors = held(tier, range(20))
    assert survivors
    assert survivors[-1] == 19
    filler = small_volume / "filler"
    with pytest.raises(OSError, match="space"):
        filler.write_bytes(b"x" * (1 << 20))
    with pytest.raises(NoRoom, match="free on the volume"):
        tier.write(name(20), record(20, size=60_000))
    assert not tier.has(name(20))
    filler.unlink()
    tier.write(name(99), record(99))
    assert held(tier, [99]) == [99]
    tier.close()

"""The disk tier: whole or not at all, and under its limit."""

from __future__ import annotations

import os
import threading

import pytest

from labkit.engine.prefix.disk import NoRoom
from tests.engine.prefix.disk_records import OTHER, ROOT, disk, expected, held, name, record, size_of_folder
from tests.engine.prefix.faults import Failing


def test_records_come_back_and_outlive_their_engine(tmp_path):
    first = disk(tmp_path)
    first.write(name(1), record(1))
    assert first.read(name(1), expected(1)).tensors == record(1).tensors
    first.close()
    second = disk(tmp_path)
    assert set(second.sweep()) == {name(1)}
    assert second.read(name(1), expected(1)).about == record(1).about
    assert second.read(name(2), expected(2)) is None
    assert not second.counts["damaged"]


def test_the_limit_holds_and_what_was_used_longest_ago_goes_first(tmp_path):
    tier, gone = disk(tmp_path, limit=20_000), []
    tier.on_evicted = gone.append
    for number in range(30):
        tier.write(name(number), record(number))
        if number >= 3:
            tier.touch([name(3)])
        assert size_of_folder(tmp_path) <= 20_000
    survivors = held(tier, range(30))
    assert 3 in survivors, "it was used all along"
    assert survivors[1:] == list(range(31 - len(survivors), 30)), "the newest"
    assert len(gone) == 30 - len(survivors) == tier.counts["evicted"]


def test_a_folder_is_not_looked_through_for_each_file(tmp_path, monkeypatch):
    """Each write looked at every file of the store, so that all together were quadratic."""
    tier, looks = disk(tmp_path, limit=60_000), []
    tier.sweep()
    scan = tier.folder.scan
    monkeypatch.setattr(tier.folder, "scan", lambda: (looks.append(1), scan())[1])
    for number in range(20):
        tier.write(name(number), record(number))
        assert tier.bytes_used >= size_of_folder(tmp_path) - 8, "never too little, but for the number itself"
    assert not looks
    for number in range(20, 60):
        tier.write(name(number), record(number))
        assert size_of_folder(tmp_path) <= 60_000
    assert looks, "near the limit they are counted"


@pytest.mark.parametrize("said", [b"", b"\1\2", (0).to_bytes(8, "little"), (1 << 60).to_bytes(8, "little")], ids=repr)
def test_what_a_folder_says_of_its_bytes_is_counted_anew_by_each_engine(tmp_path, said):
    first = disk(tmp_path, limit=20_000)
    for number in range(10):
        first.write(name(number), record(number))
    first.close()
    (tmp_path / "store" / "lock").write_bytes(said)  # a power cut keeps what it likes
    tier = disk(tmp_path, limit=20_000)
    tier.sweep()
    for number in range(10, 30):
        tier.write(name(number), record(number))
        assert size_of_folder(tmp_path) <= 20_000
    assert len(held(tier, range(30))) > 8


def test_each_engine_counts_what_the_others_add(tmp_path):
    tiers = [disk(tmp_path, root=root, limit=20_000) for root in (ROOT, OTHER, ROOT)]
    for number in range(30):
        root = OTHER if number % 3 == 1 else ROOT
        tiers[number % 3].write(name(number), record(number, root=root))
        assert size_of_folder(tmp_path) <= 20_000
    assert len(list((tmp_path / "store" / "blocks").rglob("*.safetensors"))) > 8


def test_pinned_records_survive_and_refuse_what_does_not_fit_beside_them(tmp_path):
    tier = disk(tmp_path, limit=10_000)
    for number in range(5):
        tier.write(name(number), record(number), pin=number == 0)
    assert tier.pin(name(1))
    assert not tier.pin(name(99))
    for number in range(5, 20):
        tier.write(name(number), record(number))
    assert held(tier, range(5)) == [0, 1]
    for number in held(tier, range(5, 20)):
        assert tier.pin(name(number))
    with pytest.raises(NoRoom):
        tier.write(name(20), record(20, size=5_000), pin=True)
    assert tier.counts["write_failed_no_room"] == 1
    before = held(tier, range(30))
    for number in before:
        tier.unpin(name(number))
    for number in range(30, 45):
        tier.write(name(number), record(number))
    assert not set(held(tier, before)), "unpinned, they go like any other"


def test_a_pin_holds_against_another_engine(tmp_path):
    ours, theirs = disk(tmp_path, limit=8_000), disk(tmp_path, limit=8_000)
    ours.write(name(1), record(1))
    assert ours.pin(name(1))
    for number in range(2, 20):
        theirs.write(name(number), record(number))
    assert held(theirs, [1]) == [1]
    theirs.drop(name(1))
    assert held(ours, [1]) == [1], "the second name still has it"
    ours.close()
    assert held(theirs, [1]) == []


def test_what_is_protected_is_not_removed_for_the_next_of_its_chain(tmp_path):
    tier = disk(tmp_path, limit=6_000)
    chain = [name(number) for number in range(20)]
    for number in range(3):
        tier.write(name(number), record(number), protect=chain)
    with pytest.raises(NoRoom):
        tier.write(name(3), record(3, size=5_000), protect=chain)
    assert held(tier, range(20)) == [0, 1, 2]
    tier.write(name(3), record(3, size=5_000))
    assert held(tier, range(20)) == [3]


@pytest.mark.parametrize("part", ["front", "end", "middle", "empty", "head"])
def test_damaged_files_are_misses_and_go(tmp_path, part):
    tier = disk(tmp_path)
    tier.write(name(1), record(1))
    place = tier.folder.place(name(1))
    data = bytearray(place.read_bytes())
    if part == "empty":
        data = bytearray()
    elif part == "head":
        data = data[:6]
    else:
        data[{"front": 30, "end": -1, "middle": len(data) - 500}[part]] ^= 4
    place.write_bytes(data)
    assert tier.read(name(1), expected(1)) is None
    assert tier.counts["damaged"] == 1
    assert not place.exists()
    tier.write(name(1), record(1))
    assert held(tier, [1]) == [1]


def test_swapped_files_are_misses(tmp_path):
    tier = disk(tmp_path)
    for number in (1, 2):
        tier.write(name(number), record(number))
    a, b = (tier.folder.place(name(number)) for number in (1, 2))
    data = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(data)
    assert held(tier, [1, 2]) == []
    assert tier.counts["misplaced"] == 2


def test_the_sweep_removes_what_is_of_no_use(tmp_path):
    first = disk(tmp_path)
    for number in range(6):
        first.write(name(number), record(number))
    places = [first.folder.place(name(number)) for number in range(6)]
    first.close()
    places[0].write_bytes(places[0].read_bytes()[:-7])
    places[1].write_bytes(b"")
    os.rename(places[3], places[2])
    places[4].write_bytes(places[4].read_bytes().replace(b"labkit-block-1", b"labkit-block-9"))
    left_behind = tmp_path / "store" / "owners" / "1-dead"
    (left_behind / "temporary").mkdir(parents=True)
    (left_behind / "temporary" / "half").write_bytes(b"x" * 100)
    second = disk(tmp_path)
    assert set(second.sweep()) == {name(5)}
    assert second.counts["swept"] == 4
    assert second.counts["dead_owners_swept"] == 1
    assert not left_behind.exists()
    assert held(second, range(6)) == [5]


def test_trap_23_foreign_files_count_against_the_limit_and_go_when_old(tmp_path):
    """Incompatible files never collected: the disk was full of them, and the cache was silently off."""
    foreign = disk(tmp_path, root=OTHER, limit=20_000)
    for number in range(12):
        foreign.write(name(number), record(number, root=OTHER))
    foreign.close()
    tier = disk(tmp_path, limit=20_000)
    assert tier.sweep() == {}
    assert tier.counts["incompatible"] == 12
    for number in range(30):
        tier.write(name(number), record(number))
        assert size_of_folder(tmp_path) <= 20_000
    assert len(held(tier, range(30))) > 8
    assert tier.counts["evicted_foreign"] == 12


def test_file_and_folder_are_flushed_at_the_same_time(tmp_path):
    """The disk was waited for twice, and half as long again for a small file."""
    both = threading.Barrier(2)

    class Meeting(Failing):
        def sync(self, descriptor):
            both.wait(60)
            super().sync(descriptor)

        def sync_folder(self, folder):
            if folder.name != "blocks" and folder.name != ROOT[:16]:  # of a new folder, its parents' names too
                both.wait(60)
            super().sync_folder(folder)

    tier = disk(tmp_path, system=Meeting())
    tier.write(name(1), record(1))
    assert held(tier, [1]) == [1]

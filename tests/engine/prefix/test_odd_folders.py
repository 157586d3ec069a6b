"""What other programs, other clocks and other file systems may do to a store's folder: misses, counted, and no more."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time

import pytest

from tests.engine.prefix.conftest import PROMPT, ROW, commit_all, decoded, identical, restored
from tests.engine.prefix.disk_records import disk, held, name, record
from tests.engine.prefix.faults import Failing

THINGS = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link to nothing": lambda path: os.symlink(f"{path}.nothing", path),
    "link to a pipe": lambda path: (os.mkfifo(f"{path}.pipe"), os.symlink(f"{path}.pipe", path)),
    "link to a file": lambda path: os.symlink(__file__, path),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", ["columns", "state", "private"])
@pytest.mark.parametrize("thing", THINGS)
def test_what_is_no_file_under_a_records_name_is_nobodys_record(open_store, hybrid, thing, part):
    """A pipe was opened, and the engine waited for whoever might write to it."""
    first = open_store(hybrid, memory_bytes=0)
    key = "c" * 64 if part != "private" else first._private.key("row")
    place = first._tiers.disk.folder.place(f"{key}.{part}")
    place.parent.mkdir(parents=True, exist_ok=True)
    THINGS[thing](place)
    commit_all(first, hybrid, PROMPT)
    assert first.load_private("row") is None
    assert first.private_ids() == []
    first.close()
    second = open_store(hybrid)
    assert restored(second, hybrid, PROMPT) == 40
    assert second.stats()["disk"].get("swept", 0) == 0
    if (thing, part) != ("link to a file", "private"):  # that was read, and no record
        assert os.path.lexists(place), "it is not the store's to remove"
    assert os.path.exists(__file__)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("thing", THINGS)
def test_a_place_that_is_taken_by_something_else_is_taken_back_or_the_refusal_counted(open_store, hybrid, thing):
    store = open_store(hybrid, memory_bytes=0)
    place = store._tiers.disk.folder.place(f"{store._chains.keys(PROMPT, (), ())[0]}.columns")
    place.parent.mkdir(parents=True)
    THINGS[thing](place)
    commit_all(store, hybrid, PROMPT)
    assert store.flush(600)
    disk = store.stats()["disk"]
    if thing == "folder":
        assert disk["write_failed_EISDIR"]
        assert restored(store, hybrid, PROMPT) == 0
    else:
        assert restored(store, hybrid, PROMPT) in (0, 40)
        commit_all(store, hybrid, PROMPT)
        store.flush(600)
        assert restored(store, hybrid, PROMPT) == 40


@pytest.mark.parametrize("gone", ["all", "what is the engine's own", "blocks", "private"])
def test_a_folder_that_is_removed_while_it_is_used_costs_blocks_and_no_row(open_store, hybrid, gone, caplog):
    store, caches = open_store(hybrid, memory_bytes=0), decoded(hybrid)
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    folder = store._tiers.disk.folder
    shutil.rmtree({"all": folder.path, "what is the engine's own": folder.own}.get(gone, folder.path / gone))
    if gone in ("all", "blocks"):
        assert restored(store, hybrid, PROMPT) == 0
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    saved = store.save_private("row", ROW, caches)
    if gone in ("blocks", "private"):
        assert saved.stored, "what is missing is made anew"
        assert identical(store.load_private("row").restore(), caches)
        assert restored(store, hybrid, PROMPT) == 40
    else:
        assert saved == (False, "not_written"), "so the row runs on"
        assert store.load_private("row") is None
        assert store.private_ids() == []
        assert store.stats()["disk"]["write_failed_ENOENT"]
        assert [record.name for record in caplog.records] == ["labkit.prefix"], "said once"
    assert store.stats()["leases"] == 0
    assert store.close()


@pytest.mark.parametrize("now", [-(1 << 60), 0, 1 << 66], ids=["before 1970", "1970", "far ahead"])
def test_a_clock_that_is_wrong_costs_the_order_of_removal_alone(open_store, hybrid, monkeypatch, now):
    store = open_store(hybrid, memory_bytes=0, disk_bytes=25_000)
    commit_all(store, hybrid, PROMPT)
    assert store.save_private("row", ROW, decoded(hybrid)).stored
    store.flush(600)
    monkeypatch.setattr(time, "time_ns", lambda: now)
    for start in range(60, 66):
        commit_all(store, hybrid, [start, *PROMPT])
        store.flush(600)
        assert restored(store, hybrid, [start, *PROMPT]) == 40, "the newest is there"
    assert store.stats()["disk"]["evicted"]
    assert identical(store.load_private("row").restore(), decoded(hybrid))


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ESTALE, errno.EACCES, errno.EROFS], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", ["create", "replace", "sync", "sync_folder"])
def test_errors_of_network_and_read_only_volumes_leave_no_file_and_no_pin(open_store, hybrid, step, code):
    system = Failing()
    store = open_store(hybrid, memory_bytes=0, system=system)
    folder = store._tiers.disk.folder
    before = {path for path in folder.path.rglob("*") if path.is_file()}
    system.failing = {step: code}
    commit_all(store, hybrid, PROMPT)
    store.flush(600)
    assert store.save_private("row", ROW, decoded(hybrid)) == (False, "not_written")
    assert store.stats()["disk"][f"write_failed_{errno.errorcode[code]}"]
    assert {path for path in folder.path.rglob("*") if path.is_file()} == before
    assert store.stats()["pins"] == {"owners": 0, "records": 0}


def test_many_tiny_blocks_cost_no_more_each_than_few(tmp_path):
    """Processor time of a write and of an engine's start for each, when there are many and when there are few."""

    def each(many: int) -> tuple[float, float]:
        path = tmp_path / str(many)
        path.mkdir()
        tier = disk(path, limit=1 << 30)
        begin = time.process_time()
        for number in range(many):
            tier.write(name(number), record(number, size=10))
        written = time.process_time() - begin
        tier.close()
        begin, tier = time.process_time(), disk(path, limit=1 << 30)
        assert len(tier.sweep()) == many
        started = time.process_time() - begin
        assert held(tier, range(0, many, 101)) == list(range(0, many, 101))
        tier.close()
        return written / many, started / many

    few, many = each(500), each(2_500)
    assert many[0] < 3 * few[0]
    assert many[1] < 3 * few[1]


@pytest.mark.parametrize("part", ["", "lock", "labkit-prefix-store.json", "owners", "private", "blocks"])
@pytest.mark.parametrize("thing", ["pipe", "folder", "link to nothing", "file"])
def test_a_store_whose_parts_are_something_else_is_refused_by_name(open_store, hybrid, tmp_path, part, thing):
    open_store(hybrid).close()
    place = tmp_path / "store" / part
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    if thing == "file":
        place.write_bytes(b"")
    else:
        THINGS[thing](place)
    wanted = "folder" if part in ("", "owners", "private", "blocks") else "file"
    if thing == wanted and "json" not in part:
        assert open_store(hybrid).peek(PROMPT) == 0
        return
    with pytest.raises(ValueError, match=str(place)):
        open_store(hybrid)


def test_a_volume_that_locks_no_files_is_refused_with_a_remedy(hybrid, open_store, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="local folder"):
        open_store(hybrid)


def test_a_copy_of_a_paused_row_under_another_name_is_no_second_row(open_store, hybrid):
    first = open_store(hybrid)
    assert first.save_private("row", ROW, decoded(hybrid)).stored
    place = first._tiers.disk.folder.place(f"{first._private.key('row')}.private")
    first.close()
    shutil.copy(place, place.with_name(f"{'a' * 64}.private.safetensors"))
    assert open_store(hybrid).private_ids() == ["row"]


@pytest.mark.parametrize("id", ["", "../../x", "a" * 10_000, "\0", "é\ud800"], ids=ascii)
def test_any_id_names_a_row(open_store, hybrid, id):
    first, caches = open_store(hybrid), decoded(hybrid)
    assert first.save_private(id, ROW, caches).stored
    first.close()
    second = open_store(hybrid)
    assert second.private_ids() == [id]
    assert identical(second.load_private(id).restore(), caches)


def test_what_is_no_json_beside_a_row_leaves_nothing_behind(open_store, hybrid):
    store = open_store(hybrid)
    with pytest.raises(TypeError, match="JSON"):
        store.save_private("row", ROW, decoded(hybrid), data={1, 2})
    assert store.stats()["pins"] == {"owners": 0, "records": 0}
    assert store.load_private("row") is None

"""The folder: whose it is, what it holds, and who has its lock."""

from __future__ import annotations

import pytest

from labkit.engine.prefix.folder import MARKER, Folder, clear, summary
from tests.engine.prefix.disk_records import ROOT, disk, held, name, record


def test_a_folder_of_something_else_is_refused_untouched(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        disk(tmp_path)
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="no folder"):
        Folder(tmp_path / "file", ROOT)


def test_a_store_of_another_format_is_refused(tmp_path):
    disk(tmp_path).close()
    marker = tmp_path / "store" / MARKER
    marker.write_text('{"format": 2}')
    with pytest.raises(ValueError, match="format 2"):
        disk(tmp_path)
    marker.write_text("")
    with pytest.raises(ValueError, match="cannot be read"):
        disk(tmp_path)


def test_an_engine_killed_while_it_claimed_the_folder_leaves_it_usable(tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / f"{MARKER}.half").write_text('{"for')
    (tmp_path / "store" / "lock").touch()
    tier = disk(tmp_path)
    tier.write(name(1), record(1))
    assert held(tier, [1]) == [1]
    assert not (tmp_path / "store" / f"{MARKER}.half").exists()


def test_what_a_folder_holds_can_be_listed_and_cleared(tmp_path):
    tier = disk(tmp_path)
    for number in (1, 2):
        tier.write(name(number), record(number), pin=number == 2)
    tier.write(name(3, "private"), record(3))
    found = summary(tmp_path / "store")
    assert found[ROOT[:16]]["columns"] == 2
    assert found["private"]["private"] == 1
    assert clear(tmp_path / "store")["files"] == 3
    assert summary(tmp_path / "store") == {}
    assert held(tier, [1, 2]) == [2], "a living engine's pins are its own to let go"
    tier.close()
    with pytest.raises(ValueError, match="no prefix store"):
        clear(tmp_path)


def test_a_lock_that_is_not_let_go_is_an_error_and_not_a_hang(tmp_path):
    holder, waiter = disk(tmp_path), disk(tmp_path)
    with holder.folder.locked(), pytest.raises(OSError, match="lock"):
        waiter.write(name(1), record(1))
    waiter.write(name(1), record(1))
    assert held(waiter, [1]) == [1]

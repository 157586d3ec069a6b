"""Stores that end: closed, let go of, or left behind by a process that ends without a word to them."""

from __future__ import annotations

import gc
import subprocess
import sys

from labkit.engine.prefix import PrefixStore
from tests.engine.prefix import exiting_child
from tests.engine.prefix.conftest import PROMPT, WIDTH, commit_all, restored


def test_what_is_committed_after_the_end_is_refused(open_store, hybrid):
    store = open_store(hybrid, memory_bytes=0)
    store.close()
    assert store.commit(PROMPT[:8], hybrid.after(PROMPT[:8])) == (False, "closed")


def test_a_store_that_nobody_closed_ends_when_nobody_holds_it(open_store, hybrid, tmp_path):
    store = PrefixStore(hybrid, tmp_path / "store", width=WIDTH, keep_free_bytes=0)
    commit_all(store, hybrid, PROMPT)
    thread = store._tiers.writer._thread
    del store

    gc.collect()
    thread.join(600)
    assert not thread.is_alive()
    assert restored(open_store(hybrid), hybrid, PROMPT) == 40


def test_a_process_that_ends_without_a_word_loses_no_block(tmp_path):
    """An interpreter that ends begins nothing in threads any more: large blocks that waited were lost."""
    command = [sys.executable, exiting_child.__file__, tmp_path / "store"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("stored\n", "", 0)
    blocks = list((tmp_path / "store" / "blocks").rglob("*.columns.safetensors"))
    assert len(blocks) == exiting_child.BLOCKS
    assert min(path.stat().st_size for path in blocks) > 3 << 20, "large enough for threads"

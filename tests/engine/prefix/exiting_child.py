"""Offers a store blocks and ends without a word to it, which still holds it. Run as a script with a folder."""

from __future__ import annotations

import sys
from pathlib import Path

WIDTH, BLOCKS = 60_000, 3  # blocks of four segments: their checksums are computed by threads

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

    from labkit.engine.prefix import PrefixStore
    from tests.engine.prefix.conftest import Witness

    witness = Witness("contiguous")
    store = PrefixStore(witness, sys.argv[1], width=WIDTH, memory_bytes=0, keep_free_bytes=0)
    tokens = [number % 250 for number in range(BLOCKS * WIDTH)]
    caches = witness.after(tokens, chunk=WIDTH)
    print(store.commit(tokens, caches).reason, flush=True)

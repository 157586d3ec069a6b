"""The life of a pool: every place of every step is accounted for, and the ends are empty."""

from __future__ import annotations

import pytest

from labkit.caches import PoolExhausted
from labkit.measure.pool_life import FREE, UNTOUCHED, Life, live, random_lives


@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("shared", [0, 100])
def test_a_life_adds_up(block, shared):
    lives = random_lives(40, seed=3, shared=shared)
    moments = live(lives, block_tokens=block, capacity=4000 // block)
    for now in moments:
        used = [owner for owner in now.owners if owner not in (FREE, UNTOUCHED)]
        assert now.blocks == len(used) * block
        assert now.idle == now.owners.count(FREE) * block
        assert len(now.owners) == 4000 // block
        assert now.distinct <= now.tokens or not shared
        assert 0 <= now.paged_waste <= 1
        assert now.rows <= 8
    served = max(owner for now in moments for owner in now.owners)
    assert served <= 40
    assert moments[-1].rows == 1
    if not shared:
        assert all(now.distinct == now.tokens for now in moments)
    else:
        assert max(now.tokens - now.distinct for now in moments) >= shared // block * block


def test_a_shared_beginning_lies_there_once():
    (first, *_) = live([Life(0, 64, 5, 64), Life(0, 64, 5, 64)], block_tokens=16, capacity=20)
    assert first.shared == (1, 2, 3, 4)
    assert (first.tokens, first.distinct, first.blocks) == (128, 64, 64)


def test_what_does_not_fit_waits_and_what_never_fits_is_refused():
    lives = [Life(0, 60, 20), Life(0, 60, 20), Life(0, 8, 4)]
    moments = live(lives, block_tokens=8, capacity=12)
    assert [now.waiting for now in moments][:2] == [2, 2]
    assert max(now.rows for now in moments) <= 2
    with pytest.raises(PoolExhausted, match="20 blocks of 8 tokens are needed and 12 of 12 are free"):
        live([Life(0, 150, 10)], block_tokens=8, capacity=12)

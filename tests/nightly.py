"""How much a nightly test does: all of it, or the share that LABKIT_NIGHTLY says (0.1: a tenth)."""

from __future__ import annotations

import os

SHARE = float(os.environ.get("LABKIT_NIGHTLY", "1"))


def many(count: int) -> int:
    """`count` cases, or their share, at least one."""
    return max(1, round(count * SHARE))

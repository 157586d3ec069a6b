"""Which weights a golden speaks about."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

# What stands beside the trunk in a checkpoint and takes no part in predicting the next token.
BESIDE_THE_TRUNK = ("mtp.", "vision_tower.")


def trunk_fingerprint(folder: str | Path) -> str:
    """SHA-256 (hex) over name, dtype, shape and bytes of every tensor that takes part in predicting the next token.

    The configuration is left out on purpose: a wrong value in it changes what an engine computes, and then the
    comparison with the golden must fail rather than be refused. Heads that are added to a trunk leave it the same.

    Args:
        folder: a model folder in mlx-lm's format.
    """
    import mlx.core as mx

    from labkit.models.files import weight_files

    tensors: dict[str, mx.array] = {}
    for file in weight_files(Path(folder)):
        tensors |= mx.load(str(file))
    digest = hashlib.sha256()
    for name in sorted(tensors):
        if name.startswith(BESIDE_THE_TRUNK):
            continue
        value = tensors[name]
        digest.update(f"{name}\0{str(value.dtype).rpartition('.')[2]}\0{list(value.shape)}\0".encode())
        digest.update(np.array(value.reshape(-1).view(mx.uint8), copy=False))
    return digest.hexdigest()

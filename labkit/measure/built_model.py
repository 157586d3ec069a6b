"""A model as mlx-lm builds it from a config, without weights: the oracle of what `model_tensors` lists.

MLX arrays are lazy, so even a model of hundreds of gigabytes has its shapes and storage here and takes no memory until
something is computed with it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from labkit.models.synthetic import build_module as build

__all__ = ["build", "stored_bytes"]


def stored_bytes(model: Any) -> dict[str, int]:
    """Bytes of every tensor of a built or loaded model, scales and biases with their weight, by parameter path."""
    from mlx.utils import tree_flatten

    sizes: Counter = Counter()
    for path, array in tree_flatten(model.parameters()):
        for suffix in (".weight", ".scales", ".biases"):
            path = path.removesuffix(suffix)
        sizes[path] += array.nbytes
    return dict(sizes)

"""A model as mlx-lm builds it from a config, without weights: the oracle of what `model_tensors` lists.

MLX arrays are lazy, so even a model of hundreds of gigabytes has its shapes and storage here and takes no memory until
something is computed with it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
from collections import Counter
from collections.abc import Mapping
from typing import Any

import mlx.core as mx


def build(config: Mapping[str, Any], *, dtype: str = "bfloat16") -> Any:
    """mlx-lm's module for `config`, freshly initialised (random values), quantised as the config says.

    Args:
        config: a parsed config.json of a family that mlx-lm knows.
        dtype: of floating parameters; those that mlx-lm never casts stay as they are.

    Raises:
        ValueError: mlx-lm knows no such model_type.
    """
    from mlx_lm.utils import quantize_model

    config = copy.deepcopy(dict(config))
    family = config.get("model_type")
    try:
        module = importlib.import_module(f"mlx_lm.models.{family}")
    except ImportError:
        raise ValueError(f"mlx-lm has no model_type {family!r}") from None
    model = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config)))
    keep = getattr(model, "cast_predicate", lambda path: True)
    target = getattr(mx, dtype)
    model.update(_mapped(model.parameters(), lambda path, array: array.astype(target if keep(path) else mx.float32)))
    if table := config.pop("quantization", config.pop("quantization_config", None)):
        own = {path: value for path, value in table.items() if path not in ("group_size", "bits", "mode")}
        fallback = getattr(model, "quant_predicate", None) or (lambda path, layer: True)
        # mlx-lm reports the bits per weight on standard output.
        with contextlib.redirect_stdout(io.StringIO()):
            model, _ = quantize_model(
                model,
                config,
                table["group_size"],
                table["bits"],
                quant_predicate=lambda path, layer: own.get(path, fallback(path, layer)),
            )
    return model


def stored_bytes(model: Any) -> dict[str, int]:
    """Bytes of every tensor of a built or loaded model, scales and biases with their weight, by parameter path."""
    from mlx.utils import tree_flatten

    sizes: Counter = Counter()
    for path, array in tree_flatten(model.parameters()):
        for suffix in (".weight", ".scales", ".biases"):
            path = path.removesuffix(suffix)
        sizes[path] += array.nbytes
    return dict(sizes)


def _mapped(tree: Any, change: Any) -> Any:
    from mlx.utils import tree_map_with_path

    return tree_map_with_path(change, tree)

"""Names and conventions of one set of weights in the three layouts the recipe meets.

training     trunk.model.*, mtp.*                          norms stored as w, applied as 1 + w
transformers model.*, mtp.*                                the same, without the prefix
mlx-lm       language_model.model.*, mtp.*                 norms stored as 1 + w, experts split into gate/up/down,
conv [C, K, 1]
"""

import re
from collections.abc import Callable
from typing import TypeVar

Array = TypeVar("Array")

_CENTRED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "model.norm.weight",
    "mtp.norm.weight",
    "q_norm.weight",
    "k_norm.weight",
    "pre_fc_norm_embedding.weight",
    "pre_fc_norm_hidden.weight",
)


def centred(name: str) -> bool:
    """True for the RMSNorms that apply 1 + w (all but the DeltaNet's gated norm)."""
    return name.endswith(_CENTRED)


def transformers_from_training(weights: dict[str, Array]) -> dict[str, Array]:
    """Drops the training prefix; the tied output matrix is not stored."""
    renamed = {name.removeprefix("trunk."): value for name, value in weights.items()}
    return {name: value for name, value in renamed.items() if name != "lm_head.weight"}


def mlx_from_transformers(weights: dict[str, Array], move_axis: Callable[[Array], Array]) -> dict[str, Array]:
    """transformers -> mlx-lm. `move_axis` turns a conv weight [C, 1, K] into [C, K, 1]."""
    found = {}
    for name, value in weights.items():
        target = name if name.startswith("mtp.") else f"language_model.{name}"
        if centred(name):
            value = value + 1.0
        elif name.endswith("conv1d.weight"):
            value = move_axis(value)
        if name.endswith("experts.gate_up_proj"):
            stem, middle = target.removesuffix("experts.gate_up_proj"), value.shape[-2] // 2
            found[f"{stem}switch_mlp.gate_proj.weight"] = value[..., :middle, :]
            found[f"{stem}switch_mlp.up_proj.weight"] = value[..., middle:, :]
        elif name.endswith("experts.down_proj"):
            found[target.removesuffix("experts.down_proj") + "switch_mlp.down_proj.weight"] = value
        else:
            found[target] = value
    return found


def transformers_from_mlx(
    weights: dict[str, Array], move_axis: Callable[[Array], Array], join: Callable[[Array, Array], Array]
) -> dict[str, Array]:
    """mlx-lm (dense) -> transformers. `move_axis` turns [C, K, 1] into [C, 1, K]; `join` concatenates gate and up along
    rows.
    """
    found = {}
    for name, value in weights.items():
        target = name.removeprefix("language_model.")
        match = re.fullmatch(r"(.+)switch_mlp\.(gate|up|down)_proj\.weight", target)
        if match and match[2] == "down":
            found[f"{match[1]}experts.down_proj"] = value
        elif match and match[2] == "gate":
            found[f"{match[1]}experts.gate_up_proj"] = join(value, weights[name.replace("gate_proj", "up_proj")])
        elif not match:
            if centred(target):
                value = value - 1.0
            elif target.endswith("conv1d.weight"):
                value = move_axis(value)
            found[target] = value
    return found

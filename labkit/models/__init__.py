"""From weights and tokens to logits, one row or many: `load`, the forward contract, the mlx-lm adapter."""

from labkit.models.chat import RenderedChat, Segment
from labkit.models.contract import Model, Output
from labkit.models.files import LoadError
from labkit.models.loading import LoadedModel, load
from labkit.models.rows import Rows
from labkit.models.synthetic import SyntheticModel, synthetic
from labkit.models.tokenizer import Tokenizer

__all__ = [
    "LoadError",
    "LoadedModel",
    "Model",
    "Output",
    "RenderedChat",
    "Rows",
    "Segment",
    "SyntheticModel",
    "Tokenizer",
    "load",
    "synthetic",
]

"""From weights and tokens to logits, one row or many: `load`, the forward contract, the mlx-lm adapter.

loading.py     `load`; zoo.py: names; files.py: a folder, checked; gguf.py, gguf_convert.py, gguf_tokenizer.py: GGUF
contract.py    the forward contract; rows.py: where rows stand; placement.py: rows and caches made ready for a forward
adapter.py     any mlx-lm module behind it
hybrid/        Qwen3.5 and 3.6 with labkit's kernels; hybrid/native/: the same in a CPU's compiled loops
decode_step.py a step as a function of arrays, for recording
synthetic.py   real shapes with random weights (random_weights.py)
tokenizer.py   text and tokens; detokenizer.py: text as it becomes certain; chat.py: conversations and their segments
"""

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

"""The specialised hybrid: Qwen3.5/3.6's text models with labkit's kernels in every layer.

| file | what it is |
| --- | --- |
| `config.py` | what the checkpoint says, checked |
| `matrix.py`, `packing.py` | its tensors in the layout that kernels read |
| `plan.py`, `variants.py` | how a forward computes, and the switches of ablations |
| `delta_layer.py`, `attention_layer.py`, `experts.py`, `mlp.py` | the layers |
| `decode.py`, `persistent.py` | a decode step as one function of arrays, and its layers as one launch each |
| `graph.py` | the layers over the weights, without caches |
| `memory.py` | a chunk's temporary memory, predicted |
| `hybrid.py` | the forward |
"""

from labkit.models.hybrid.config import HybridConfig, NotSpecialised
from labkit.models.hybrid.hybrid import Hybrid
from labkit.models.hybrid.packing import ModelWeights, pack
from labkit.models.hybrid.variants import Variants

__all__ = ["Hybrid", "HybridConfig", "ModelWeights", "NotSpecialised", "Variants", "pack"]

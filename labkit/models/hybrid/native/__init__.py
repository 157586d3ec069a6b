"""The specialised hybrid where MLX's device is a CPU: whole steps in compiled loops, fp32, weights packed as stored.

| file | what it is |
| --- | --- |
| `weights.py` | a layer's matrices in one arena of panels |
| `records.py` | what native code reads of a layer, a cache, a forward |
| `stages.py` | what happens to a block of tokens between two exchanges, compiled; for rows of few tokens in one call |
| `spans.py` | which tokens of a padded rectangle count, and where they stand |
| `cache_records.py` | the caches' memory in one forward |
| `forward.py` | one forward: its records, rows or stages shared between threads |
| `token_step.py` | a step of one token a row, its arguments kept for the next |
| `memory.py` | what a forward will take of the process |
| `model.py` | the forward contract |
| `ahead.py` | compiling all of it before anybody waits for it |

A row's logits and states have the same bits whatever its neighbours, its padding, the number of threads, and however
its tokens are cut into calls.
"""

from labkit.models.hybrid.native.model import NativeHybrid

__all__ = ["NativeHybrid"]

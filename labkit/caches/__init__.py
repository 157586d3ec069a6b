"""What layers remember: one file a kind, `base` states the contract.

Serial classes hold one row and are bit-identical to mlx-lm's; batched classes hold rows of several lengths. `merge` on
a serial class makes a batched one, `extract` on a batched class a serial one.
"""

from labkit.caches.base import OPERATIONS, Cache, Unsupported, lacking
from labkit.caches.contiguous import Contiguous
from labkit.caches.contiguous_batch import BatchedContiguous
from labkit.caches.foreign import Foreign
from labkit.caches.layout import ArraySpec, Layout
from labkit.caches.recurrent import BatchedRecurrent, Recurrent
from labkit.caches.rotating import Rotating
from labkit.caches.rotating_batch import BatchedRotating

__all__ = [
    "OPERATIONS",
    "ArraySpec",
    "BatchedContiguous",
    "BatchedRecurrent",
    "BatchedRotating",
    "Cache",
    "Contiguous",
    "Foreign",
    "Layout",
    "Recurrent",
    "Rotating",
    "Unsupported",
    "lacking",
]

"""What layers remember: one file a kind, `base` states the contract.

Serial classes hold one row and are bit-identical to mlx-lm's; batched classes hold rows of several lengths. `merge` on
a serial class makes a batched one, `extract` on a batched class a serial one.
"""

from labkit.caches.base import OPERATIONS, Cache, Unsupported, lacking
from labkit.caches.block_pool import BlockPool, PoolExhausted, PoolStats
from labkit.caches.block_table import Table, block_keys
from labkit.caches.contiguous import Contiguous
from labkit.caches.contiguous_batch import BatchedContiguous
from labkit.caches.foreign import Foreign
from labkit.caches.layout import ArraySpec, Layout
from labkit.caches.paged import Paged
from labkit.caches.paged_batch import BatchedPaged
from labkit.caches.paged_kv import PagedKV
from labkit.caches.paged_window import BatchedPagedWindow, PagedWindow
from labkit.caches.pages import Pages
from labkit.caches.recurrent import BatchedRecurrent, Recurrent
from labkit.caches.rotating import Rotating
from labkit.caches.rotating_batch import BatchedRotating
from labkit.caches.together import commit

__all__ = [
    "OPERATIONS",
    "ArraySpec",
    "BatchedContiguous",
    "BatchedPaged",
    "BatchedPagedWindow",
    "BatchedRecurrent",
    "BatchedRotating",
    "BlockPool",
    "Cache",
    "Contiguous",
    "Foreign",
    "Layout",
    "Paged",
    "PagedKV",
    "PagedWindow",
    "Pages",
    "PoolExhausted",
    "PoolStats",
    "Recurrent",
    "Rotating",
    "Table",
    "Unsupported",
    "block_keys",
    "commit",
    "lacking",
]

"""What layers remember: one file a kind, `base` states the contract.

Serial classes hold one row and are bit-identical to mlx-lm's; batched classes hold rows of several lengths. `merge` on
a serial class makes a batched one, `extract` on a batched class a serial one.

contiguous.py  the KV cache of full attention; contiguous_batch.py: for several rows, right-justified
rotating.py    a sliding window in a ring; rotating_batch.py: for several rows; ring.py: what both share
recurrent.py   states of one size (convolution tails, DeltaNet); recurrent_slots.py: as slots of a pool
paged.py       keys and values in blocks; paged_batch.py: for several rows; paged_window.py: of a sliding window
foreign.py     mlx-lm's own classes without one here
paged_kv.py    all pools of a model; block_pool.py: whose blocks are whose; block_table.py: a row's; pages.py: arrays
tail.py        the newest columns beside a buffer; host.py: buffers that the CPU writes in place
layout.py      shapes and bytes known beforehand; snapshots.py: caches as bytes; together.py: all layers or none
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

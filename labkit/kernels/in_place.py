"""The in-place rule: how a buffer that outlives a step grows or changes without being copied.

MLX has no in-place write for a custom kernel: it reads inputs and makes new outputs, and MLX orders launches by their
outputs alone. Writing through an input is a fault that check mode reports. MLX's own `slice_update` writes in place
only where the back end lets it (Metal and the CPU, when nobody else holds the buffer); on CUDA, MLX 0.32 copies the
whole buffer for every append: 670 to 820 us for 134 MB on an H200, however small the appended row.

So every kernel and cache here follows one rule:

1. A kernel returns its new state as an output. What it keeps must be as small as what it changes (a recurrent state:
   63 MB at the full shape, read and written once each step).
2. A buffer that grows has one small tail beside it (`labkit.caches.tail`, `labkit.caches.pages`). A step returns the
   tail anew and leaves the buffer alone; a full tail moves to the buffer at once, or as finished blocks. So an append
   costs the tail's size, and the buffer's once in as many tokens as the tail holds, on every back end.
3. A kernel that reads such a buffer takes buffer and tail side by side, and gets lengths on the device, so that its
   shape does not change from step to step.
4. Nobody but the owner keeps a reference to the tail: then the back ends that can, write it in place.
"""

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

A recorded step (`labkit.kernels.recording`) is outside of MLX and knows the order of its launches. There what a step
carries on is written where it was read, in one array instead of two, if no launch reads it behind the one that writes
it, and that one says that it may (`Kernel.in_place`: each thread reads what it rewrites before it does, and nobody else
reads that). The claim is a gate: check mode runs such a kernel with input and output in one memory, where a read of
what another thread writes is a race, and the bits must be those of two memories. MLX's own launches never do it.
"""

"""Training windows out of the token files, in a fixed order that a resumed run continues."""

from pathlib import Path

import numpy as np
import torch

from . import shape


class Windows:
    """Windows of `length` tokens. A round holds each group's windows `weight` times (fractions by a random subset),
    cut at a fresh
    random phase and shuffled; `position` (round, cursor) is all that a resumed run needs."""

    def __init__(self, folder: Path, length: int, device: torch.device, seed: int) -> None:
        self.length, self.seed, self.device = length, seed, device
        arrays = {group: np.load(folder / f"{group}.npy") for group in shape.GROUP_WEIGHTS}
        self.sizes = {group: array.size for group, array in arrays.items()}
        self.tokens = torch.from_numpy(np.concatenate(list(arrays.values())).astype(np.int32)).to(device)
        self.round, self.cursor = 0, 0
        self._shuffle()

    def _shuffle(self) -> None:
        rng = np.random.default_rng((self.seed, self.round, self.length))
        starts, base = [], 0
        for group, weight in shape.GROUP_WEIGHTS.items():
            size = self.sizes[group]
            whole, part = divmod(weight, 1.0)
            for share in [1.0] * int(whole) + [part] * (part > 0):
                first = int(rng.integers(self.length))
                cuts = np.arange(first, size - self.length, self.length)
                starts.append(base + rng.permutation(cuts)[: round(share * cuts.size)])
            base += size
        self.starts = torch.from_numpy(rng.permutation(np.concatenate(starts))).to(self.device)

    def go_to(self, round_: int, cursor: int) -> None:
        """Continue at a recorded place."""
        self.round, self.cursor = round_, cursor
        self._shuffle()

    def batch(self, rows: int) -> torch.Tensor:
        """[rows, length] int64 tokens on the device."""
        if self.cursor + rows > self.starts.numel():
            self.round, self.cursor = self.round + 1, 0
            self._shuffle()
        starts = self.starts[self.cursor : self.cursor + rows]
        self.cursor += rows
        offsets = torch.arange(self.length, device=self.device)
        return self.tokens[starts[:, None] + offsets].long()

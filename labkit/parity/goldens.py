"""Goldens: what an oracle said about a text, stored, so that the check needs the oracle no more.

A golden is one safetensors file. For every position it holds the best k logits (float32, ids, best first), the
logarithm of the normaliser over the whole vocabulary (float64: the mass outside the best k follows from it) and the
logit of the text's own token; for every m-th position of a window it holds all logits. Its metadata names the oracle,
its versions, the form and the fingerprint of the weights. The recipe is recipes/goldens/.

    tokens [sum of n + 1]   lengths [W]            top_ids [N, k]    top_logits [N, k]
    normaliser [N]          label_logits [N]       full_logits [F, V]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from labkit.parity.forms import Form
from labkit.parity.predictions import BestLogits, FullLogits, Prediction
from labkit.parity.sides import Side
from labkit.resources import data_folder

FORMAT = "labkit-golden-1"


class GoldenError(ValueError):
    """A golden that cannot be read, or that does not fit what it is compared with."""


class GoldenSide:
    """A stored oracle. It can predict its own windows, and any that one of them begins with.

    Attributes:
        windows: the token windows [n + 1] int32 it was made on.
        fingerprint: of the weights it was made from.
        about: the file's metadata: oracle, versions, model.
    """

    def __init__(self, path: str | Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = Path(path)
        if not self.path.is_file():
            raise GoldenError(f"there is no golden {self.path}")
        try:
            with safe_open(self.path, "np") as file:
                about = json.loads((file.metadata() or {}).get("labkit", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, json.JSONDecodeError) as error:
            raise GoldenError(f"{self.path} is not a whole safetensors file ({error}); make it again") from error
        if about.get("format") != FORMAT:
            raise GoldenError(
                f"{self.path} is not a golden of format {FORMAT}: its metadata say {about.get('format')!r}"
            )
        self.about = about
        self.name: str = about["oracle"]
        self.arithmetic: str = about["arithmetic"]
        self.form = Form(**about["form"])
        self.vocab_size: int = about["vocab_size"]
        self.fingerprint: str = about["fingerprint"]
        self.full_every: int = about["full_every"]
        bounds = np.cumsum(tensors["lengths"])[:-1]
        self.windows = [part.astype(np.int32) for part in np.split(tensors["tokens"], bounds)]
        self._best = BestLogits(
            tensors["top_ids"].astype(np.int64),
            tensors["top_logits"],
            tensors["normaliser"],
            tensors["label_logits"],
        )
        self._full = FullLogits(tensors["full_logits"])

    def require(self, fingerprint: str) -> None:
        """Raise GoldenError unless the golden was made from the weights with this fingerprint."""
        if fingerprint != self.fingerprint:
            raise GoldenError(
                f"{self.path.name} was made from other weights ({self.fingerprint[:12]}, not {fingerprint[:12]}): "
                "a comparison would show the weights' difference, not the engines'; make the golden again"
            )

    def first(self, positions: int) -> list[np.ndarray]:
        """The golden's own windows, cut so that they ask for its first `positions` predictions.

        Raises:
            GoldenError: if it holds fewer.
        """
        held = sum(len(window) - 1 for window in self.windows)
        if not 1 <= positions <= held:
            raise GoldenError(f"{self.path.name} holds {held} positions, not {positions}")
        chosen: list[np.ndarray] = []
        for window in self.windows:
            if positions > 0:
                chosen.append(window[: positions + 1])
                positions -= len(chosen[-1]) - 1
        return chosen

    def predict(self, window: np.ndarray) -> Iterator[Prediction]:
        wanted = len(window) - 1
        matches = [i for i, mine in enumerate(self.windows) if np.array_equal(mine[: wanted + 1], window)]
        if not matches:
            raise GoldenError(
                f"{self.path.name} holds no window that begins with these {len(window)} tokens; take its own windows"
            )
        before = [len(mine) - 1 for mine in self.windows[: matches[0]]]
        first, every = sum(before), self.full_every or wanted + 1
        row = sum(length // every for length in before) if self.full_every else 0
        for start in range(0, wanted, every):
            stop = min(start + every - 1, wanted)
            if stop > start:
                yield self._best.cut(first + start, first + stop)
            if start + every <= wanted:
                yield self._full.cut(row, row + 1)
                row += 1


def open_golden(name: str | Path) -> GoldenSide:
    """A golden by its file, or by its name on labkit's own shelf, such as "tiny-hybrid/torch-whole".

    Raises:
        GoldenError: if there is none of that name; the message lists those that there are.
    """
    shelf = data_folder() / "goldens"
    for path in (Path(name), shelf / f"{name}.safetensors"):
        if path.is_file():
            return GoldenSide(path)
    raise GoldenError(f"there is no golden {str(name)!r}; give a file, or one of: {', '.join(stored_goldens())}")


def golden_for(fingerprint: str, kind: str) -> GoldenSide | None:
    """The golden of one kind ("torch-whole", "torch-incremental", "mlx-bf16") for weights of this fingerprint."""
    candidates = (open_golden(name) for name in stored_goldens() if name.endswith(f"/{kind}"))
    return next((golden for golden in candidates if golden.fingerprint == fingerprint), None)


def stored_goldens() -> list[str]:
    """Names of the goldens on labkit's own shelf."""
    shelf = data_folder() / "goldens"
    return sorted(path.relative_to(shelf).with_suffix("").as_posix() for path in shelf.rglob("*.safetensors"))


def write_golden(
    path: str | Path,
    side: Side,
    windows: Sequence[np.ndarray],
    *,
    fingerprint: str,
    model: str,
    versions: dict[str, str],
    best: int = 32,
    full_every: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Let `side` predict every window, and keep what it says.

    Args:
        path: the file to write; it appears only when it is whole.
        side: the oracle.
        windows: token windows [n + 1] int32.
        fingerprint, model, versions: of the weights, their name, and of the packages that computed.
        best: logits kept a position (k).
        full_every: every n-th position of a window keeps all its logits; 0 for none.
        progress: called with (positions done, positions in all).
    """
    from safetensors.numpy import save_file

    total = sum(len(window) - 1 for window in windows)
    kept, full, done = [], [], 0
    for window in windows:
        labels, position = window[1:].astype(np.int64), 0
        for prediction in side.predict(window):
            stop = position + len(prediction)
            kept.append(BestLogits.of(prediction, labels[position:stop], best))
            whole = [at - position for at in range(position, stop) if full_every and (at + 1) % full_every == 0]
            full.append(prediction.logits[whole])
            position = stop
            if progress:
                progress(done + position, total)
        done += position
    small = np.uint16 if side.vocab_size <= 1 << 16 else np.uint32
    tensors = {
        "tokens": np.concatenate(windows).astype(small),
        "lengths": np.array([len(window) for window in windows], dtype=np.int32),
        "top_ids": np.concatenate([part.ids for part in kept]).astype(small),
        "top_logits": np.concatenate([part.values for part in kept]),
        "normaliser": np.concatenate([part.normaliser for part in kept]),
        "label_logits": np.concatenate([part.label for part in kept]),
        "full_logits": np.concatenate(full),
    }
    about = {
        "format": FORMAT,
        "oracle": side.name,
        "arithmetic": side.arithmetic,
        "form": {"kind": side.form.kind, "prefill": side.form.prefill, "chunk": side.form.chunk},
        "vocab_size": side.vocab_size,
        "fingerprint": fingerprint,
        "model": model,
        "versions": versions,
        "full_every": full_every,
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"labkit": json.dumps(about, sort_keys=True)})
    part.replace(path)
    return path

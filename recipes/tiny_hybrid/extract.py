"""Plain text out of what documentation packages hold: HTML, reST, pod, dictd, WordNet, SWORD, the `bible` program."""

import gzip
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lxml import html

Document = tuple[str, str]  # (name, text)

_FURNITURE = (
    "//script|//style|//nav|//head|//svg|//footer|//comment()|//*[contains(@class,'sphinxsidebar') or contains(@class,"
    "'related') or contains(@class,'navheader') or contains(@class,'navfooter') or contains(@class,'headerlink') or "
    "contains(@class,'searchmenu') or contains(@class,'menu') or contains(@class,'hide-on-print')]"
)


def html_text(page: bytes) -> str:
    """The readable text of one HTML page: no scripts, navigation or permalinks, at most one blank line in a row."""
    if not page.strip():
        return ""
    document = html.fromstring(page)
    for node in document.xpath(_FURNITURE):
        if node.getparent() is not None:
            node.drop_tree()
    return tidy(document.text_content())


def tidy(text: str) -> str:
    """Unix newlines, no control characters, no trailing blanks, at most one blank line in a row."""
    text = text.replace("\r\n", "\n").replace("\xa0", " ")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ufeff]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def read(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix in (".gz", ".dz") else data


def files(root: Path, suffixes: tuple[str, ...], keep: str = "", drop: str = "") -> Iterator[Path]:
    """Files under `root` in a stable order whose path ends in one of `suffixes`, matches `keep` and not `drop`."""
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            wanted = name.endswith(suffixes) and re.search(keep, path) and not (drop and re.search(drop, path))
            if wanted and os.path.isfile(path):  # packages hold dangling links
                yield Path(path)


def web_pages(root: Path, keep: str = "", drop: str = "") -> Iterator[Document]:
    for path in files(root, (".html", ".xhtml"), keep, drop):
        yield path.name, html_text(read(path))


def plain_files(root: Path, suffixes: tuple[str, ...], keep: str = "", drop: str = "") -> Iterator[Document]:
    for path in files(root, suffixes, keep, drop):
        text = read(path).decode("utf-8", "replace")
        if "\ufffd" not in text:
            yield path.name, tidy(text)


def dictd_entries(path: Path, headword: str) -> Iterator[Document]:
    """Entries of a dictd file, split where a line matches `headword` (one group: the word)."""
    text = read(path).decode("utf-8", "replace")
    starts = list(re.finditer(headword, text, re.M))
    ends = [m.start() for m in starts[1:]] + [len(text)]
    for match, end in zip(starts, ends, strict=True):
        yield match[1], tidy(text[match.start() : end])


def wordnet_synsets(root: Path) -> Iterator[tuple[list[str], str, str, list[str]]]:
    """(words, part of speech, gloss, examples) of every synset."""
    kinds = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
    for path in files(root, ("data.noun", "data.verb", "data.adj", "data.adv")):
        for line in path.read_text("latin-1").splitlines():
            if line.startswith("  ") or " | " not in line:
                continue
            fields, gloss = line.split(" | ", 1)
            fields = fields.split()
            words = [re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
            examples = re.findall(r'"([^"]+)"', gloss)
            meaning = re.sub(r'[;:,]?\s*"[^"]*"[^;"]*', "", gloss).strip(" ;")
            if meaning:
                yield words, kinds[fields[2]], meaning, examples


def sword_verses(module: str, sword_root: Path) -> Iterator[tuple[str, int, str]]:
    """(book, chapter, text) of each entry of a SWORD module, through libsword's `mod2imp`; paragraph marks become blank
    lines.
    """
    environment = {**os.environ, "SWORD_PATH": str(sword_root)}
    quiet = {"stderr": subprocess.DEVNULL, "text": True, "errors": "replace"}
    with subprocess.Popen(["mod2imp", module], stdout=subprocess.PIPE, env=environment, **quiet) as run:
        place, lines = None, []
        for line in [*run.stdout, "$$$end 0:0"]:
            if not line.startswith("$$$"):
                lines.append(line)
                continue
            if place:
                yield *place, _sword_markup("".join(lines))
            match = re.match(r"\$\$\$(.+) (\d+):\d+", line)
            place, lines = ((match[1], int(match[2])) if match else None), []


def _sword_markup(text: str) -> str:
    text = re.sub(
        r"<note.*?</note>|<title[^>]*>\s*</title>", " ", text, flags=re.S
    )  # notes stand where a blank belongs
    text = re.sub(r'<div[^>]*sID[^>]*type="x-p"[^>]*/>|<lb?[ >/][^>]*>|<title[^>]*>|</title>', "\n\n", text)
    text = re.sub(r"<[^>]+>", "", text)
    text = text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace("&quot;", '"')
    return re.sub(r"[ \t]+", " ", text)


def kjv_chapters(binary: Path, data: Path) -> Iterator[tuple[str, int, str]]:
    """(book, chapter, text) of the King James Version through Debian's `bible` program."""
    whole = subprocess.run(
        [binary, "-p", data, "-l72", "gen1:1-rev22:21"], capture_output=True, text=True, check=True
    ).stdout
    for part in re.split(r"\n(?=(?:[1-3] )?[A-Z][A-Za-z ]+ \d+\n\n)", "\n" + whole):
        heading, _, body = part.strip("\n").partition("\n")
        match = re.fullmatch(r"(.+) (\d+)", heading.strip())
        if match:
            yield match[1], int(match[2]), tidy(body)

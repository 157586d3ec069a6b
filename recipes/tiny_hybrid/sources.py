"""Where the training text comes from: public-domain and permissive Debian packages and Python wheels, each with its
licence.

`SOURCES` maps a source name to its packages, licence and reader. A reader takes the folder of unpacked packages and
yields (document name, text). `group` decides how often a document is seen in training (see `shape.GROUP_WEIGHTS`).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import extract
from .extract import Document


@dataclass(frozen=True)
class Source:
    licence: str
    group: str
    packages: tuple[str, ...]
    reader: Callable[[Path], Iterator[Document]]


WHEELS = [
    "django==5.2.19",
    "flask==3.1.3",
    "jinja2==3.1.6",
    "matplotlib==3.11.2",
    "networkx==3.6.1",
    "numpy==2.4.6",
    "pandas==3.1.1",
    "pytest==9.2.0",
    "rich==15.0.0",
    "scikit-learn==1.9.1",
    "scipy==1.17.1",
    "sqlalchemy==2.1.9",
    "sympy==1.14.0",
]
WHEEL_LICENCES = "BSD-3-Clause, MIT, Apache-2.0 or the PSF-like licence of matplotlib"


def reading_order(words: str) -> str:
    """A rough test for English prose: the commonest words make up a fifth of the text in every English manual."""
    found = re.findall(r"[^\W\d]+", words.lower())
    common = sum(w in {"the", "of", "to", "a", "and", "is", "in", "for", "be", "this"} for w in found)
    return words if common > 0.12 * max(len(found), 1) else ""


def _web(package: str, keep: str = "", drop: str = "") -> Callable[[Path], Iterator[Document]]:
    return lambda root: extract.web_pages(root / package, keep, drop)


def _plain(package: str, *suffixes: str, keep: str = "", drop: str = "") -> Callable[[Path], Iterator[Document]]:
    return lambda root: extract.plain_files(root / package, suffixes, keep, drop)


def _apache(root: Path) -> Iterator[Document]:
    for name, text in extract.web_pages(root / "apache2-doc"):
        yield name, reading_order(text)


def _sqlite(root: Path) -> Iterator[Document]:
    for name, text in extract.web_pages(root / "sqlite3-doc"):
        text = text.replace("Small. Fast. Reliable.Choose any three.", "")
        yield name, extract.tidy(re.sub(r"^(hide|►|▼)\n", "", text, flags=re.M))


def _wordnet(root: Path) -> Iterator[Document]:
    lines = []
    for words, kind, meaning, examples in extract.wordnet_synsets(root / "wordnet-base"):
        quoted = "".join(f' "{example}"' for example in examples)
        lines.append(f"{', '.join(words)} ({kind}): {meaning}.{quoted}")
    for start in range(0, len(lines), 50):
        yield f"synsets-{start}", "\n".join(lines[start : start + 50])


def _jargon(root: Path) -> Iterator[Document]:
    text = extract.read(root / "dict-jargon/usr/share/dictd/jargon.dict.dz").decode("utf-8")
    yield "jargon", extract.tidy(text)


def _devil(root: Path) -> Iterator[Document]:
    path = root / "dict-devil/usr/share/dictd/devil.dict.dz"
    return extract.dictd_entries(path, r"^([A-Z][A-Z'-]+)(?:, | \()")


def _kjv(root: Path) -> Iterator[Document]:
    chapters = extract.kjv_chapters(root / "bible-kjv/usr/bin/bible", root / "bible-kjv-text/usr/lib")
    for book, chapter, text in chapters:
        yield f"{book} {chapter}", f"{book} {chapter}\n\n{text}"


def _flowing(text: str) -> str:
    """Each paragraph on one line, blanks single and none before punctuation."""
    lines = [re.sub(r" (?=[,.;:!?’”])", "", " ".join(paragraph.split())) for paragraph in re.split(r"\n\s*\n", text)]
    return "\n\n".join(line for line in lines if line)


def _sword(module: str) -> Callable[[Path], Iterator[Document]]:
    def read(root: Path) -> Iterator[Document]:
        place, verses, seen = None, [], set()  # an entry that covers several verses is repeated at each
        for book, chapter, text in [*extract.sword_verses(module, root / "sword/usr/share/sword"), ("", 0, "")]:
            if (book, chapter) != place:
                body = _flowing(" ".join(verses))
                if place and place[1] and body:
                    yield f"{place[0]} {place[1]}", f"{place[0]} {place[1]}\n\n{body}"
                place, verses = (book, chapter), []
            if len(text) < 200 or text not in seen:
                verses.append(text.strip(" "))
            seen.add(text)

    return read


def _stdlib(root: Path) -> Iterator[Document]:
    for package in ("libpython3.11-minimal", "libpython3.11-stdlib"):
        yield from extract.plain_files(root / package, (".py",), drop=r"pydoc_data|encodings/")


def _wheels(root: Path) -> Iterator[Document]:
    for folder in sorted((root / "wheels").iterdir()):
        for name, text in extract.plain_files(folder, (".py",), drop=r"/_?vendor/|/tests?/|/locale/"):
            yield f"{folder.name}/{name}", text


_RUST_BOOKS = (
    r"/html/(book|reference|nomicon|rust-by-example|rustc|cargo|edition-guide|embedded-book|rustdoc|error_codes)/"
)

SOURCES: dict[str, Source] = {
    "kjv": Source("public domain (text)", "scripture", ("bible-kjv", "bible-kjv-text"), _kjv),
    "web": Source("public domain", "scripture", ("sword-text-web",), _sword("engWEB2015eb")),
    "henry": Source("public domain", "commentary", ("sword-comm-mhcc",), _sword("MHCC")),
    "spurgeon": Source("public domain", "commentary", ("sword-comm-tdavid",), _sword("TDavid")),
    "scofield": Source("public domain", "commentary", ("sword-comm-scofield",), _sword("Scofield")),
    "devil": Source("public domain", "lexicon", ("dict-devil",), _devil),
    "jargon": Source("public domain", "lexicon", ("dict-jargon",), _jargon),
    "wordnet": Source("WordNet 3.0", "wordnet", ("wordnet-base",), _wordnet),
    "sqlite": Source("public domain", "sqlite", ("sqlite3-doc",), _sqlite),
    "postgresql": Source("PostgreSQL", "manual", ("postgresql-doc-15",), _web("postgresql-doc-15")),
    "python": Source("PSF-2.0", "manual", ("python3.11-doc",), _plain("python3.11-doc", ".rst.txt")),
    "apache": Source("Apache-2.0", "manual", ("apache2-doc",), _apache),
    "nodejs": Source("MIT", "manual", ("nodejs-doc",), _plain("nodejs-doc", ".md", ".md.gz")),
    "rust": Source("MIT or Apache-2.0", "manual", ("rust-doc",), _web("rust-doc", _RUST_BOOKS, r"print\.html")),
    "perl": Source("Artistic or GPL-1+ (taken under Artistic)", "manual", ("perl-doc",), _plain("perl-doc", ".pod")),
    "erlang": Source("Apache-2.0", "manual", ("erlang-doc",), _web("erlang-doc")),
    "cmake": Source("BSD-3-Clause", "manual", ("cmake-doc",), _plain("cmake-doc", ".rst.txt")),
    "boost": Source("BSL-1.0", "manual", ("libboost1.74-doc",), _web("libboost1.74-doc")),
    "django": Source(
        "BSD-3-Clause", "manual", ("python-django-doc",), _web("python-django-doc", drop=r"genindex|modindex|search")
    ),
    "sqlalchemy": Source(
        "MIT", "manual", ("python-sqlalchemy-doc",), _plain("python-sqlalchemy-doc", ".rst", ".rst.txt")
    ),
    "pandas": Source("BSD-3-Clause", "manual", ("python-pandas-doc",), _plain("python-pandas-doc", ".rst.txt")),
    "sklearn": Source("BSD-3-Clause", "manual", ("python-sklearn-doc",), _plain("python-sklearn-doc", ".rst.txt")),
    "llvm": Source("Apache-2.0 with LLVM exception", "manual", ("llvm-14-doc",), _plain("llvm-14-doc", ".rst.txt")),
    "stdlib": Source("PSF-2.0", "code", ("libpython3.11-stdlib", "libpython3.11-minimal"), _stdlib),
    "wheels": Source(WHEEL_LICENCES, "code", (), _wheels),
}

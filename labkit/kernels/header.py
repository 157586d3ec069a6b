"""Shared headers of which a kernel gets only what it uses.

MLX hashes a kernel's whole text at each launch, so a long shared header costs microseconds every time. A header file
is cut into sections, each opened by a line that names what it provides:

    //@provides block_sum block_max
    template <int TG> inline float block_sum(...) { ... }

A section is emitted if the kernel, or an emitted section, uses one of those words. What stands before the first
section is always emitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from labkit.kernels.metal_text import identifiers, strip_comments

_MARK = "//@provides"


@dataclass(frozen=True)
class Section:
    """A part of a header that is emitted as a whole."""

    provides: frozenset[str]
    text: str

    @cached_property
    def uses(self) -> frozenset[str]:
        """Every word in it."""
        return frozenset(identifiers(self.text))


@dataclass(frozen=True)
class Header:
    """A header in sections, in the order in which they must appear."""

    preamble: str
    sections: tuple[Section, ...]

    @classmethod
    def parse(cls, text: str) -> Header:
        """Cut a text at its `//@provides` lines.

        Raises:
            ValueError: a section that provides nothing, or a name provided twice.
        """
        preamble, *parts = ("\n" + text).split("\n" + _MARK)
        sections, seen = [], set()
        for part in parts:
            words, _, body = part.partition("\n")
            names = frozenset(words.split())
            if not names:
                raise ValueError(f"a header section provides nothing: {body[:60]!r}")
            if twice := names & seen:
                raise ValueError(f"header sections provide {sorted(twice)} twice")
            seen |= names
            sections.append(Section(names, body))
        return cls(preamble.strip("\n"), tuple(sections))

    @classmethod
    def from_file(cls, *paths: Path) -> Header:
        """One header of several files, in order."""
        return _read(tuple(paths))

    def followed_by(self, *others: Header) -> Header:
        """This header with the sections of others after its own.

        Raises:
            ValueError: a name that two of them provide differently.
        """
        sections = list(self.sections)
        for section in (section for other in others for section in other.sections):
            if section not in sections:
                sections.append(section)
        seen = [name for section in sections for name in section.provides]
        if twice := {name for name in seen if seen.count(name) > 1}:
            raise ValueError(f"header sections provide {sorted(twice)} twice")
        preambles = dict.fromkeys(header.preamble for header in (self, *others) if header.preamble)
        return Header("\n".join(preambles), tuple(sections))

    def used_sections(self, *texts: str) -> list[Section]:
        """The sections that `texts` need, with those that these need in turn."""
        wanted = set().union(*(identifiers(text) for text in texts)) | identifiers(self.preamble)
        chosen: set[int] = set()
        grew = True
        while grew:
            grew = False
            for index, section in enumerate(self.sections):
                if index not in chosen and section.provides & wanted:
                    chosen.add(index)
                    wanted |= section.uses
                    grew = True
        return [self.sections[index] for index in sorted(chosen)]

    def used_by(self, *texts: str) -> str:
        """The header as emitted for a kernel of these texts: no comments, no blank lines, only what is needed."""
        parts = [self.preamble, *(section.text for section in self.used_sections(*texts))]
        return strip_comments("\n".join(parts))


@cache
def _read(paths: tuple[Path, ...]) -> Header:
    return Header.parse("\n".join(Path(path).read_text() for path in paths))

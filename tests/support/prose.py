"""How long pages and sentences of docs/ are: ``python tests/support/prose.py [PAGE ...]`` prints a row a page.

Tables that a script writes are not counted: between two marks, or on a page that a script writes whole.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = ("tutorial", "inspect", "repair", "numbers", "compression", "decoders", "sizes", "writing-a-pass")
"""The main pages, in the order in which they are read."""
WRITTEN_WHOLE = ("accuracy", "alarms", "architectures", "gallery", "hazards", "latency", "sized-models")
"""Pages that a script writes, their words too."""
MARKED = re.compile(r"<!-- (?:rows|([\w ]+): begin) -->.*?<!-- (?:end of rows|\1: end) -->", re.DOTALL)
UNSAID = re.compile(r"\b(?:of which|what [\w ]+ (?:is|are) told)\b", re.IGNORECASE)
"""Phrases that nobody would say aloud."""


@dataclass(frozen=True)
class Prose:
    """The length of a page.

    Attributes:
        words: of the page with its code, without tables that a script writes.
        sentences: each sentence of its paragraphs and bullets.
    """

    words: int
    sentences: tuple[str, ...]

    @property
    def mean(self) -> float:
        """The mean number of words in a sentence."""
        return sum(map(length, self.sentences)) / max(1, len(self.sentences))

    @property
    def longest(self) -> str:
        """The sentence with the most words."""
        return max(self.sentences, key=length, default="")


def pages() -> dict[str, Path]:
    """Name -> file of every page, README's among them."""
    return {path.stem: path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}


def length(sentence: str) -> int:
    """The number of words; code in backticks is one word."""
    return len([word for word in re.sub(r"`[^`]+`", "code", sentence).split() if re.search(r"\w", word)])


def read(name: str, text: str) -> Prose:
    """The prose of a page."""
    hand = MARKED.sub("", text)
    if name in WRITTEN_WHOLE:
        hand = re.sub(r"^\|.*\n?", "", hand, flags=re.MULTILINE)
    words = re.sub(r"<!--.*?-->", "", hand, flags=re.DOTALL).split()
    return Prose(sum(re.search(r"\w", word) is not None for word in words), tuple(_sentences(hand)))


def _sentences(text: str) -> list[str]:
    text = re.sub(r"^(?:```|~~~).*?^(?:```|~~~)$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^(?:#|\||!\[| {4}).*$", "\n", text, flags=re.MULTILINE)  # titles, tables, pictures, code
    text = re.sub(r"\]\([^)]*\)", "", text).replace("[", "").replace("**", "")
    blocks = re.split(r"\n\s*\n|^\s*(?:\*|\d+\.) ", text, flags=re.MULTILINE)
    parts = (
        part
        for block in blocks
        for part in re.split(r"(?<=[.!?:])[\")*]*\s+(?=[\"(*`A-Z0-9])", " ".join(block.split()))
    )
    return [part for part in parts if re.search(r"\w", part)]


def main(names: list[str]) -> None:
    """Print a row for each page; of pages that are named, their long sentences too."""
    total = 0
    for name, path in pages().items():
        page = read(name, path.read_text(encoding="utf-8"))
        total += page.words * (path.parent.name == "docs")
        if name in names or not names:
            figures = f"{page.words:6} words, {len(page.sentences):3} sentences of {page.mean:4.1f} words"
            print(f"{name:20} {figures}, the longest {length(page.longest)}")
        for said in page.sentences if name in names else ():
            if length(said) > 30 or UNSAID.search(said):
                print(f"    {length(said)}: {said}")
    print(f"{'docs/':20} {total:6} words")


if __name__ == "__main__":
    main(sys.argv[1:])

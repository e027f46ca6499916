"""The pages stay short, and so do their sentences: tests/support/prose.py prints the figures."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
from prose import GUIDE, ROOT, UNSAID, length, pages, read
from typer.main import get_command

import anesurgery as ane
from anesurgery.commands.app import app

WORDS, GUIDE_WORDS = 30_000, 900
MEAN, LONGEST = 20, 35
PAGES = {name: path.read_text(encoding="utf-8") for name, path in pages().items()}


def too_long(name: str, text: str) -> list[str]:
    """What nobody would read aloud."""
    page = read(name, text)
    found = [f"{length(said)} words: {said}" for said in page.sentences if length(said) > LONGEST]
    found += [f"unsaid: {said}" for said in page.sentences if UNSAID.search(said)]
    return [*found, *([f"{page.mean:.1f} words a sentence"] if page.mean > MEAN else [])]


@pytest.mark.parametrize("name", PAGES)
def test_sentences_can_be_read_aloud(name: str) -> None:
    assert too_long(name, PAGES[name]) == []


@pytest.mark.parametrize(
    "text", ["so " * 36 + "on.", "A model of which no op runs there.", ("twenty " * 20 + "one. ") * 3]
)
def test_a_sentence_that_nobody_would_say_is_noticed(text: str) -> None:
    assert too_long("page", f"# Title\n\nA word.\n\n* {text}\n")


def test_code_titles_and_tables_are_no_sentences() -> None:
    text = (
        "# A title\n\n```sh\nls\n```\n\n| a | table |\n|---|---|\n\nOne `code of words`. Two [links](a.md)!\n"
    )
    assert read("page", text).sentences == ("One `code of words`.", "Two links!")


@pytest.mark.parametrize("name", GUIDE)
def test_a_page_of_the_guide_is_read_in_a_few_minutes(name: str) -> None:
    assert read(name, PAGES[name]).words <= GUIDE_WORDS


def test_the_pages_are_few_words() -> None:
    assert sum(read(name, text).words for name, text in PAGES.items() if name != "README") <= WORDS


def test_tables_of_scripts_do_not_count() -> None:
    rows = "<!-- rows -->\n\n| two |\n\n<!-- end of rows -->"
    marked = f"one\n{rows}\n<!-- mixed bits: begin -->3<!-- mixed bits: end -->"
    assert read("page", marked).words == 1
    assert read("latency", "one\n| two |\n").words == 1
    assert read("page", "one\n| two |\n").words == 2


BINARY = re.compile(r"\b[KMGT]iB\b")
"""Units beside which MB reads as a mistake."""


def test_sizes_have_one_unit() -> None:
    """In what a person reads: pages, and all of the code."""
    folders = [ROOT / name for name in ("anesurgery", "passes", "recipes")]
    files = {path for folder in folders for kind in ("*.py", "*.html") for path in folder.rglob(kind)}
    texts = PAGES | {str(path): path.read_text(encoding="utf-8") for path in files}
    assert {name: found for name, text in texts.items() if (found := BINARY.findall(text))} == {}
    assert BINARY.findall("weights 118 MiB of 1 GiB") == ["MiB", "GiB"], "the wrong version"


ENTRY = re.compile(r"^ *(?:\w+: |Args:|Returns:|Raises:|Attributes:|>>> .*)", re.MULTILINE)


def docstrings() -> dict[str, str]:
    """What `help` shows of the public names and of their public methods."""
    found = {name: getattr(ane, name) for name in ane.__all__ if not inspect.ismodule(getattr(ane, name))}
    for name, owner in list(found.items()):
        members = vars(owner).items() if inspect.isclass(owner) else ()
        found |= {f"{name}.{k}": v for k, v in members if not k.startswith("_")}
    return {name: doc for name, value in found.items() if (doc := inspect.getdoc(value)) and callable(value)}


def helps() -> dict[str, str]:
    """What `--help` shows of each command and option."""
    found = {}
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        found[name] = command.help or ""
        found |= {f"{name} {p.opts[0]}": getattr(p, "help", None) or "" for p in command.params}
    return found


@pytest.mark.parametrize("texts", [docstrings, helps])
def test_what_help_shows_can_be_read_aloud(texts: Callable[[], dict[str, str]]) -> None:
    entries = {name: ENTRY.sub("\n\n", text).replace(";", ".\n\n") for name, text in texts().items()}
    assert {name: found for name, text in entries.items() if (found := too_long(name, text))} == {}

"""The pages stay short, and so do their sentences: tests/support/prose.py prints the figures."""

from __future__ import annotations

import pytest
from prose import GUIDE, OTHERS, UNSAID, length, pages, read

WORDS, GUIDE_WORDS = 30_000, 900
MEAN, LONGEST = 20, 35
PAGES = {name: path.read_text(encoding="utf-8") for name, path in pages().items()}


def too_long(name: str, text: str) -> list[str]:
    """What nobody would read aloud."""
    page = read(name, text)
    found = [f"{length(said)} words: {said}" for said in page.sentences if length(said) > LONGEST]
    found += [f"unsaid: {said}" for said in page.sentences if UNSAID.search(said)]
    return [*found, *([f"{page.mean:.1f} words a sentence"] if page.mean > MEAN else [])]


@pytest.mark.parametrize("name", [name for name in PAGES if name not in OTHERS])
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

"""The pages about wrong answers print the tables that the product reads."""

from __future__ import annotations

import re

import pytest
from kind_pages import BEGIN, DOCS, END, PAGES, filled


@pytest.mark.parametrize("page", PAGES)
def test_the_page_has_the_table_of_the_product(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == filled(page), "run python tests/support/kind_pages.py"


def test_another_row_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from anesurgery.interpret.arithmetic import engine_faults

    monkeypatch.setattr("kind_pages.FAULTS", engine_faults.FAULTS[1:])
    assert (DOCS / "engine-faults.md").read_text(encoding="utf-8") != filled("engine-faults.md")


def test_the_page_of_against_torch_lists_the_planted_faults() -> None:
    source = (DOCS.parent / "tests" / "checking" / "test_faults_between_modules.py").read_text(encoding="utf-8")
    planted = re.findall(r'^    "([^"]+)": \(', source, re.MULTILINE)
    page = (DOCS / "against-torch.md").read_text(encoding="utf-8")
    assert len(planted) == 20
    assert re.findall(r"^\| ([^|`]+?) \| `", page, re.MULTILINE) == planted

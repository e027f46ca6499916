"""Pages of docs/ in which a script writes what it measured, between two marks."""

from __future__ import annotations

from pathlib import Path


def between(page: str, marks: str) -> tuple[str, str, str]:
    """What stands before the begin mark, between the marks, and after the end mark.

    Raises:
        ValueError: the page lacks a mark; says which.
    """
    begin, end = (f"<!-- {marks}: {side} -->" for side in ("begin", "end"))
    if begin not in page or end not in page:
        raise ValueError(f"the page has no {begin} and {end}")
    before, _, rest = page.partition(begin)
    inner, _, after = rest.partition(end)
    return f"{before}{begin}", inner, f"{end}{after}"


def filled(page: str, marks: str, text: str) -> str:
    """The page with another text between its marks."""
    before, _, after = between(page, marks)
    return f"{before}\n{text}\n{after}"


def fill(page: Path | None, marks: str, text: str) -> None:
    """Write a text between the marks of a page, where there is one."""
    if page is not None:
        page.write_text(filled(page.read_text(encoding="utf-8"), marks, text), encoding="utf-8")

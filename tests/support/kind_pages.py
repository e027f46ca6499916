"""The tables of pages that print what the product reads: wrong answers, passes and their grades.

``python tests/support/kind_pages.py`` writes them into the pages; tests/test_kind_pages.py holds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from torch_differences import DIFFERENCES

from anesurgery import registry
from anesurgery.files.runner_file import Runner
from anesurgery.files.size_index import Padding, SizeRow
from anesurgery.interpret.arithmetic.engine_faults import FAULTS, Fault
from anesurgery.placement.evidence import Rule
from anesurgery.placement.rules import lost_in_conversion
from anesurgery.placement.rules.loading import REPORTS, LoadReport
from anesurgery.placement.rules.whole_model import SLOW_LOADS as SLOW

DOCS = Path(__file__).parents[2] / "docs"
REPAIR = "repair (by a pass, if one is named)"
BEGIN, END = "<!-- rows -->", "<!-- end of rows -->"


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + "---|" * columns]
    cells = ((cell.replace("|", "\\|") for cell in row) for row in rows)
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def _repair(one: Fault | Rule | LoadReport) -> str:
    """The advice, behind the name of the pass that does it, if there is one."""
    return f"`{one.remedy}`: {one.advice}" if one.remedy else one.advice


def faults() -> str:
    """Ops that are wrong inside their own body."""
    rows = ((f"`{f.name}`", f.what, f.seen, f.source, _repair(f)) for f in FAULTS)
    return table(f"name | what comes out | seen on | source | {REPAIR}", rows)


def losses() -> str:
    """What conversions lose."""
    rules = (*lost_in_conversion.RULES, lost_in_conversion.UNMOVED, lost_in_conversion.UNUSED)
    rows = ((f"`{r.id}`", r.because, r.source, _repair(r)) for r in rules)
    return table(f"finding | what was lost | source | {REPAIR}", rows)


def loads() -> str:
    """Loads that crash, hang, fail or take minutes."""
    rows = [(f"`{r.id}`", r.what, r.seen, r.source, _repair(r)) for r in REPORTS]
    rows += [(f"`{r.id}`", r.because, r.scope.os.removeprefix("seen on "), r.source, _repair(r)) for r in SLOW]
    return table(f"finding | what happened | seen on | source | {REPAIR}", rows)


def differences() -> str:
    """Where Core ML differs from PyTorch."""
    rows = (
        (d.name, d.core_ml, d.torch, d.source if d.decided else f"{d.source}, so still open")
        for d in DIFFERENCES
    )
    return table("op | Core ML | PyTorch | source", rows)


GRADE = re.compile(r"^Grade: (.+?)\.$", re.MULTILINE)
WHY = re.compile(r"^Why it helps: (.+?)\n(?:\n|\Z)", re.MULTILINE | re.DOTALL)


def passes() -> str:
    """Every pass: its first sentence, why it helps, and its grade, from its docstring."""
    return table(
        "pass | what it does | why it helps | grade", (_row_of_a_pass(n) for n in registry.pass_names())
    )


def _row_of_a_pass(name: str) -> tuple[str, ...]:
    text = registry.documentation(name).strip() + "\n"
    parts = (
        text.partition("\n\n")[0],
        *(found[0] if (found := kind.findall(text)) else "" for kind in (WHY, GRADE)),
    )
    return (f"`{name}`", *(" ".join(part.split()) for part in parts))


FIELD = re.compile(r"^ {8}(\w+): (.+?)(?=^ {8}\w+: |^ {4}\S|\Z)", re.MULTILINE | re.DOTALL)
FORMATS = {"`runner.json`": Runner, "a size in `sizes.json`": SizeRow, "`padding` in `sizes.json`": Padding}


def formats() -> str:
    """Each entry of the files that runners read, from the docstring of its class."""
    rows = (
        (file, f"`{name}`", " ".join(words.split()))
        for file, kind in FORMATS.items()
        for name, words in FIELD.findall(kind.__doc__ or "")
    )
    return table("file | entry | meaning", rows)


PAGES: dict[str, Callable[[], str]] = {
    "engine-faults.md": faults,
    "conversion-losses.md": losses,
    "loads.md": loads,
    "interpreter.md": differences,
    "passes.md": passes,
    "file-formats.md": formats,
}
"""Page -> its table."""


def filled(page: str) -> str:
    """The text of a page with its table made anew."""
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = f"{BEGIN}\n\n{PAGES[page]()}\n\n{END}"
    return re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: rows, text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(filled(name), encoding="utf-8")

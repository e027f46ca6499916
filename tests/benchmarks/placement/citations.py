"""Every citation of every rule of placement, with the sentence that rests on it: chip, OS, grade and source.

`make citations` prints them; `--page` writes them as a page.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anesurgery.placement
from anesurgery.placement.evidence import Rule

HEAD = """# What each rule rests on

`make citations` writes this page from the tables of `anesurgery.placement`; nothing on it is typed.
"""


def rules_in(value: Any) -> Iterator[Rule]:
    """The rules in a module's value, tables of tables included."""
    if isinstance(value, Rule):
        yield value
    elif isinstance(value, (tuple, list)):
        for held in value:
            yield from rules_in(held)
    elif isinstance(value, dict):
        yield from rules_in(list(value.values()))


def every_rule() -> dict[str, list[Rule]]:
    """Id -> the rows of that id, in the modules of `anesurgery.placement`."""
    found: dict[str, list[Rule]] = {}
    for module in pkgutil.walk_packages(anesurgery.placement.__path__, "anesurgery.placement."):
        if not module.name.endswith("._template"):
            for rule in rules_in(list(vars(importlib.import_module(module.name)).values())):
                plain = replace(rule, remedy=None)  # tables add the pass that repairs it
                if plain not in found.setdefault(rule.id, []):
                    found[rule.id].append(plain)
    return dict(sorted(found.items()))


def lines() -> Iterator[str]:
    """A line of the page for each row."""
    yield "| rule | sentence | chips, OS, way | grade | source |"
    yield "|---|---|---|---|---|"
    for rules in every_rule().values():
        for rule in rules:
            cells = (f"`{rule.id}`", rule.because, str(rule.scope), rule.grade.value, rule.source)
            yield "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def main() -> None:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--page", type=Path, help="write the table there, as Markdown")
    given = parser.parse_args()
    text = "\n".join([HEAD, *lines()]) + "\n"
    if given.page:
        given.page.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()

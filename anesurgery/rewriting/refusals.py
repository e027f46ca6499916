"""What passes refused, as a report gives it: a line for each cause, and a row for each reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from anesurgery.errors import Refusal
from anesurgery.mil import Operation
from anesurgery.text import to_text

Named = tuple[str, Refusal]
"""The name of a pass, and what it refused."""

STAYS = re.compile(r"(?P<op>\w+) stays off the ANE: (?P<why>.*?)(?: \((?P<remedy>\w+)\))?", re.DOTALL)
"""What is said of an op that stays where it is, and the pass that findings name for it."""
NAME = re.compile(r"%[\w./:-]+|\bis\d+\b|\b\w*(?:_\w*\d|\d\w*_)\w*")
"""An op or value, or a symbolic length, by name: differs from one place to the next, as numbers do."""
NUMBER = re.compile(r"(?<!\w)\d+(?:x\d+)+|(?<!\w)-?\d[\d.,]*(?:e[+-]?\d+)?")
SHAPE = re.compile(r"\([#%', ]+\)")
"""A tuple of both."""
OP_TEXT = 160
"""Characters of an op in a report at most: two lines of a terminal."""


@dataclass(frozen=True)
class Refused:
    """The refusals of one cause."""

    step: str
    """The name of the pass."""
    refusals: tuple[Refusal, ...]
    remedy: str = ""
    """The pass that findings name for their ops; "" for none."""
    tried: tuple[Refusal, ...] = ()
    """What that pass itself refused there: it is reported here only."""

    @property
    def op(self) -> str:
        """The text of the first op; "" where it is a layer, or a whole program."""
        return op_text(self.refusals[0].where)

    @property
    def line(self) -> str:
        """``pass: reason (3 times, first at op)``; of what stays off the ANE, how many and what was tried."""
        first, count = self.refusals[0], len(self.refusals)
        where = "" if first.where is None else first.where.name
        if (stays := STAYS.fullmatch(first.reason)) is None:
            at = f" ({'at' if count == 1 else f'{count} times, first at'} {where})" if where else ""
            return f"{self.step}: {first.reason}{at}"
        kinds = {refusal.reason.split(" ", 1)[0] for refusal in self.refusals}
        kind = f"{stays['op']} " if len(kinds) == 1 else ""
        what = f"{kind}stays" if count == 1 else f"{count} {kind}ops stay"
        at = f" ({'at' if count == 1 else 'first at'} {where})" if where else ""
        return "; ".join([f"{what} off the ANE: {stays['why']}{at}", *self._remedies()])

    def _remedies(self) -> Iterator[str]:
        """Yield what became of the remedy: it is only named, or it refuses these ops or the whole model."""
        if self.remedy and not self.tried:
            yield f"`{self.remedy}` is named for it"
        for here, words in ((True, " cannot help"), (False, "")):
            groups = by_cause([(self.remedy, r) for r in self.tried if (r.where is not None) == here])
            counts = [f" ({len(g.refusals)} times)" if len(g.refusals) > 1 else "" for g in groups]
            reasons = [group.refusals[0].reason + count for group, count in zip(groups, counts, strict=True)]
            if reasons:
                yield f"`{self.remedy}`{words}: {'; '.join(reasons)}"


def cause(refusal: Refusal) -> tuple[str, str]:
    """Return a reason without names and numbers of its place, and the pass that is named in it."""
    stays = STAYS.fullmatch(refusal.reason)
    words, remedy = (refusal.reason, "") if stays is None else (f"stays: {stays['why']}", stays["remedy"] or "")
    return SHAPE.sub("(#)", NUMBER.sub("#", NAME.sub("%", words))), remedy


def by_cause(refusals: Sequence[Named]) -> list[Refused]:
    """Return the refusals of each cause together, in the order of their first.

    If findings name a pass for ops, what this pass refused at these ops, or for the whole model, is reported
    with these ops (`Refused.tried`), and each refusal once.
    """
    groups: dict[tuple[str, tuple[str, str]], list[Refusal]] = {}
    for step, refusal in refusals:
        groups.setdefault((step, cause(refusal)), []).append(refusal)
    rows = [Refused(step, tuple(found), remedy) for (step, (_, remedy)), found in groups.items()]
    reported = set[int]()
    for number, row in enumerate(rows):
        places = {refusal.where.name for refusal in row.refusals if refusal.where}
        tried = [
            refusal
            for step, refusal in refusals
            if row.remedy
            and step == row.remedy
            and id(refusal) not in reported
            and (refusal.where is None or refusal.where.name in places)
        ]
        reported |= set(map(id, tried))
        rows[number] = replace(row, tried=tuple(tried))
    rows = [replace(row, refusals=tuple(r for r in row.refusals if id(r) not in reported)) for row in rows]
    return [row for row in rows if row.refusals]


def refusal_lines(refusals: Sequence[Named]) -> list[str]:
    """Return one line for each cause."""
    return [group.line for group in by_cause(refusals)]


def grouped_refusals(refusals: Sequence[Named]) -> list[tuple[str, str, list[Refusal]]]:
    """Return rows (pass, reason, refusals), one for each distinct reason, in the order of their first."""
    rows: dict[tuple[str, str], list[Refusal]] = {}
    for name, refusal in refusals:
        rows.setdefault((name, refusal.reason), []).append(refusal)
    return [(name, reason, found) for (name, reason), found in rows.items()]


def op_text(op: object) -> str:
    """Return an op in the canonical text, in one line; "" of anything else."""
    line = to_text(op).splitlines()[0] if isinstance(op, Operation) else ""
    return line if len(line) <= OP_TEXT else f"{line[: OP_TEXT - 3]}..."

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
    """The refusals of one cause.

    Attributes:
        step: the pass.
        refusals: all of them, in order.
        remedy: the pass that is named for their ops; "" for none.
        tried: what that pass itself refused there, of which nothing else is said.
    """

    step: str
    refusals: tuple[Refusal, ...]
    remedy: str = ""
    tried: tuple[Refusal, ...] = ()

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
        """Yield what comes of the pass that is named."""
        if self.remedy and not self.tried:
            yield f"`{self.remedy}` is named for it"
        for here, words in ((True, " cannot help"), (False, "")):
            tried = [(self.remedy, r) for r in self.tried if (r.where is not None) == here]
            reasons = [(group.refusals[0].reason, len(group.refusals)) for group in by_cause(tried)]
            said = [reason + (f" ({count} times)" if count > 1 else "") for reason, count in reasons]
            if said:
                yield f"`{self.remedy}`{words}: {'; '.join(said)}"


def cause(refusal: Refusal) -> tuple[str, str]:
    """Return a reason without names and numbers of its place, and the pass that is named in it."""
    stays = STAYS.fullmatch(refusal.reason)
    words, remedy = (refusal.reason, "") if stays is None else (f"stays: {stays['why']}", stays["remedy"] or "")
    return SHAPE.sub("(#)", NUMBER.sub("#", NAME.sub("%", words))), remedy


def by_cause(refusals: Sequence[Named]) -> list[Refused]:
    """Return the refusals of each cause together, in the order of their first.

    What a pass refused that is named for ops is told with these ops: at these, and of the whole model once.
    """
    groups: dict[tuple[str, tuple[str, str]], list[Refusal]] = {}
    for step, refusal in refusals:
        groups.setdefault((step, cause(refusal)), []).append(refusal)
    made = [Refused(step, tuple(found), remedy) for (step, (_, remedy)), found in groups.items()]
    told = set[int]()
    for k, group in enumerate(made):
        if group.remedy:
            places = {refusal.where.name for refusal in group.refusals if refusal.where}
            tried = [
                refusal
                for step, refusal in refusals
                if step == group.remedy
                and id(refusal) not in told
                and (refusal.where is None or refusal.where.name in places)
            ]
            told |= set(map(id, tried))
            made[k] = replace(group, tried=tuple(tried))
    left = [
        replace(group, refusals=tuple(refusal for refusal in group.refusals if id(refusal) not in told))
        for group in made
    ]
    return [group for group in left if group.refusals]


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

"""Write in Markdown what got better and what got worse between two forms of a model, for pull requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anesurgery.checking.comparison import Comparison
from anesurgery.placement.durations import change
from anesurgery.placement.inspection import SOFT, Inspection, OpRow
from anesurgery.show import summary
from anesurgery.show.summary import UNIT_WORDS

NAMED = 10
"""Ops that left the engine, of which each has a row; the rest are counted."""


@dataclass(frozen=True)
class Review:
    """A model before and after a change.

    Attributes:
        name: of the model, as the reader knows it.
        before: None where there was none.
        after: how it stands now.
        comparison: of the numbers of both, where they were compared.
        apart: why they could not be compared, in words; "" where they were, or nobody asked.
    """

    name: str
    before: Inspection | None
    after: Inspection
    comparison: Comparison | None = None
    apart: str = ""

    def worse(self, points: float = 0.1) -> list[str]:
        """What got worse, a sentence each.

        Args:
            points: of a share that may be lost, in percent.
        """
        if self.before is None:
            return []
        said = [f"{label} {old} -> {new}" for label, old, new in self._lost(points)]
        old_time, new_time = self.before.time, self.after.time
        if old_time is not None and new_time is not None and change(old_time, new_time).low > 1:
            said.append(change(old_time, new_time).verdict)
        if self.comparison is not None and not self.comparison.ok:
            said.append(f"the outputs differ: {self.comparison.verdict.splitlines()[0]}")
        return said + ([f"the outputs cannot be compared: {self.apart}"] if self.apart else [])

    def _lost(self, points: float) -> list[tuple[str, str, str]]:
        assert self.before is not None
        old, new = self.before.residency, self.after.residency
        share = summary.share_words
        return [
            (f"share of the {what} on the ANE", share(self.before, what), share(self.after, what))
            for what in old
            if 100 * (old[what] - new[what]) > points
        ]

    def left(self) -> list[OpRow]:
        """The ops that are not expected on the engine now, and were, or were not there."""
        old = {} if self.before is None else {row.name: row for row in summary.all_rows(self.before)}
        off = [row for row in summary.all_rows(self.after) if summary.needs_attention(row)]
        return [row for row in off if row.name not in old or not summary.needs_attention(old[row.name])]


def review_markdown(reviews: Sequence[Review], points: float = 0.1) -> str:
    """A heading, a table and the ops that left the engine, for each model."""
    return "\n".join(line for one in reviews for line in _model(one, points)) + "\n"


def _model(one: Review, points: float) -> list[str]:
    worse = one.worse(points)
    verdict = f"worse: {'; '.join(worse)}" if worse else "not worse" if one.before else "new"
    lines = [f"### {_cell(one.name)} on {_cell(str(one.after.target))}", "", f"**{_cell(verdict)}**", ""]
    return [*lines, *(_new(one) if one.before is None else _table(one.before, one)), "", *_left(one), ""]


def _table(before: Inspection, one: Review) -> list[str]:
    words = {True: "better", False: "**worse**", None: ""}
    rows = ["| | before | after | |", "|---|---|---|---|"]
    for c in summary.changes(before, one.after):
        rows.append(f"| {c.label} | {_cell(c.before)} | {_cell(c.after)} | {words[c.better]} |")
    if one.comparison is not None:
        met = "" if one.comparison.ok else "**worse**"
        rows.append(f"| numbers | | {_cell(one.comparison.verdict.splitlines()[0])} | {met} |")
    return rows


def _new(one: Review) -> list[str]:
    rows = ["| | |", "|---|---|"]
    return rows + [f"| {c.label} | {_cell(c.after)} |" for c in summary.changes(one.after, one.after)]


def _left(one: Review) -> list[str]:
    rows = one.left()
    if not rows or one.before is None:
        return []
    lines = ["| op that is not expected on the ANE now | type | where | why |", "|---|---|---|---|"]
    for row in rows[:NAMED]:
        uses = one.after.target.uses_ane
        said = (f.message for f in row.findings if f.kind not in SOFT)
        why = next(said, summary.without_rule(row, uses))
        lines.append(f"| `{_cell(row.name)}` | {row.op_type} | {UNIT_WORDS[row.preferred]} | {_cell(why)} |")
    return lines + ([f"\nand {len(rows) - NAMED} more"] if len(rows) > NAMED else [])


def _cell(text: str) -> str:
    """Text as one cell: names of ops and files are not ours, and may hold anything."""
    plain = " ".join(text.split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")

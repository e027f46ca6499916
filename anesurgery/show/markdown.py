"""Write in Markdown what got better or worse between two forms of a model, as a comment on a pull request.

`anesurgery review` prints the result of `review_markdown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anesurgery.checking.comparison import Comparison
from anesurgery.placement.durations import change
from anesurgery.placement.inspection import SOFT, Inspection, OpRow
from anesurgery.show import summary
from anesurgery.show.summary import UNIT_WORDS

NAMED = 10
"""The most ops that left the engine with a row each; the others are counted."""


@dataclass(frozen=True)
class Review:
    """A model before and after a change.

    Attributes:
        name: the model's name for the reader.
        before: the inspection before; None for a new model.
        after: the inspection after.
        comparison: the comparison of their numbers, if there was one.
        apart: why they could not be compared, in words; "" where they were, or need not be.
    """

    name: str
    before: Inspection | None
    after: Inspection
    comparison: Comparison | None = None
    apart: str = ""

    def worse(self, points: float = 0.1) -> list[str]:
        """Return a sentence for each thing that got worse.

        Args:
            points: percentage points of a share that may be lost.
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
            (f"share of the {what} on the Neural Engine", share(self.before, what), share(self.after, what))
            for what in old
            if 100 * (old[what] - new[what]) > points
        ]

    def left(self) -> list[OpRow]:
        """Return the ops that are not expected on the engine now, and were, or are new."""
        old = {} if self.before is None else {row.name: row for row in summary.all_rows(self.before)}
        off = [row for row in summary.all_rows(self.after) if summary.needs_attention(row)]
        return [row for row in off if row.name not in old or not summary.needs_attention(old[row.name])]


def review_markdown(reviews: Sequence[Review], points: float = 0.1) -> str:
    """Return a heading, a table and the ops that left the engine, for each model."""
    return "\n".join(line for one in reviews for line in _model_lines(one, points)) + "\n"


def _model_lines(one: Review, points: float) -> list[str]:
    worse = one.worse(points)
    verdict = f"worse: {'; '.join(worse)}" if worse else "not worse" if one.before else "new"
    lines = [f"### {_cell(one.name)} on {_cell(str(one.after.target))}", "", f"**{_cell(verdict)}**", ""]
    return [
        *lines,
        *(_first_table(one) if one.before is None else _before_and_after(one.before, one)),
        "",
        *_ops_that_left(one),
        "",
    ]


def _before_and_after(before: Inspection, one: Review) -> list[str]:
    words = {True: "better", False: "**worse**", None: ""}
    rows = ["| | before | after | |", "|---|---|---|---|"]
    for c in summary.changes(before, one.after):
        rows.append(f"| {c.label} | {_cell(c.before)} | {_cell(c.after)} | {words[c.better]} |")
    if one.comparison is not None:
        met = "" if one.comparison.ok else "**worse**"
        rows.append(f"| numbers | | {_cell(one.comparison.verdict.splitlines()[0])} | {met} |")
    return rows


def _first_table(one: Review) -> list[str]:
    rows = ["| | |", "|---|---|"]
    return rows + [f"| {c.label} | {_cell(c.after)} |" for c in summary.changes(one.after, one.after)]


def _ops_that_left(one: Review) -> list[str]:
    rows = one.left()
    if not rows or one.before is None:
        return []
    lines = ["| op that is not expected on the Neural Engine now | type | where | why |", "|---|---|---|---|"]
    for row in rows[:NAMED]:
        uses = one.after.target.uses_ane
        said = (f.message for f in row.findings if f.kind not in SOFT)
        why = next(said, summary.without_rule(row, uses))
        lines.append(f"| `{_cell(row.name)}` | {row.op_type} | {UNIT_WORDS[row.preferred]} | {_cell(why)} |")
    return lines + ([f"\nand {len(rows) - NAMED} more"] if len(rows) > NAMED else [])


def _cell(text: str) -> str:
    """Return text as one table cell; names of ops and files may hold anything."""
    plain = " ".join(text.split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")

"""Show a plan: what would be done, why, what it gains, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Group
from rich.table import Table

from anesurgery.placement.target import Target
from anesurgery.rewriting.edit_plan import Plan
from anesurgery.rewriting.refusals import refusal_lines
from anesurgery.show.console import plain, shows


def plan_headline(plan: Plan) -> str:
    """What the plan comes to, in a sentence."""
    where = f" on {Target.parse(plan.target).words}" if plan.target else ""
    if not plan.steps:
        return "; ".join(filter(None, [f"{plan.recipe}: nothing to do{where}", plan.wrong]))
    steps = f"{len(plan.steps)} step{'s' if len(plan.steps) != 1 else ''}"
    return "; ".join(filter(None, [f"{plan.recipe}: {steps}{where}", plan.gain, plan.wrong]))


@shows("Plan")
def plan_group(plan: Plan) -> Group:
    """A plan as a sentence, a table of its steps, and lines."""
    table = Table("step", "why", box=box.SIMPLE_HEAD)
    for one in plan.steps:
        table.add_row(plain(one.step), plain(one.why))
    noted = [plain(f"note: {words}", style="cyan") for words in (*plan.notes, *plan.warnings)]
    left = [plain(f"left out: {line}", style="dim") for line in refusal_lines(plan.left_out)]
    first = plain(plan_headline(plan), style="bold")
    return Group(first, *([table] if plan.steps else []), *map(plain, _time(plan)), *noted, *left)


def _time(plan: Plan) -> Iterator[str]:
    """The expected time before and after with its band, and the verdict."""
    if plan.steps and (time := plan.figures.get("time")):
        each = [f"{one['ms']:.3g} ms ({one['low']:.3g} to {one['high']:.3g})" for one in map(time.get, ENDS)]
        yield f"time {' -> '.join(each)}, {time['verdict']}"


ENDS = ("before", "after")

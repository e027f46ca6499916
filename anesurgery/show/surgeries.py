"""Show the result of a surgery or a comparison: reports for a terminal and a notebook, and plain data.

`@shows` registers a function that reports on results of the named class, in the named forms: by default in a
terminal, as text and in a notebook. `@draws` registers one that returns plain data.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from anesurgery.checking.comparison import Comparison
from anesurgery.checking.grades import summary
from anesurgery.checking.output_comparison import OutputComparison
from anesurgery.checking.ranges import Ranges
from anesurgery.display import counted, draws, written
from anesurgery.errors import Refusal
from anesurgery.mil import Array
from anesurgery.rewriting.refusals import by_cause, grouped_refusals, op_text
from anesurgery.rewriting.session import Change, counts
from anesurgery.rewriting.session import Report as PassReport
from anesurgery.show.console import WIDTH, plain, shows
from anesurgery.show.costs import STILL, Repair, first_clauses, on_a_screen
from anesurgery.show.headline import compared, headline
from anesurgery.show.report import Line, Report, Table, notes
from anesurgery.show.terminal import unit_bars
from anesurgery.surgery import Surgery

ROWS = 8
"""The most steps of which also those that changed nothing have a row."""


def site_summary(changes: Sequence[Change], *, details: bool = True) -> str:
    """Return what the checks of some edits show together; `details` adds what the grades rest on."""
    proofs = [c.proof for c in changes if c.proof is not None]
    unchecked = Counter(c.unchecked for c in changes if c.unchecked)
    if not proofs and not unchecked:
        return "not run"
    said = [summary(proofs, details=details)] if proofs else []
    said += [f"{n} not compared: {why}" for why, n in unchecked.items()]
    return ", ".join(said)


def edits_line(changes: Sequence[Change], *, details: bool = True) -> str:
    """Return "412 edits: 300 bit for bit, 80 proved, 12 checked on at least 4096 numbers each", ..."""
    proofs = [c.proof for c in changes if c.proof is not None]
    said = [summary(proofs, details=details)] if proofs else []
    if len(proofs) < len(changes):
        said.append(f"{len(changes) - len(proofs)} not compared")
    return f"{len(changes)} edit{'s' if len(changes) != 1 else ''}: {', '.join(said)}"


def _steps_table(surgery: Surgery, details: bool) -> Table:
    """Return a row for each step, and below it one for each of its own passes that changed something."""
    steps = {step.name: str(step) for step in surgery.steps}
    rows = []
    for name in _step_rows(surgery):
        changes = [change for change in surgery.changes if change.pass_name == name]
        checked = site_summary(changes, details=details) if changes else ""
        rows.append((steps.get(name, f"  {name}"), str(len(changes)), checked))
    return Table(("step", "edits", "how each edit was checked"), rows)


def _step_rows(surgery: Surgery) -> list[str]:
    """Return the steps that have a row, each followed by its own passes that changed something."""
    edits, idle = counts(surgery.changes), _idle_steps(surgery)
    rows = dict[str, None]()  # each name once
    for step in surgery.steps:
        if step.name not in idle:
            rows |= dict.fromkeys((step.name, *(part.name for part in step.parts() if part.name in edits)))
    return [*(rows | dict.fromkeys(edits))]


def _idle_steps(surgery: Surgery) -> list[str]:
    """Return the steps without a row, which details name: those of a long list that changed nothing."""
    if len(surgery.steps) <= ROWS:
        return []
    edits = counts(surgery.changes)
    return [s.name for s in surgery.steps if edits.keys().isdisjoint((s.name, *(p.name for p in s.parts())))]


def _ops_line(surgery: Surgery) -> str:
    kinds = sorted(set(surgery.before) | set(surgery.after))
    moved = [
        f"{kind} {surgery.before.get(kind, 0)} -> {surgery.after.get(kind, 0)}"
        for kind in kinds
        if surgery.before.get(kind, 0) != surgery.after.get(kind, 0)
    ]
    total = f"ops {sum(surgery.before.values())} -> {sum(surgery.after.values())}"
    return f"{total}: {', '.join(moved)}" if moved else f"{total}: unchanged"


def time_line(surgery: Surgery) -> str:
    """Return the time of the model in words.

    Returns:
        "time 3.1 ms -> 2.0 ms"; one time if nothing was changed; why no time is known, with the time after or
        the relative cost if there is one; "" without a target or scores, and if the model after is refused.
    """
    if surgery.time is not None:
        return str(surgery.time) if surgery.changes else f"time {surgery.time.after}"
    before, after = surgery.scores
    if surgery.target is None or before is None or after is None or after.refused:
        return ""
    words = [f"no time: {before.untimed or after.untimed or 'each function has its own'}"]
    if after.time is not None:
        words.append(f"now {after.time}")
    if surgery.changes and before.estimate:
        words.append(after.expected.relative(before.expected))
    return "; ".join(words)


@shows("Surgery", "details")
def surgery_details(surgery: Surgery) -> Report:
    """Report everything about a surgery."""
    return surgery_report(surgery, details=True)


@shows("Surgery", "html")
def surgery_report(surgery: Surgery, *, details: bool = False) -> Report:
    """Report a surgery as a sentence, a table and lines; `details` adds what grades rest on."""
    parts: list[Any] = [_steps_table(surgery, details)]
    if surgery.changes:
        parts.append(edits_line(surgery.changes, details=details))
    parts.append(_ops_line(surgery))
    if time := time_line(surgery):
        parts.append(time)
    if details and (idle := _idle_steps(surgery)):
        parts.append(Line(f"changed nothing: {', '.join(idle)}", "dim"))
    parts += _remarks(surgery)
    if surgery.proof is not None:
        parts += [f"whole model, {surgery.proof.precision} arithmetic", _comparison_table(surgery.proof)]
    return Report(headline(surgery), parts)


def _remarks(report: PassReport) -> list[Line]:
    """Return lines on what the caller must change or know, and what was refused, also of a `Surgery`."""
    lines = [Line(f"interface: {change.words}", "cyan") for change in report.contract]
    lines += notes(report.notes)
    for group in by_cause(report.refusals):
        lines.append(Line(f"skipped: {group.line}", "dim"))
        lines += [Line(f"  {group.op}", "dim")] if group.op else []
    return lines


@shows("Report")
def _edits_report(report: PassReport) -> Report:
    by_pass = counts(report.changes)
    edits = [f"{name}: {counted(n, 'edit')}" for name, n in by_pass.items()]
    done = f"{counted(len(report.changes), 'change')} by {counted(len(by_pass), 'pass')}"
    arrays = [Line(f"beside the package: {name}", "cyan") for name in report.artifacts]
    return Report(done if by_pass else "nothing was changed", [*edits, *_remarks(report), *arrays])


def _comparison_table(comparison: Comparison) -> Table:
    """Return a row for each output; with KL and top-k where outputs are logits."""
    has_logits = any(o.logits for o in comparison.outputs)
    rows = [
        (
            o.name,
            "x".join(map(str, o.shape)),
            "identical" if o.psnr == math.inf else f"{o.psnr:.1f}",
            f"{o.max_abs:.3g}",
            f"{o.max_rel:.2g}",
            *(_logit_columns(o) if has_logits else ()),
        )
        for o in comparison.outputs
    ]
    columns = ("output", "shape", "PSNR dB", "max abs", "max rel")
    return Table((*columns, *(("KL", "top-1 in top-5") if has_logits else ())), rows)


def _logit_columns(output: OutputComparison) -> tuple[str, str]:
    """Return the KL divergence and the top-k containment in words; "" for outputs that are not logits."""
    if not output.logits:
        return "", ""
    kl, contained = output.kl, output.top_k
    return "" if kl is None else f"{kl:.2g}", "" if contained is None else f"{contained:.1%}"


LEAST_REASON = 30
"""The fewest letters of a reason that say anything; a choice."""


@shows("Comparison")
def comparison_report(comparison: Comparison) -> Report:
    """Report a comparison as a sentence and a table."""
    proof = [] if comparison.proof is None else comparison.proof.lines
    return Report(compared(comparison), [_comparison_table(comparison), *proof])


@shows("Surgery", "rich", "text")
def short_surgery(surgery: Surgery, repair: Repair | None = None) -> Report:
    """Report a surgery on one screen: a sentence, both bars, the passes, and what still matters.

    Args:
        surgery: what is shown.
        repair: the command that applies a pass, by its name; a call in Python by default.
    """
    lines, after = list[Any](), None
    if surgery.placed is not None:
        before, after = surgery.placed
        lines.append(unit_bars(before, after) if surgery.changes else unit_bars(after))
    if edits := counts(surgery.changes):
        lines.append(f"Edits: {', '.join(f'{name} {n}' for name, n in edits.items())}")
    refused = dict[str, Refusal]()
    for name, refusal in surgery.refusals:
        refused.setdefault(name, refusal)
    if idle := {name: refusal for name, refusal in refused.items() if name not in edits}:
        lines.append(_left_out(idle))
    return on_a_screen(Report(headline(surgery), lines), after, repair, tried=refused, title=STILL)


def _left_out(refused: Mapping[str, Refusal]) -> Text:
    """Return a line with the passes that were left out, and the reason of the first."""
    first, *others = refused
    why = refused[first].reason.removeprefix("tried and ").removeprefix("undone: ")
    frame, names = f"Left out: {first} ()", "".join(f", {name}" for name in others)
    more = names if len(frame + why + names) <= WIDTH or len(others) < 2 else f", and {len(others)} more"
    room = max(WIDTH - len(frame + more), LEAST_REASON)
    reason = (len(why) > room and first_clauses(why, room)) or textwrap.shorten(why, room, placeholder=" …")
    return plain(f"{frame[:-1]}{reason}){more}", "dim")


def sampled_words(inputs: Mapping[str, Array], seed: int) -> str:
    """Return in words which inputs were sampled."""
    drawn = [
        f"{name} {'x'.join(map(str, row['shape'])) or 'scalar'} {row['dtype']}, {row['min']} to {row['max']}"
        for name, row in arrays_json({n: np.asarray(v) for n, v in inputs.items()}).items()
    ]
    return f"random inputs (seed {seed}; pass your own with --inputs): {'; '.join(drawn)}"


def arrays_report(arrays: Mapping[str, Array], source: str) -> Report | Table:
    """Report arrays by name: shape, dtype, range."""
    rows = [
        (name, "x".join(map(str, row["shape"])) or "scalar", *(row[k] for k in ("dtype", "min", "max", "mean")))
        for name, row in arrays_json(arrays).items()
    ]
    table = Table(("output", "shape", "dtype", "min", "max", "mean"), rows)
    return Report(source, [table], "") if source else table


def arrays_json(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return arrays by name as plain data: shape, dtype, and the range of numbers."""
    rows: dict[str, Any] = {}
    for name, array in arrays.items():
        numbers = array.dtype.kind in "fiub" and array.size
        row = {k: f"{getattr(array, k)():.6g}" if numbers else "" for k in ("min", "max", "mean")}
        if array.dtype.kind == "U" and array.size == 1:
            row["min"] = row["max"] = str(array.item())
        rows[name] = {"shape": list(array.shape), "dtype": str(array.dtype), **row}
    return rows


LARGEST = 10
"""Rows of the certificate that are shown though nothing is wrong with them."""


@shows("Ranges")
def ranges_report(ranges: Ranges) -> Report:
    """Report a range certificate: the ops with a hazard, and those with the largest numbers."""
    large = {id(row) for row in sorted(ranges.rows, key=lambda r: -r.largest)[:LARGEST]}
    rows = [
        (
            row.op_type,
            row.name,
            *(f"{end:.4g}" if row.reached else "" for end in (row.minimum, row.maximum)),
            "" if row.partial_sum is None else f"{row.partial_sum:.4g}",
            "; ".join(map(str, row.hazards)),
        )
        for row in sorted(ranges.rows, key=lambda row: not row.hazards)
        if row.hazards or id(row) in large
    ]
    overflows = [Line(f"first in {a}: {row.op_type} {row.name}", "red") for a, row in ranges.first.items()]
    run = f"{counted(len(ranges.rows), 'op')} on {counted(ranges.samples, 'sample')}"
    title = f"{ranges.verdict} ({run}; {ranges.arithmetic} is an estimate)"
    return Report(title, [Table(("op", "value", "min", "max", "partial sum", "hazard"), rows), *overflows])


@draws("Report", "json")
def report_json(report: PassReport) -> dict[str, Any]:
    """Return what passes did as plain data."""
    return {
        "target": report.target,
        "edits": counts(report.changes),
        "changes": [_change_json(c) for c in report.changes],
        "refusals": [
            {"step": name, "reason": reason, "count": len(found), "at": _places(found)}
            | {"first_at": next(iter(_places(found)), ""), "op": op_text(found[0].where)}
            for name, reason, found in grouped_refusals(report.refusals)
        ],
        "interface_changes": [change.words for change in report.contract],
        "artifacts": {name: list(array.shape) for name, array in report.artifacts.items()},
        "notes": report.notes,
        "seconds": {name: round(spent, 3) for name, spent in report.timings.items()},
    }


def _places(refusals: Sequence[Refusal]) -> list[str]:
    """Return the names of the ops or layers."""
    return [refusal.where.name for refusal in refusals if refusal.where]


@draws("Surgery", "json")
def surgery_json(surgery: Surgery) -> dict[str, Any]:
    """Return a surgery as plain data."""
    steps = [
        {"name": s.name, "options": {k: written(v) for k, v in s.options().items()}} for s in surgery.steps
    ]
    return (
        {"summary": headline(surgery)}
        | report_json(surgery)
        | {
            "steps": steps,
            "ops": {"before": surgery.before, "after": surgery.after},
            "time": None if surgery.time is None else surgery.time.to_json(),
            "relative_cost": _relative_cost(surgery),
            "proof": None if surgery.proof is None else surgery.proof.to_json(),
        }
    )


def _relative_cost(surgery: Surgery) -> float | None:
    """Return Core ML's own cost estimate after, divided by that before; None without an estimate."""
    before, after = surgery.scores
    return after.over(before).cost if before is not None and after is not None and before.estimate else None


def _change_json(change: Change) -> dict[str, Any]:
    return {
        "pass": change.pass_name,
        "at": change.where,
        "before": list(change.before),
        "after": list(change.after),
        "proof": None if change.proof is None else change.proof.to_json(),
        "unchecked": change.unchecked,
        "needs": None if change.needs is None else vars(change.needs),
    }

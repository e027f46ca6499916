"""Terminal reports for several results: a function for each.

Plans, builds, folders, comparisons with PyTorch, single ops, and the sensitivity of weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.text import Text

from anesurgery.byte_counts import byte_words
from anesurgery.checking.against_torch import AgainstTorch, ModuleRow
from anesurgery.checking.ranges import Ranges
from anesurgery.compressing.assignment import Proposal, Row
from anesurgery.compressing.sensitivity import Sensitivity
from anesurgery.display import counted, short_name
from anesurgery.placement.certifying import GATE
from anesurgery.placement.folders import Folder
from anesurgery.placement.inspection import Estimate, Inspection
from anesurgery.placement.inspector import Consulted, Why
from anesurgery.placement.target import Target
from anesurgery.rewriting.edit_plan import Plan
from anesurgery.rewriting.refusals import refusal_lines
from anesurgery.semantics.reading import in_decibels
from anesurgery.show.certificates import decibels
from anesurgery.show.console import plain, shows
from anesurgery.show.report import Line, Report, Table, first_rows, notes
from anesurgery.show.summary import LEGAL_WORDS, UNIT_WORDS

WEIGHTS, MODULES = 40, 60
"""The most rows of a table; JSON has all."""


@shows("Plan")
def plan_report(plan: Plan) -> Report:
    """Report what would be done, why, the gain, and what was left out."""
    steps = Table(("step", "why"), [(one.step, one.why) for one in plan.steps])
    left = [Line(f"left out: {line}", "dim") for line in refusal_lines(plan.left_out)]
    said = [words for words in plan.notes if not words.startswith("kept ")]  # the table gives these reasons
    return Report(_plan_sentence(plan), [steps, *_time_line(plan), *notes((*said, *plan.warnings)), *left])


def _plan_sentence(plan: Plan) -> str:
    """Return what the plan comes to, in a sentence."""
    where = f" on {Target.parse(plan.target).words}" if plan.target else ""
    steps = counted(len(plan.steps), "step") if plan.steps else "nothing to do"
    return "; ".join(filter(None, [f"{plan.recipe}: {steps}{where}", plan.gain * bool(plan.steps), plan.wrong]))


def _time_line(plan: Plan) -> Iterator[str]:
    """Yield the expected time before and after with its range, and the verdict."""
    if plan.steps and (time := plan.figures.get("time")):
        ends = (time[end] for end in ("before", "after"))
        each = [f"{one['ms']:.3g} ms (likely {one['low']:.3g} to {one['high']:.3g})" for one in ends]
        yield f"time {' -> '.join(each)}, {time['verdict']}"


@shows("Build")
def build_report(build: Any) -> Report:
    """Report a build: its size, where its functions run, and how near it is to the checkpoint."""
    parts = f" in {build.chunks} chunks" if build.chunks > 1 else ""
    context = " or ".join(map(str, (build.options.context, *build.options.contexts)))
    lines = [
        *(f"{name}: {words}" for name, words in build.placed.items()),
        f"Against the checkpoint: the logits agree to {in_decibels(build.psnr)}, and the likeliest token is "
        f"the same for {build.top:.1%} of the sampled tokens (fp16 arithmetic).",
        f"No logit differs by more than {build.off:.2g} times the range of the logits. If two tokens are "
        "closer than twice that, the model may choose the other one.",
        *(f"note: {words}" for words in build.notes),
    ]
    return Report(f"{build.folder}: {byte_words(build.bytes)}{parts}, a context of {context} tokens", lines)


@shows("Folder")
def folder_report(folder: Folder) -> Report:
    """Report a row for each model in a folder."""
    rows = [(short_name(name), _sentence(one)) for name, one in folder.models.items()]
    more = f", {len(folder.refused)} refused" if folder.refused else ""
    return Report(
        f"{folder.path}: {counted(len(rows), 'model')}{more}", [Table(("model", "in a sentence"), rows)]
    )


def _sentence(one: Inspection | Ranges | str) -> str:
    if isinstance(one, str):
        return f"refused: {one}"
    if isinstance(one, Inspection):
        return one.summary
    overflows = ", ".join(f"{row.name} in {arithmetic}" for arithmetic, row in one.first.items())
    return one.verdict + (f": first {overflows}" if overflows else "")


LOOKS = {"parts": "bold red", "carries": "yellow", "rounds": "yellow", "not kept": "dim", "agrees": ""}
"""State of a module -> the look of its row."""


@shows("AgainstTorch")
def modules_report(comparison: AgainstTorch) -> Report:
    """Report a package beside its PyTorch module: a row for each call of a submodule."""
    arithmetics = list(comparison.rows[0].psnr) if comparison.rows else []
    shown, more = first_rows(comparison.rows, MODULES, "and {} more rows in `rows`")
    rows = [
        (
            row.name or "(whole)",
            row.kind,
            row.state,
            *(f"{row.psnr[a]:.0f}" for a in arithmetics),
            row.value or "",
        )
        for row in shown
    ]
    head = ("module", "class", "", *(f"{name} dB" for name in arithmetics), "value")
    return Report(
        _first_difference(comparison), [Table(head, rows, styles=[LOOKS[row.state] for row in shown]), *more]
    )


def _first_difference(comparison: AgainstTorch) -> str:
    """Return where package and module part, in a sentence."""
    if (parts := comparison.first) is None:
        kept = sum(row.state == "agrees" for row in comparison.rows)
        every = counted(len(comparison.rows), "call")
        rest = ", the rest as far as rounding shows" if kept < len(comparison.rows) else ""
        agree = f"package and PyTorch agree: {kept} of {every} to {comparison.gate:g} dB in fp32{rest}"
        return "; ".join([agree, *_narrow_failures(comparison.rows)])
    name = parts.name or "the whole module"
    near = f"{parts.psnr['fp32']:.1f} dB in fp32, at {parts.value}" if parts.value else "no value is like it"
    return f"package and PyTorch part in {name} ({parts.kind}): {near}"


def _narrow_failures(rows: Sequence[ModuleRow]) -> Iterator[str]:
    """Yield the first module that is right in fp32 and wrong in another arithmetic, for each of these."""
    for arithmetic in rows[0].psnr if rows else ():
        wrong = next((row for row in rows if row.psnr[arithmetic] < GATE <= row.psnr["fp32"]), None)
        if wrong is not None:
            name = wrong.name or "the whole module"
            near = decibels(wrong.psnr[arithmetic]) + " dB" * math.isfinite(wrong.psnr[arithmetic])
            yield f"in {arithmetic} {name} ({wrong.kind}) is the first below {GATE:g} dB: {near}"


@shows("Why")
def why_report(reasons: Why) -> Report:
    """Report one op: the rules that found something in full, and a line for each other rule."""
    row = reasons.row
    verdict = f"the ANE can run it: {LEGAL_WORDS[row.legal]}; expected on: {UNIT_WORDS[row.preferred]}"
    found = [line for asked in reasons.rules if asked.found for line in _rule_lines(asked)]
    silent = [asked for asked in reasons.rules if not asked.found]
    others = [Line(f"{asked.rule.id}: {asked.said}", indent=2) for asked in silent if asked.said != "no"]
    idle = ", ".join(asked.rule.id for asked in silent if asked.said == "no")
    title = plain(row.name, "bold").append_text(
        plain(f"  {row.op_type} {row.shape} {row.dtype}; {verdict}", "not bold")
    )
    return Report(
        title, [*found, _estimate_words(row.estimate), *others, Line(f"rules that do not apply: {idle}", "dim")]
    )


def _rule_lines(asked: Consulted) -> Iterator[Any]:
    rule = asked.rule
    yield Text.assemble(plain(f"{rule.kind} ", "bold"), plain(f"{rule.id}: {asked.said}"))
    helps = f"pass {rule.remedy}" if rule.remedy else rule.advice
    said = [rule.because, f"{rule.grade.value}; {rule.scope}; {rule.source}"]
    yield from (Line(words, indent=2) for words in (*said, *([f"what helps: {helps}"] if helps else [])))


def _estimate_words(estimate: Estimate | None) -> str:
    if estimate is None:
        return "estimates: none is known"
    times = " and ".join(f"{factor:.3g}" for factor in estimate.off)
    units = (("ANE", estimate.ane), ("CPU", estimate.cpu))
    words = ", ".join(f"{unit} {value:.3g} us" for unit, value in units if value is not None)
    return f"estimates: {words}; they may be off by a factor of {times}"


@shows("Sensitivity")
def sensitivity_report(costs: Sensitivity) -> Report:
    """Report a row for each weight: the KL divergence of each mode in nats, or else the PSNR in dB."""
    by_kl = any(o.kl for row in costs.rows for o in row.options.values())
    shown, more = first_rows(costs.rows, WEIGHTS)
    rows = [
        (short_name(row.weight), ", ".join(row.readers), byte_words(row.bytes), *_losses(costs, row, by_kl))
        for row in shown
    ]
    what = "KL divergence in nats" if by_kl else "PSNR in dB"
    share = "" if costs.complete else f", {len(costs.rows)} of {costs.total} weights"
    title = (
        f"loss of the outputs if one weight is compressed: {what}; {counted(costs.samples, 'sample')}{share}"
    )
    return Report(title, [Table(("weight", "read by", "size", *costs.modes), rows), *more])


def _losses(costs: Sensitivity, row: Row, by_kl: bool) -> Iterator[str]:
    for option in map(row.options.get, costs.modes):
        yield "-" if option is None else f"{option.kl:.2g}" if by_kl else f"{option.psnr:.1f}"


@shows("Proposal")
def proposal_report(proposal: Proposal) -> Report:
    """Report how many weights get which mode, and the estimated loss."""
    counts = sorted(Counter(proposal.modes.values()).items())
    share = f"{byte_words(proposal.bytes)} of {byte_words(proposal.plain_bytes)}"
    cost = f"KL {proposal.kl:.3g} nats, {in_decibels(proposal.psnr, 'PSNR ')}"
    return Report(
        f"weights take {share}, {proposal.bits:.2f} bits a number",
        [
            f"estimated from each weight alone: {cost}",
            Table(("mode", "weights"), [(mode, str(count)) for mode, count in counts]),
        ],
    )

"""Terminal reports for several results, a function for each, and the page of a certificate.

Plans, builds, folders, comparisons with PyTorch, single ops, and the sensitivity of weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from anesurgery.checking.against_torch import AgainstTorch, ModuleRow
from anesurgery.checking.output_comparison import OutputComparison
from anesurgery.checking.ranges import Ranges
from anesurgery.compressing.assignment import Proposal, Row
from anesurgery.compressing.sensitivity import Sensitivity
from anesurgery.display import byte_words, counted, draws
from anesurgery.placement.certifying import GATE, Certificate
from anesurgery.placement.choices import Choice
from anesurgery.placement.folders import Folder
from anesurgery.placement.inspection import Estimate, Inspection
from anesurgery.placement.inspector import Consulted, Why
from anesurgery.placement.op_errors import BINS, Histogram, OpError
from anesurgery.placement.target import Target
from anesurgery.rewriting.edit_plan import Plan
from anesurgery.rewriting.refusals import refusal_lines
from anesurgery.semantics.reading import in_decibels
from anesurgery.show.console import plain, shows
from anesurgery.show.page import render
from anesurgery.show.report import Line, Report, Table, first_rows, notes
from anesurgery.show.summary import LEGAL_WORDS, UNIT_WORDS

STYLES = {"holds": "bold green", "at risk": "bold yellow", "fails": "bold red"}
ROWS = 12
"""The most ops that are shown, about a screen; `rows` and `to_json` have them all."""


@shows("Certificate")
def certificate_report(certificate: Certificate) -> Report:
    """Report a certificate as a sentence and two tables."""
    arithmetics = list(certificate.outputs)
    every = zip(*certificate.outputs.values(), strict=True)
    outputs = [(several[0].name, *map(_output_words, several)) for several in every]
    both = f"dB ({', '.join(arithmetics)})"
    ops = [
        (
            row.name,
            row.op_type,
            *(", ".join(decibels(side.get(a, math.nan)) for a in arithmetics) for side in (row.own, row.grown)),
            ", ".join(row.repairs),
        )
        for row in certificate.enters[:ROWS]
    ]
    return Report(
        f"{certificate.verdict}: {certificate.why} ({tried_words(certificate)})",
        [
            *(line for choice in certificate.choices[:ROWS] for line in (choice.words, *_kept_by(choice))),
            Table(("output", *(f"{a} dB" for a in arithmetics)), outputs),
            Table(("where errors enter", "op type", f"alone {both}", f"carried {both}", "repair"), ops),
            *notes(certificate.notes),
        ],
        STYLES[certificate.verdict],
    )


def _output_words(output: OutputComparison) -> str:
    """Return how near an output is, or which share of it is not finite."""
    count = output.bad + output.undefined
    where = " in fp32" if output.only_reference == count else ""
    return f"{count / (output.compared + count):.0%} not finite{where}" if count else decibels(output.psnr)


def _kept_by(choice: Choice) -> list[str]:
    """Return which ops keep a choice, and what that costs."""
    if not (ops := choice.exact_ops):
        return []
    return [f"  kept by {counted(len(ops), 'op')} in fp32 ({choice.cost}): widen_to_fp32 ops={','.join(ops)}"]


def tried_words(certificate: Certificate) -> str:
    """Return how many sets of inputs were tried, in words."""
    sets = f"{certificate.samples} set{'s' if certificate.samples > 1 else ''} of inputs"
    return f"{sets}, {certificate.searched} more searched" if certificate.searched else sets


def decibels(value: float) -> str:
    """Return a PSNR in words; "" where there is none."""
    if math.isnan(value):
        return ""
    if math.isinf(value):
        return "identical" if value > 0 else "not finite"
    return f"{value:.0f}"


BANDS = (
    ("80 dB and more", 80.0),
    ("60 to 80", 60.0),
    ("40 to 60", 40.0),
    ("20 to 40", 20.0),
    ("less", -math.inf),
)
"""Bands of errors: (words, the least PSNR in dB)."""
WIDTH, HEIGHT = 240, 72
"""The size of a histogram in pixels."""
LANES = 8
"""The most rails side by side; further ones share the last, so that names have room on a narrow page."""


@dataclass(frozen=True)
class Rail:
    """The lines of data flow beside an op."""

    lane: int
    """The lane of the op itself."""
    passing: tuple[int, ...]
    """Lanes of values from above that are read below."""
    incoming: tuple[int, ...]
    """Lanes of the values that it reads."""
    after: tuple[int, ...]
    """Lanes that continue below it."""


@dataclass(frozen=True)
class Bars:
    """A histogram of one arithmetic over that of exact numbers."""

    arithmetic: str
    """The other arithmetic."""
    exact: str
    """SVG path of the area, in exact arithmetic."""
    other: str
    """SVG path of the line, in the other arithmetic."""
    outside: int
    """Elements in the other arithmetic that no bin holds."""


@dataclass(frozen=True)
class OpLine:
    """An op as the template needs it."""

    row: OpError
    """Its errors."""
    rail: Rail
    """The data flow beside it."""
    own: int
    """Band of the error that it adds."""
    grown: int
    """Band of the error that it ends with."""
    bars: list[Bars]
    """A histogram for each arithmetic but the exact one."""


@draws("Certificate", "page")
def certificate_page(certificate: Certificate) -> str:
    """Return a certificate as an HTML document."""
    at = {row.name: k for k, row in enumerate(certificate.rows)}
    return render(
        "certificate.html",
        found=certificate,
        lines=[op_line(row, rail) for row, rail in zip(certificate.rows, rails(certificate.rows), strict=True)],
        outputs=list(zip(*certificate.outputs.values(), strict=True)),
        worst=[(at[row.name], row) for row in certificate.enters[:ROWS] if row.worst < BANDS[0][1]],
        bands=[words for words, _ in BANDS],
        tried=tried_words(certificate),
        decibels=decibels,
        status={"holds": 0, "at risk": 1, "fails": 2}[certificate.verdict],
        width=WIDTH,
        height=HEIGHT,
    )


def op_line(row: OpError, rail: Rail) -> OpLine:
    """Return an op as the template needs it."""
    drawn = row.histogram
    others = [] if drawn is None else [bars(drawn, a) for a in drawn.counts if a != "fp32"]
    return OpLine(row, rail, band(row.worst), band(min(row.grown.values(), default=math.inf)), others)


def band(psnr: float) -> int:
    """Return the number of the band of an error; 0 is the best."""
    return next(k for k, (_, least) in enumerate(BANDS) if psnr >= least)


def bars(drawn: Histogram, arithmetic: str) -> Bars:
    """Return two histograms on one scale."""
    most = max(*drawn.counts["fp32"], *drawn.counts[arithmetic], 1)
    exact, other = (_steps(drawn.counts[a], most) for a in ("fp32", arithmetic))
    return Bars(
        arithmetic, f"M0 {HEIGHT}{exact}V{HEIGHT}z", f"M0 {HEIGHT}{other}V{HEIGHT}", drawn.outside[arithmetic]
    )


def _steps(counts: tuple[int, ...], most: int) -> str:
    wide = WIDTH // BINS
    return "".join(f"V{HEIGHT - n / most * (HEIGHT - 4):.1f}H{(k + 1) * wide}" for k, n in enumerate(counts))


def rails(rows: Sequence[OpError]) -> list[Rail]:
    """Return a rail for each row, in file order."""
    at = {row.name: k for k, row in enumerate(rows)}
    reads = [[at[name] for name in row.reads if name in at and at[name] < k] for k, row in enumerate(rows)]
    last = {source: k for k, sources in enumerate(reads) for source in sources}
    lanes: dict[int, int] = {}
    drawn = []
    for k, sources in enumerate(reads):
        incoming = _drawn(lanes[s] for s in sources)
        before = {s: lane for s, lane in lanes.items() if last[s] > k}
        lane = next(n for n in range(len(before) + 1) if n not in before.values())
        lanes = before | ({k: lane} if k in last else {})
        drawn.append(Rail(_drawn([lane])[0], _drawn(before.values()), incoming, _drawn(lanes.values())))
    return drawn


def _drawn(lanes: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({min(lane, LANES - 1) for lane in lanes}))


WEIGHTS, MODULES = 40, 60
"""The most rows of a table; JSON has all."""


@shows("Plan")
def plan_report(plan: Plan) -> Report:
    """Report what would be done, why, the gain, and what was left out."""
    steps = Table(("step", "why"), [(one.step, one.why) for one in plan.steps])
    left = [Line(f"left out: {line}", "dim") for line in refusal_lines(plan.left_out)]
    said = [words for words in plan.notes if not words.startswith("kept ")]  # the table gives these reasons
    where = f" on {Target.parse(plan.target).words}" if plan.target else ""
    count = counted(len(plan.steps), "step") if plan.steps else "nothing to do"
    words = [f"{plan.recipe}: {count}{where}", plan.gain if plan.steps else "", plan.wrong]
    lines = [steps, *_time_line(plan), *notes((*said, *plan.warnings)), *left]
    return Report("; ".join(filter(None, words)), lines)


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
    rows = [(name, _sentence(one)) for name, one in folder.models.items()]
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
        return "; ".join([agree, *_lost_by_rounding(comparison.rows), *_narrow_failures(comparison.rows)])
    name = parts.name or "the whole module"
    near = f"{parts.psnr['fp32']:.1f} dB in fp32, at {parts.value}" if parts.value else "no value is like it"
    return f"package and PyTorch part in {name} ({parts.kind}): {near}"


def _lost_by_rounding(rows: Sequence[ModuleRow]) -> Iterator[str]:
    """Yield the first module that fp16 weights make wrong in PyTorch too, if they make the result wrong."""
    if rows and rows[-1].rounding < GATE:
        wrong = next(row for row in rows if row.rounding < GATE)
        yield (
            f"but with weights in fp16 PyTorch itself is off from {wrong.name or 'the whole module'} on "
            f"({decibels(wrong.rounding)} dB): convert again with compute_precision=ct.precision.FLOAT32"
        )


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
    verdict = (
        f"the Neural Engine can run it: {LEGAL_WORDS[row.legal]}; expected on: {UNIT_WORDS[row.preferred]}"
    )
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
    helps = f"pass {asked.remedy}" if asked.remedy else rule.advice
    said = [rule.because, f"{rule.grade.value}; {rule.scope}; {rule.source}"]
    yield from (Line(words, indent=2) for words in (*said, *([f"what helps: {helps}"] if helps else [])))


def _estimate_words(estimate: Estimate | None) -> str:
    if estimate is None:
        return "estimates: none is known"
    times = " and ".join(f"{factor:.3g}" for factor in estimate.off)
    units = (("Neural Engine", estimate.ane), ("CPU", estimate.cpu))
    words = ", ".join(f"{unit} {value:.3g} us" for unit, value in units if value is not None)
    return f"estimates: {words}; they may be off by a factor of {times}"


@shows("Sensitivity")
def sensitivity_report(costs: Sensitivity) -> Report:
    """Report a row for each weight: the KL divergence of each mode in nats, or else the PSNR in dB."""
    by_kl = any(o.kl for row in costs.rows for o in row.options.values())
    shown, more = first_rows(costs.rows, WEIGHTS)
    rows = [
        (row.weight, ", ".join(row.readers), byte_words(row.bytes), *_losses(costs, row, by_kl))
        for row in shown
    ]
    what = "KL divergence in nats" if by_kl else "PSNR in dB"
    share = "" if costs.complete else f", {len(costs.rows)} of {costs.total} weights"
    title = (
        f"loss of the outputs if one weight is compressed: {what}; {counted(costs.samples, 'sample')}{share}"
    )
    unmeasured = Counter(why for row in costs.rows for why in dict.fromkeys(row.skipped.values()))
    if not costs.total:
        title = f"no weight to measure: compressed ones, and those of up to {costs.smallest} elements, stay"
    skipped = [f"not measured, {counted(count, 'weight')}: {why}" for why, count in unmeasured.items()]
    return Report(title, [Table(("weight", "read by", "size", *costs.modes), rows), *more, *skipped])


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

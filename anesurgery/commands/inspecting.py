"""The command `inspect`: where each op of a model runs, why, and which pass repairs it.

Exit codes: 0 the report was made; with --status the status of the model instead: 0 every op prefers the ANE, 1
some do, 2 none does; with --fix 1 where outputs on --inputs are below --gate in the end. Bad usage or bad input
is 64, with a line on stderr that begins with "anesurgery:".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anesurgery.commands.next_steps import WHY, command, first_of, to_certify
from anesurgery.commands.options import Full, Gate, Html, Model, check_pages, is_folder, refuse_for_folders
from anesurgery.commands.subcommand import Call, Outcome, subcommand
from anesurgery.commands.waiting import waiting
from anesurgery.display import printable
from anesurgery.errors import SurgeryError

if TYPE_CHECKING:
    from anesurgery.placement.inspection import Inspection
    from anesurgery.placement.target import Target

WORDS = ("fully on the ANE", "partly on the ANE", "not on the ANE")
"""ANECompat's three answers."""
GATE = 40.0
"""The default of --gate, in dB."""

After = Annotated[str | None, typer.Argument(help="A second model, to compare with.")]
Units = Annotated[str | None, typer.Option(help="CPU_AND_NE (the default), ALL, CPU_AND_GPU or CPU_ONLY.")]
Samples = Annotated[
    list[Path] | None,
    typer.Option(
        help="An .npz file of arrays, or a folder of them. Find overflows in a run on them, and let --fix "
        "repair these. Repeat for more."
    ),
]
Segments = Annotated[
    bool,
    typer.Option("--segments", help="Print the segments on the Neural Engine as JSON lines, like ANECompat."),
]
Status = Annotated[
    bool,
    typer.Option(
        "--status", help="Print one line. Exit code 0: all ops on the Neural Engine, 1: some, 2: none."
    ),
]
Fix = Annotated[Path | None, typer.Option(help="Repair the model, and write it here (.mlpackage or .mlmodel).")]
Op = Annotated[
    str | None, typer.Option("--why", metavar="OP", help="Name of an op: print every rule about it.")
]
Rates = Annotated[Path | None, typer.Option(help="A table of rates that `learn` wrote.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Let --fix and --html replace files.")]


@subcommand("placement.inspector:inspect", "placement.folders:inspect_folder", waits="inspecting")
def inspect(
    call: Call,
    model: Model,
    after: After = None,
    inputs: Samples = None,
    segments: Segments = False,
    status: Status = False,
    html: Html = None,
    fix: Fix = None,
    why: Op = None,
    rates: Rates = None,
    gate: Gate = GATE,
    overwrite: Overwrite = False,
    full: Full = False,
) -> Outcome:
    """Say where each op of a model runs, why, and which pass repairs it. A folder works too."""
    _check_used("--gate", gate != GATE, {"--fix": fix})
    _check_used("--overwrite", overwrite, {"--fix": fix, "--html": html})
    one_of = {"AFTER": after, "--fix": fix, "--segments": segments, "--status": status, "--why": why}
    if is_folder(model):
        asked = {**one_of, "--function": call["function"], "--inputs": inputs, "--measured": call["measured"]}
        return _inspect_folder(call, model, {**asked, "--html": html, "--rates": rates})
    if call["jobs"] > 1 or call["scheduler"] is not None:
        raise SurgeryError("--jobs and --scheduler share out the models of a folder; name a folder")
    _check_one(one_of)
    target = _target(call, rates)
    if why is not None:
        _check_one({"--why": why, "--html": html, "--measured": call["measured"]})
        return _why(call, model, why, target, inputs)
    _check_files(model, html, fix, overwrite)
    look = partial(call, target=target, compute_units=None, inputs=inputs)  # the target holds the units
    first = look(model)
    second = look(after) if after is not None else None
    repair = _Repair()
    if fix is not None:
        repair = _repair(call, model, fix, {"inputs": inputs, "gate": gate}, overwrite)
        second = look(fix)
    if html is not None:
        first.save_html(html.expanduser(), second)
    if segments or status:
        return _segments(first) if segments else _status(first)
    outcomes = _Outcomes(
        model, after=str(fix or after or ""), target=call["target"], wrote=(fix, html), fixed=repair
    )
    return outcomes.compared(first, second, full) if second is not None else outcomes.report(first, full)


def _inspect_folder(call: Call, folder: str, asked: dict[str, Any]) -> Outcome:
    """Inspect the models of a folder; refuse the options in `asked`, which are for one model."""
    refuse_for_folders(asked)
    inspected = call.of("placement.folders:inspect_folder", waits="models")(folder)
    then = first_of(inspected, "see", folder, lambda one: getattr(one, "status", 1) != 0, call["target"])
    return Outcome(inspected, then=then)


def _check_one(asked: Mapping[str, Any]) -> None:
    """Refuse several options of which only one can be asked for."""
    named = [name for name, value in asked.items() if value]
    if len(named) > 1:
        raise SurgeryError(f"{' and '.join(named)} cannot be asked for at once; choose one")


def _check_used(name: str, is_given: bool, needed: Mapping[str, Any]) -> None:
    """Refuse an option that has no effect without one of those in `needed`."""
    if is_given and not any(needed.values()):
        raise SurgeryError(f"{name} has no effect without {' or '.join(needed)}; leave it out")


def _check_files(model: str, html: Path | None, fix: Path | None, overwrite: bool) -> None:
    """Refuse places that cannot be written to, before any work is done."""
    from anesurgery.files.writing import check_target
    from anesurgery.placement.models import is_layered

    if fix is not None:
        suffix = ".mlmodel" if is_layered(model) else ".mlpackage"
        check_target(Path(model).expanduser(), fix.expanduser(), overwrite, suffix)
    check_pages(overwrite, html)


def _target(call: Call, rates: Path | None) -> Target:
    from anesurgery.placement.corrections import read_corrections
    from anesurgery.placement.target import Target

    device = Target.parse(call["target"], call["compute_units"])
    return device if rates is None else replace(device, rates=read_corrections(rates))


@dataclass(frozen=True)
class _Repair:
    """What --fix did."""

    passes: Sequence[str] = ()
    """The passes that changed the model."""
    wrong: str = ""
    """How wrong its outputs are, in words; "" if they reach the gate."""


def _repair(call: Call, model: str, package: Path, options: dict[str, Any], overwrite: bool) -> _Repair:
    """Repair a model with `auto` (or `neuralnetwork_ane`) and the options of `apply`, and write it."""
    from anesurgery.placement.models import is_layered
    from anesurgery.surgery import apply, find_recipe

    auto = find_recipe("auto").with_options(compute_units=call["compute_units"])
    chosen = find_recipe("neuralnetwork_ane") if is_layered(model) else auto
    surgery = apply(model, chosen, target=call["target"], **options, quiet=call.silent)
    with waiting("saving", call.silent):
        surgery.save(package, overwrite=overwrite)
    for change in () if call.silent else surgery.contract:
        print(printable(f"interface: {change.words}"), file=sys.stderr)
    passes = list(dict.fromkeys(change.pass_name for change in surgery.changes))
    return _Repair(passes, surgery.wrong if surgery.below(options["gate"]) else "")


def _why(call: Call, model: str, op: str, target: Target, inputs: Any) -> Outcome:
    from anesurgery.loading import load
    from anesurgery.placement.inspector import why
    from anesurgery.placement.models import is_layered

    if is_layered(model):
        raise SurgeryError("--why reads ML Programs; layers of a neural network show their rules in the report")
    with waiting("inspecting", call.silent):
        reasons = why(load(model), op, target, call["function"], inputs)
    return Outcome(reasons, then=command("see", model, target=call["target"]))


def _segments(inspection: Any) -> Outcome:
    keys = model_keys(inspection)
    return Outcome(keys, shown=tuple(json.dumps(key, separators=(",", ":")) for key in keys), then="")


def _status(inspection: Any) -> Outcome:
    words = inspection.refused or WORDS[inspection.status]
    line = {"status": inspection.status, "words": words, "counts": inspection.counts}
    counts = ", ".join(f"{n} {unit}" for unit, n in inspection.counts.items()) or "no ops"
    shown = f"{inspection.status}: {words} ({counts}; {inspection.target})"
    return Outcome(line, shown=shown, then="", code=inspection.status)


@dataclass(frozen=True)
class _Outcomes:
    """The outcome of `inspect` for one model or two, with the next command."""

    model: str
    """The model."""
    after: str
    """The second or repaired model; "" without one."""
    target: str | None
    """Chip and OS, as the user wrote them."""
    wrote: tuple[Path | None, ...]
    """The files that were written."""
    fixed: _Repair
    """What --fix did."""

    def repair_command(self, name: str) -> str:
        """Return the command that applies a pass."""
        return command("fix", self.after or self.model, name, target=self.target)

    def check_command(self, first: Any) -> str:
        """Return the command that checks numbers: of the model, or of one of its parts if others have no ops.

        "" for a model with a custom layer, whose code is not in the file, and where no part has ops of its own.
        """
        parts = first.parts
        if any(row.op_type == "custom" for part in (first, *parts.values()) for row in part.ops):
            return ""
        if all(part.ops or part.parts for part in parts.values()):
            return to_certify(self.model, self.target)
        member = next((name for name, part in parts.items() if part.ops), None)
        return "" if member is None else command("ranges", self.model, "--member", member)

    def report(self, first: Any, full: bool) -> Outcome:
        """Return the outcome for one model."""
        from anesurgery.show import terminal
        from anesurgery.show.costs import costs

        shown = terminal.inspection_report(first) if full else terminal.short_report(first, self.repair_command)
        then = first.fixing
        if not then and any(problem.remedies for problem in costs(first)):
            then = command("fix", self.model, target=self.target)
        then = (then or self.check_command(first)) if first.counts else ""
        more = WHY if first.counts and not full else ""
        return Outcome(first, shown=shown, wrote=self.wrote, then=then, more=more)

    def compared(self, first: Any, second: Any, full: bool) -> Outcome:
        """Return the outcome for two models, or for one before and after a repair."""
        from anesurgery.show import terminal
        from anesurgery.show.report import Report

        plain = {"before": first.to_json(), "after": second.to_json()}
        wrong, repaired_by = self.fixed.wrong, list(self.fixed.passes)
        plain |= {"wrong": wrong} if wrong else {}
        plain |= {"passes": repaired_by} if repaired_by else {}
        passes = [f"Repaired by {', '.join(repaired_by)}"] if repaired_by else []
        if full:
            report = terminal.difference_report(first, second)
            report = replace(report, parts=[*report.parts, *passes])
        else:
            report = terminal.short_difference(first, second, self.repair_command, *passes)
        return Outcome(
            plain,
            shown=Report(wrong, [report]) if wrong else report,
            wrote=self.wrote,
            then=to_certify(self.after, target=self.target),
            more="" if full else WHY,
            code=int(bool(wrong)),
        )


def model_keys(inspection: Inspection) -> list[dict[str, Any]]:
    """Return the ANE segments of a model as ANECompat prints them, for a pipeline part by part, counted from 0.

    ANECompat (fredyshox/ANECompat, MIT) prints for each segment that the engine evaluates:
    `{"isegment": 0, "inputs": {"image": {"shape": [416, 416, 1, 3, 1]}}, "outputs": {...}}`. A shape is five
    numbers: width, height, depth, channels, batch. Its published examples fix this order: an RGB image of
    416x416 is [416, 416, 1, 3, 1]; a package with NHWC pixels shows [12, 1280, 1, 720, 1] for
    (1, 720, 1280, 12); the ten scores of a neural network are [1, 1, 1, 10, 1].

    A value of which not all lengths are known (a flexible shape, most inner values of a neural network) has
    the shape [].
    """
    on_ane = (segment for segment in inspection.segments if segment.unit == "ane")
    keys = [
        {"isegment": index, "inputs": _shapes(segment.inputs), "outputs": _shapes(segment.outputs)}
        for index, segment in enumerate(on_ane)
    ]
    return keys + [key for part in inspection.parts.values() for key in model_keys(part)]


def _shapes(values: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {name: {"shape": five(shape)} for name, shape in values.items()}


def five(shape: tuple[int, ...]) -> list[int]:
    """Return a shape as width, height, depth, channels, batch.

    Args:
        shape: as the program has it, the last axis is the width.

    Returns:
        [] for an unknown length or more than five axes.
    """
    if len(shape) > 5 or any(not isinstance(d, int) or d < 0 for d in shape):
        return []
    if len(shape) == 5:
        return list(reversed(shape))
    batch, channels, height, width = (1,) * (4 - len(shape)) + shape
    return [width, height, 1, channels, batch]

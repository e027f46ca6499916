"""The command `inspect`: where each op of a model runs, why, and which pass repairs it.

Exit codes: 0 the report was made; with --status the status of the model instead: 0 every op prefers the ANE, 1
some do, 2 none does; with --fix 1 where outputs on --inputs are below --gate in the end. Bad usage or bad input
is 64, with a line on stderr that begins with "anesurgery:".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import WHY, command, first_of
from anesurgery.commands.options import (
    Aim,
    Full,
    Function,
    Gate,
    Jobs,
    Json,
    Model,
    Quiet,
    Scheduler,
    check_page,
    is_folder,
    refuse_for_folders,
    show,
)
from anesurgery.commands.waiting import load_engine, progress, waiting
from anesurgery.display import printable
from anesurgery.errors import SurgeryError

Look = Callable[[Any], Any]
"""Inspects a model: what the options of the command line say about it is bound."""

WORDS = ("fully on the ANE", "partly on the ANE", "not on the ANE")
"""ANECompat's three answers."""

After = Annotated[str | None, typer.Argument(help="A second model, to compare with.", show_default=False)]
Units = Annotated[str | None, typer.Option(help="CPU_AND_NE (the default), ALL, CPU_AND_GPU or CPU_ONLY.")]
Samples = Annotated[
    list[Path] | None,
    typer.Option(
        help="An .npz file of arrays, or a folder of them: look for numeric hazards in a run, and let --fix "
        "repair what they reach; repeat for more."
    ),
]
Measured = Annotated[bool, typer.Option("--measured", help="Ask Core ML too (macOS 14.4 or later).")]
Segments = Annotated[
    bool, typer.Option("--segments", help="Print the ANE segments as JSON lines, like ANECompat.")
]
Status = Annotated[
    bool, typer.Option("--status", help="Print one line. Exit code 0: all ops on the ANE, 1: some, 2: none.")
]
Html = Annotated[Path | None, typer.Option(help="Write a page.")]
Fix = Annotated[Path | None, typer.Option(help="Repair the model, and write it here (.mlpackage or .mlmodel).")]
Op = Annotated[
    str | None, typer.Option("--why", metavar="OP", help="Name of an op: print every rule about it.")
]
Rates = Annotated[Path | None, typer.Option(help="A table of rates that `learn` wrote.")]
Overwrite = Annotated[bool, typer.Option(help="Let --fix and --html replace files.")]


def inspect(
    model: Model,
    after: After = None,
    target: Aim = None,
    compute_units: Units = None,
    function: Function = None,
    inputs: Samples = None,
    measured: Measured = False,
    segments: Segments = False,
    status: Status = False,
    html: Html = None,
    fix: Fix = None,
    why: Op = None,
    rates: Rates = None,
    gate: Gate = 40.0,
    overwrite: Overwrite = False,
    jobs: Jobs = 1,
    scheduler: Scheduler = None,
    full: Full = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say where each op of a model runs, why, and which pass repairs it. A folder: each model in it."""
    load_engine(quiet)
    if is_folder(model):
        asked: dict[str, Any] = {
            "AFTER": after,
            "--function": function,
            "--inputs": inputs,
            "--measured": measured,
        }
        asked |= {"--segments": segments, "--status": status, "--html": html, "--fix": fix, "--why": why}
        refuse_for_folders({**asked, "--rates": rates})
        _inspect_folder(model, target, compute_units, (jobs, scheduler), as_json, quiet)
        return
    if jobs > 1 or scheduler is not None:
        raise SurgeryError("--jobs and --scheduler share out the models of a folder; name a folder")
    _check(after, segments=segments, status=status, fix=fix, why=why, as_json=as_json)
    if why is not None:
        _print_why(model, why, target, compute_units, function, as_json=as_json, quiet=quiet)
        return
    _check_files(model, html, fix, overwrite)
    look = _look(_aim(target, compute_units, rates), function, inputs, measured)
    with waiting("inspecting", quiet):
        first = look(model)
        second = look(after) if after is not None else None
    wrong, passes = "", list[str]()
    if fix is not None:
        aimed = {"target": target, "inputs": inputs, "gate": gate}
        wrong, passes = _repair(model, fix, compute_units, aimed, overwrite, quiet or as_json)
        with waiting("inspecting the repaired model", quiet):
            second = look(fix)
    if html is not None:
        first.save_html(html.expanduser(), second)
    if segments:
        _print_segments(first, quiet)
    elif status:
        _print_status(first, as_json, quiet)
    else:
        ends = _Ends(model, str(fix or after or ""), target, (fix, html), passes, wrong)
        _print_report(first, second, ends, full, as_json, quiet)
    if code := first.status if status else int(bool(wrong)):
        raise typer.Exit(code)


def _inspect_folder(
    model: str, target: str | None, units: str | None, where: tuple[int, Any], as_json: bool, quiet: bool
) -> None:
    from anesurgery.placement.folders import inspect_folder
    from anesurgery.show.folder_table import folder_group

    options: dict[str, Any] = {"compute_units": units, "jobs": where[0], "scheduler": where[1]}
    with progress("models", quiet or as_json) as bar:
        folder = inspect_folder(model, target, progress=bar, **options)
    then = first_of(folder, "see", model, lambda one: getattr(one, "status", 1) != 0, target)
    show(folder.to_json(), folder_group(folder), as_json, quiet, then=then)


def _check(
    after: str | None, *, segments: bool, status: bool, fix: Path | None, why: str | None, as_json: bool
) -> None:
    """Refuse options that contradict each other."""
    asked = {"AFTER": after, "--fix": fix, "--segments": segments, "--status": status, "--why": why}
    named = [name for name, value in asked.items() if value]
    if len(named) > 1:
        raise SurgeryError(f"{' and '.join(named)} cannot be asked for at once; choose one")
    if segments and as_json:
        raise SurgeryError("--segments prints JSON lines already; leave --json out")


def _check_files(model: str, html: Path | None, fix: Path | None, overwrite: bool) -> None:
    """Refuse places that cannot be written to, before any work is done."""
    from anesurgery.files.writing import check_target
    from anesurgery.placement.models import of_layers

    if fix is not None:
        suffix = ".mlmodel" if of_layers(model) else ".mlpackage"
        check_target(Path(model).expanduser(), fix.expanduser(), overwrite, suffix)
    check_page(html, overwrite)


def _aim(target: str | None, compute_units: str | None, rates: Path | None) -> Any:
    from anesurgery.placement.corrections import read_corrections
    from anesurgery.placement.target import Target

    device = Target.parse(target, compute_units)
    return device if rates is None else replace(device, rates=read_corrections(rates))


def _look(target: Any, function: str | None, inputs: list[Path] | None, measured: bool) -> Look:
    from anesurgery.files import arrays
    from anesurgery.placement.inspector import inspect as analyse

    samples = arrays.read_all(inputs)
    return lambda model: analyse(model, target, inputs=samples, function=function, measured=measured)


def _repair(
    model: str, package: Path, units: str | None, how: dict[str, Any], overwrite: bool, quiet: bool
) -> tuple[str, list[str]]:
    """Write the repaired model.

    Returns:
        How wrong its outputs are, "" where they reach the gate; and the passes that changed it.
    """
    from anesurgery.files import arrays
    from anesurgery.placement.models import of_layers
    from anesurgery.surgery import apply, find_recipe

    auto = find_recipe("auto").with_options(compute_units=units)
    chosen = find_recipe("neuralnetwork_ane") if of_layers(model) else auto
    surgery = apply(model, chosen, **{**how, "inputs": arrays.read_all(how["inputs"])}, quiet=quiet)
    with waiting("saving", quiet):
        surgery.save(package, overwrite=overwrite)
    for change in () if quiet else surgery.contract:
        print(printable(f"interface: {change.words}"), file=sys.stderr)
    passes = list(dict.fromkeys(change.pass_name for change in surgery.changes))
    return (surgery.wrong if surgery.below(how["gate"]) else ""), passes


def _print_why(
    model: str,
    op: str,
    target: str | None,
    units: str | None,
    function: str | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from anesurgery.loading import load
    from anesurgery.placement.models import of_layers
    from anesurgery.placement.target import Target
    from anesurgery.placement.why import why
    from anesurgery.show.consulted import why_group

    if of_layers(model):
        raise SurgeryError("--why reads ML Programs; layers of a neural network show their rules in the report")
    with waiting("inspecting", quiet):
        reasons = why(load(model), op, Target.parse(target, units), function)
    show(reasons.to_json(), why_group(reasons), as_json, quiet, then=command("see", model, target=target))


def _print_segments(inspection: Any, quiet: bool) -> None:
    from anesurgery.show.anecompat import model_keys

    for key in [] if quiet else model_keys(inspection):
        print(json.dumps(key, separators=(",", ":")))


def _print_status(inspection: Any, as_json: bool, quiet: bool) -> None:
    words = inspection.refused or WORDS[inspection.status]
    line = {"status": inspection.status, "words": words, "counts": inspection.counts}
    counts = ", ".join(f"{n} {unit}" for unit, n in inspection.counts.items()) or "no ops"
    show(line, f"{inspection.status}: {words} ({counts}; {inspection.target})", as_json, quiet, then="")


@dataclass(frozen=True)
class _Ends:
    """The end of a report: the models it is about, the files written, and the passes that ran."""

    model: str
    after: str
    target: str | None
    wrote: tuple[Path | None, ...]
    passes: list[str]
    wrong: str

    def repair(self, name: str) -> str:
        """The command that applies a pass."""
        return command("fix", self.after or self.model, name, target=self.target)

    def then(self, first: Any) -> str:
        """The command to run next."""
        if self.after:
            return command("certify", self.after, target=self.target)
        if first.fixing:
            return str(first.fixing)
        helped = any(finding.remedy for finding in first.all_findings)
        return command("fix" if helped else "certify", self.model, target=self.target)


def _print_report(first: Any, second: Any, ends: _Ends, full: bool, as_json: bool, quiet: bool) -> None:
    from rich.console import Group

    from anesurgery.show import terminal
    from anesurgery.show.console import plain as said

    end = partial(show, as_json=as_json, quiet=quiet, wrote=filter(None, ends.wrote))
    end = partial(end, then=ends.then(first), more="" if full else WHY)
    if second is None:
        group = terminal.inspection_group(first) if full else terminal.short_group(first, ends.repair)
        end(first.to_json(), group)
        return
    plain = {"before": first.to_json(), "after": second.to_json()}
    plain |= {"wrong": ends.wrong} if ends.wrong else {}
    plain |= {"passes": ends.passes} if ends.passes else {}
    first_line = [said(ends.wrong, style="bold")] if ends.wrong else []
    passes = [said(f"Repaired by {', '.join(ends.passes)}")] if ends.passes else []
    if full:
        group = Group(terminal.difference_group(first, second), *passes)
    else:
        group = terminal.short_difference(first, second, ends.repair, *passes)
    end(plain, Group(*first_line, group))

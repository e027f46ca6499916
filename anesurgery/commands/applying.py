"""The commands `apply` (`fix` too) and `plan`, and how the command line names steps, options and ranges.

`apply` repairs a model, and writes the result beside it. Exit codes: 0 all is well; 1 outputs on --inputs are
below --gate in the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery import registry
from anesurgery.commands.next_steps import FULL, beside, command, to_certify, without
from anesurgery.commands.options import SUFFIXES, Full, Inputs, Model, Overwrite, complete_steps, model_first
from anesurgery.commands.subcommand import Call, MaybePlace, Outcome, subcommand
from anesurgery.commands.waiting import waiting
from anesurgery.errors import SurgeryError, UnknownName

PROOFS = ("sites", "model", "both", "none")
NAMED = "A recipe, passes separated by commas, or a plan file. Default: the passes that inspect suggests."
Steps = Annotated[str | None, typer.Argument(help=NAMED, autocompletion=complete_steps)]
Recipe = Annotated[
    str | None,
    typer.Argument(help="A recipe. Default: the passes that inspect suggests.", autocompletion=complete_steps),
]
Assume = Annotated[
    list[str] | None, typer.Option(help="Range of an integer input, as input_ids=0:50256; repeat for more.")
]
Prove = Annotated[str, typer.Option(help="Check each edit (sites), the whole model (model), both, or none.")]
SET = "Set an option: multiple=32, embedding_matmul.mode=input. STEP=false leaves a step out."
Set = Annotated[list[str] | None, typer.Option("--set", help=SET)]
FORMAT = "coreml, coreai, or both (and compares them). Default: as the suffix of OUT says."
Format = Annotated[str | None, typer.Option(help=FORMAT)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write nothing.")]
STAYS = (
    "the neural network stays as it is, and nothing was written to {out}; to make an ML Program all the same, "
    "run in Python: ane.upgrade({source!r}).save({out!r})"
)
COPIED = "It is the model as given, since nothing was edited."


@subcommand("surgery:apply")
def apply(
    call: Call,
    source: Model,
    steps: Steps = None,
    out: MaybePlace = None,
    inputs: Inputs = None,
    assume: Assume = None,
    prove: Prove = "sites",
    option: Set = None,
    format: Format = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    full: Full = False,
) -> Outcome:
    """Apply a recipe, passes or a plan to a model and write the result, MODEL_ane by default.

    Exit code 1 if the final outputs on --inputs are below --gate.
    """
    if steps is not None and not is_plan(steps):
        source, steps = model_first(source, steps, call.silent)
    if prove not in PROOFS:
        raise UnknownName("proof", prove, PROOFS)
    chosen, target = _chosen(source, steps, option, out), call["target"]
    chosen = _in_format(source, chosen, out, format)
    is_open = bool(getattr(chosen, "on_layers", "")) and _is_layered(source)  # the result may be in two formats
    place = None if dry_run or is_open else _place(source, chosen, out, overwrite, format)
    proof, ranges = None if prove == "none" else prove, dict(map(value_range, assume or []))
    surgery = call(source, chosen, inputs=inputs, prove=proof, assume=ranges)
    if is_open and not dry_run:
        place = beside(source, surgery.subject.suffix)
    written = (surgery.subject.suffix, *registry.WRITERS)
    stays = place is not None and place.suffix not in written and not surgery.changes
    if stays or (out is None and not surgery.changes):
        place = None
    wrote, both = _write(surgery, place, format, overwrite, call.silent)
    is_copy = bool(wrote) and not surgery.changes and wrote[0].suffix == Path(source).suffix
    notes = {"Nothing was written, as --dry-run says.": dry_run, COPIED: is_copy, FULL: not full}
    return Outcome(
        {**surgery.to_json(), **both},
        shown=_shown(surgery, both, str(place or source), target, full),
        wrote=wrote,
        then=_then(surgery, source, place, target, dry_run, stays),
        more="\n".join(words for words, holds in notes.items() if holds),
        code=int(surgery.below(call["gate"])),
        error=STAYS.format(source=source, out=str(out)) if stays and out is not None else "",
    )


def _shown(surgery: Any, both: dict[str, Any], model: str, target: str | None, full: bool) -> Any:
    """Return the report, whole or short, with how well two formats agree."""
    from dataclasses import replace

    from anesurgery.show.surgeries import short_surgery, surgery_report

    repair = lambda name: command("fix", model, name, target=target)  # noqa: E731
    report = surgery_report(surgery, details=True) if full else short_surgery(surgery, repair)
    return replace(report, parts=[*report.parts, *([both["formats"]["statement"]] if both else [])])


def _chosen(source: str, steps: str | None, option: list[str] | None, out: Path | None) -> Any:
    """Return the steps that are named, or the recipe for this kind of model."""
    if steps is not None and is_plan(steps):
        return read_plan(steps, option)
    return chosen_steps(steps or _fitting(source, out), option or [])


def _fitting(source: str, out: Path | None = None) -> str:
    """Return the name of the recipe for this kind of model, and for the format that OUT names."""
    stays_network = _is_layered(source) and (out is None or out.suffix == ".mlmodel")
    return "neuralnetwork_ane" if stays_network else "auto"


def _is_layered(source: str) -> bool:
    from anesurgery.placement.models import is_layered

    return is_layered(source)


def _in_format(source: str, chosen: Any, out: Path | None, format: str | None) -> Any:
    """Return the recipe for the format that OUT names: layers of a network (.mlmodel), or its ML Program."""
    from dataclasses import replace

    from anesurgery.surgery import find_recipe

    on_layers = getattr(chosen, "on_layers", "")
    if not on_layers or not _is_layered(source) or (out is None and format is None):
        return chosen
    is_network = format is None and out is not None and out.suffix == ".mlmodel"
    return find_recipe(on_layers) if is_network else replace(chosen, on_layers="")


def _place(source: str, chosen: Any, named: Path | None, overwrite: bool, format: str | None) -> Path:
    """Return the path to write to, after checking that it may be written.

    Raises:
        LoadError: it may not be written.
        SurgeryError: its name is that of another format than the one asked for.
        UnknownName: there is no such format.
    """
    from anesurgery.rewriting.both_formats import ASSET, BOTH, CORE_AI, check_both, check_format
    from anesurgery.rewriting.ml_program import check_out
    from anesurgery.rewriting.passes import subject_of
    from anesurgery.surgery import steps_of

    own = subject_of(steps_of(chosen)).suffix
    if own == ".mlmodel" and not _is_layered(source):
        raise SurgeryError(f"these steps edit neural networks (.mlmodel); run {command('fix', source)}")
    suffix = ASSET if format is not None and check_format(format) == CORE_AI else own
    place = beside(source, suffix) if named is None else named
    if format is not None and place.suffix != suffix:
        raise SurgeryError(f"--format {format} writes a {suffix}; let {place} end so, or leave --format out")
    if format == BOTH:
        check_both(Path(source).expanduser(), place.expanduser().absolute(), overwrite, own)
    check_out(source, place, overwrite, own)
    return place


def _write(
    surgery: Any, place: Path | None, format: str | None, overwrite: bool, quiet: bool
) -> tuple[list[Path], dict[str, Any]]:
    """Write the model, and return the paths and, for both formats, how well they agree as plain data."""
    from anesurgery.rewriting.both_formats import ASSET, BOTH

    if place is None:
        return [], {}
    with waiting("saving", quiet):
        if format != BOTH:
            surgery.save(place, overwrite=overwrite)
            return [place], {}
        both = surgery.save_both(place, overwrite=overwrite)
    return [place, place.with_suffix(ASSET)], {"formats": both.to_json()}


def _then(surgery: Any, source: str, place: Path | None, target: str | None, dry_run: bool, stays: bool) -> str:
    """Return the command to run next: this one, a repair of layers, or a look at the result or its numbers."""
    if dry_run and surgery.changes:
        return without("--dry-run")
    if stays:
        return command("fix", source, target=target)
    if place is None or not surgery.changes or surgery.proof is not None:
        return to_certify(place or source, target=target)
    if surgery.contract:
        return command("see", source, place, target=target)
    return command("compare", source, place)


@subcommand("surgery:plan", waits="planning", screen=True, without=("compressed",))
def plan(call: Call, source: Model, steps: Recipe = None, inputs: Inputs = None, option: Set = None) -> Outcome:
    """Show what a recipe would do, and why, without editing. `apply MODEL PLAN.json` does it."""
    if steps is not None:
        source, steps = model_first(source, steps, call.silent)
    steps = steps or _fitting(source)
    planned = call(source, chosen_steps(steps, option or []), inputs=inputs)
    words = ("fix", source, steps) if planned.steps else ("see", source)
    return Outcome(planned, then=command(*words, target=call["target"]))


def is_plan(steps: str) -> bool:
    """Does the command line name a file with a plan?"""
    return steps.endswith(".json")


def read_plan(path: str, options: list[str] | None) -> Any:
    """Read a plan from a file.

    Raises:
        SurgeryError: options are given too; those of its steps stand in it.
        LoadError: it cannot be read.
    """
    from anesurgery.rewriting.edit_plan import Plan

    if options:
        raise SurgeryError(f"--set is for a recipe; the options of the steps of {path} stand in it")
    return Plan.read(Path(path))


def chosen_steps(names: str, options: list[str]) -> Any:
    """Return a recipe, or a list of passes, with the options of the command line."""
    values = dict(_option(text) for text in options)
    listed = [n.strip() for n in names.split(",") if n.strip()]
    if not listed:
        raise SurgeryError("no recipe or pass is named; `anesurgery list` shows them")
    if len(listed) == 1 and listed[0] in registry.recipe_names():
        from anesurgery.surgery import find_recipe

        return find_recipe(listed[0]).with_options(**_nested(values))
    known = [*registry.recipe_names(), *registry.pass_names()]
    for name in listed:
        if name not in known:
            raise _error_of(name, known)
    from anesurgery.surgery import Recipe, steps_of

    ours = Recipe("the command line", tuple(steps_of(listed)))
    return list(ours.with_options(**_nested(values)).steps)


def _error_of(name: str, known: Iterable[str]) -> SurgeryError:
    """Return the error for a word that is no pass or recipe, and perhaps a place or a target."""
    from anesurgery.placement.target import Target

    if name.endswith(SUFFIXES):
        return SurgeryError(f"{name!r} is no pass or recipe; to write the result there, say --out {name}")
    with suppress(SurgeryError):
        Target.parse(name)
        return SurgeryError(f"{name!r} is a target: say --target {name}")
    return UnknownName("pass or recipe", name, known, "`anesurgery list` lists them")


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SurgeryError(f"--set {text!r}: write it as option=value")
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def value_range(text: str) -> tuple[str, tuple[int, int]]:
    """Read the range of an integer input, as in "input_ids=0:50256"."""
    parts = re.fullmatch(r"(.+)=(-?\d+):(-?\d+)", text.strip())
    if parts is None:
        raise SurgeryError(f"--assume {text!r}: write it as input_ids=0:50256")
    return parts[1], (int(parts[2]), int(parts[3]))


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Return options with `step.option` keys as dictionaries of options by step."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        step, dot, name = key.partition(".")
        if dot:
            nested.setdefault(step, {})[name] = value
        else:
            nested[key] = value
    return nested

"""The command `apply`, which is `fix` too: repair a model, and write the result beside it.

Exit codes: 0 all is well; 1 outputs on --inputs are below --gate in the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from anesurgery import registry
from anesurgery.commands.next_steps import FULL, beside, command
from anesurgery.commands.options import (
    Full,
    Gate,
    Inputs,
    Json,
    Member,
    Model,
    OldOut,
    Out,
    Quiet,
    any_place,
    complete_steps,
    model_first,
    show,
)
from anesurgery.commands.planning import chosen_steps, default_recipe, is_plan, read_plan, value_range
from anesurgery.commands.waiting import load_engine, waiting
from anesurgery.errors import SurgeryError, UnknownName

PROOFS = ("sites", "model", "both", "none")


def apply(
    source: Model,
    steps: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, passes with commas, or a plan. Default: the passes that inspect names.",
            show_default=False,
            autocompletion=complete_steps,
        ),
    ] = None,
    positional_out: OldOut = None,
    out: Out = None,
    target: Annotated[
        str | None, typer.Option(help='Device or chip, and OS: "iPhone 13", "M1/macOS 14".')
    ] = None,
    inputs: Inputs = None,
    member: Member = None,
    assume: Annotated[
        list[str] | None, typer.Option(help="Range of an integer input, as input_ids=0:50256; repeat for more.")
    ] = None,
    prove: Annotated[
        str, typer.Option(help="Check each edit (sites), the whole model (model), both, or none.")
    ] = "sites",
    require: Annotated[
        str | None, typer.Option(help="The least grade of each edit: checked, exhaustive, proved or bits.")
    ] = None,
    compressed: Annotated[
        str, typer.Option(help="If a pass computes with compressed weights: keep (refuse), decode or reencode.")
    ] = "keep",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Set an option: multiple=32, embedding_matmul.mode=input. STEP=false leaves a step out.",
        ),
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="coreml, coreai, or both, compared; by default what OUT ends in.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    gate: Gate = 40.0,
    full: Full = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Apply a recipe, passes or a plan to a model and write the result, MODEL_ane by default.

    Exit code 1 if the final outputs on --inputs are below --gate.
    """
    if steps is not None and not is_plan(steps):
        source, steps = model_first(source, steps, quiet or as_json)
    named = any_place(out, positional_out)
    if prove not in PROOFS:
        raise UnknownName("proof", prove, PROOFS)
    load_engine(quiet)
    chosen = _chosen(source, steps, option)
    place = None if dry_run else _place(source, chosen, named, overwrite, format)
    from anesurgery.files import arrays
    from anesurgery.show.surgeries import short_surgery, surgery_group
    from anesurgery.surgery import apply as operate

    surgery = operate(
        source,
        chosen,
        target=target,
        member=member,
        assume=dict(map(value_range, assume or [])),
        prove=None if prove == "none" else prove,
        require=require,
        compressed=compressed,
        inputs=arrays.read_all(inputs),
        gate=gate,
        quiet=quiet or as_json,
    )
    written = (surgery.subject.suffix, *registry.WRITERS)
    stays = place is not None and place.suffix not in written and not surgery.changes
    if stays or (named is None and not surgery.changes):
        place = None
    wrote, both = _write(surgery, place, format, overwrite, quiet or as_json)
    repair = lambda name: command("fix", source, name, target=target)  # noqa: E731
    shown = surgery_group(surgery, details=True) if full else short_surgery(surgery, repair)
    if both:
        shown = Group(shown, both["formats"]["statement"])
    then, more = _next(surgery, source, place, target), "" if full else FULL
    show({**surgery.to_json(), **both}, shown, as_json, quiet, wrote, then=then, more=more)
    if stays and named is not None:
        raise SurgeryError(f"the model stays {source}; nothing was written to {named}")
    if surgery.below(gate):
        raise typer.Exit(1)


def _chosen(source: str, steps: str | None, option: list[str] | None) -> Any:
    """The steps that are named, or the recipe for whatever the model is."""
    if steps is not None and is_plan(steps):
        return read_plan(steps, option)
    return chosen_steps(steps or default_recipe(source), option or [])


def _place(source: str, chosen: Any, named: Path | None, overwrite: bool, format: str | None) -> Path:
    """Where to write.

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


def _next(surgery: Any, source: str, place: Path | None, target: str | None) -> str:
    """What to run next: a comparison of both, a look at both, or a look at the numbers."""
    if place is None:
        return command("certify", source, target=target)
    if surgery.proof is not None:
        return command("certify", place, target=target)
    if surgery.contract:
        return command("see", source, place, target=target)
    return command("compare", source, place)

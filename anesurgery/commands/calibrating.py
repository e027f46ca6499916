"""`anesurgery ranges`, `certify` and `sensitivity`: what a model does on a calibration set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import command, first_of, picture, to_certify
from anesurgery.commands.options import (
    Html,
    Inputs,
    Model,
    Overwrite,
    check_pages,
    is_folder,
    refuse_for_folders,
)
from anesurgery.commands.subcommand import Call, Outcome, subcommand
from anesurgery.commands.waiting import waiting
from anesurgery.display import finite
from anesurgery.errors import SurgeryError

Parts = Annotated[
    list[Path] | None, typer.Option("--merge", help="A file that --save wrote. Repeat for each share.")
]
Save = Annotated[Path | None, typer.Option(help="A JSON file to write the result to, for --merge.")]
Measured = Annotated[
    str | None, typer.Argument(help="An .mlpackage, .mlmodel or .mlmodelc; none with --merge.")
]
EXAMPLES = "palettize-4, linear-8, linear-4-block-32, prune-50, ...; repeat."
Modes = Annotated[list[str] | None, typer.Option("--mode", help=EXAMPLES)]
Bits = Annotated[float | None, typer.Option(help="Propose modes with this many bits on average.")]
MaxSize = Annotated[str | None, typer.Option(help="Propose modes for this size of all weights, as 20MB.")]
MaxKl = Annotated[
    float | None, typer.Option(help="Propose the smallest modes with at most this KL divergence.")
]
MinPsnr = Annotated[float | None, typer.Option(help="Propose the smallest modes with at least this PSNR.")]
Package = Annotated[Path | None, typer.Option("--out", "-o", help="The compressed .mlpackage to write.")]
Feedback = Annotated[list[str] | None, typer.Option(help="OUTPUT=INPUT to feed back. Default: found by name.")]
Worst = Annotated[Path | None, typer.Option(help="An .npz file to write the worst inputs to.")]


@subcommand("checking.ranges:ranges", waits="running the model in three arithmetics")
def ranges(
    call: Call, model: Measured = None, inputs: Inputs = None, merge: Parts = None, save: Save = None
) -> Outcome:
    """Show the range of every op. Exit code 1 if a value overflows fp16 or the Neural Engine."""
    if model is not None and is_folder(model):
        asked = {"--inputs": inputs, "--shard": call["shard"], "--merge": merge, "--save": save}
        refuse_for_folders(asked | {f"--{name}": call[name] for name in ("function", "member")})
        folder = call.of("placement.folders:ranges_folder", "models")(model)
        sound = [getattr(one, "ok", False) for one in folder.models.values()]
        then = first_of(folder, "ranges", model, lambda one: not getattr(one, "ok", False))
        return Outcome(folder, then=then, code=int(not all(sound)))
    from anesurgery.checking.ranges import Ranges

    parts = _parts(model, merge, Ranges)
    observed = call(model, inputs) if parts is None else parts[0].merge(*parts[1:])
    _save(observed, save)
    then = to_certify(model) if observed.ok else command("fix", model, "safe_numbers")
    return Outcome(observed, wrote=[save], then=then if model else "", code=int(not observed.ok))


@subcommand("placement.certifying:certify", waits="running the model in each arithmetic")
def certify(
    call: Call,
    model: Model,
    inputs: Inputs = None,
    feedback: Feedback = None,
    worst: Worst = None,
    html: Html = None,
    overwrite: Overwrite = False,
) -> Outcome:
    """Check op by op whether a model computes well in fp16 and on the engine. If not, exit code 1."""
    check_pages(overwrite, html, worst)
    certificate = call(model, inputs, feedback=_pairs(feedback))
    if html is not None:
        certificate.save_html(html)
    if worst is not None:
        from anesurgery.files import arrays

        arrays.write(worst.expanduser(), certificate.worst_inputs, overwrite)
    return certified(certificate, model, call["target"], html, worst)


def certified(certificate: Any, model: str, target: str | None, *wrote: Path | None) -> Outcome:
    """Return the end of `certify`: a failure names the repair, a success a picture and a way to time it."""
    fix = command("fix", model, "safe_numbers", target=target)
    then = picture(model, target) if certificate.ok else fix
    more = f"On a Mac, time it: {command('measure', model)}" if certificate.ok else ""
    return Outcome(certificate, wrote=wrote, then=then, more=more, code=int(not certificate.ok))


def _pairs(feedback: list[str] | None) -> dict[str, str] | None:
    """Output -> input, from OUTPUT=INPUT.

    Raises:
        SurgeryError: there is no "=" in one.
    """
    if any("=" not in one for one in feedback or ()):
        raise SurgeryError(f"--feedback {' '.join(feedback or ())}: write it as OUTPUT=INPUT")
    return dict(one.split("=", 1) for one in feedback) if feedback else None


@subcommand("compressing.sensitivity:sensitivity", waits="weights", leave=("precision",))
def sensitivity(
    call: Call,
    model: Measured = None,
    inputs: Inputs = None,
    modes: Modes = None,
    bits: Bits = None,
    max_size: MaxSize = None,
    max_kl: MaxKl = None,
    min_psnr: MinPsnr = None,
    out: Package = None,
    merge: Parts = None,
    save: Save = None,
    overwrite: Overwrite = False,
) -> Outcome:
    """Measure how much compressing each weight changes the outputs, and propose bits for each."""
    from anesurgery.compressing.sensitivity import MODES, Sensitivity

    every = {"bits": bits, "max_bytes": max_size, "max_kl": max_kl, "min_psnr": min_psnr}
    goals = {name: goal for name, goal in every.items() if goal is not None}
    _check_out(out, goals, model, overwrite)
    parts = _parts(None if merge and out else model, merge, Sensitivity)
    costs = call(model, inputs, tuple(modes or MODES)) if parts is None else parts[0].merge(*parts[1:])
    _save(costs, save)
    proposal = costs.propose(**goals) if goals else None
    if out is not None and proposal is not None:
        from anesurgery.files.writing import write_atomically

        with waiting("compressing with coremltools", call.silent):
            made = proposal.apply(model)
            write_atomically(out.expanduser().absolute(), lambda place: made.save(str(place)), overwrite)
    then = command("see", out) if out is not None else command("compress", model, "--bits", 4) if model else ""
    shown = [one for one in (costs, proposal) if one is not None]
    plain = costs.to_json() | ({} if proposal is None else {"proposal": proposal.to_json()})
    return Outcome(plain, shown, [save, out], then=then)


def _check_out(out: Path | None, goals: dict[str, Any], model: str | None, overwrite: bool) -> None:
    """See that a compressed model may be written, before anything is measured.

    Raises:
        SurgeryError: it may not, or there is nothing to write.
    """
    from anesurgery.files.writing import check_target

    if out is None:
        return
    if not goals or model is None:
        raise SurgeryError("--out needs the model and a goal: --bits, --max-size, --max-kl or --min-psnr")
    check_target(Path(model).expanduser(), out.expanduser().absolute(), overwrite)


def _parts(model: str | None, merge: list[Path] | None, kind: Any) -> list[Any] | None:
    """The shares to merge; None where a model is to be measured."""
    if (model is None) == (not merge):
        raise SurgeryError("give a model to measure, or the results of its shares by --merge")
    return [kind.from_json(_json(path)) for path in merge] if merge else None


def _save(result: Any, path: Path | None) -> None:
    """Write a result, so that it can be merged; infinities are words."""
    from anesurgery.files.arrays import write_text

    if path is not None:
        write_text(path, json.dumps(finite(result.to_json()), indent=2, allow_nan=False))


def _json(path: Path) -> Any:
    from anesurgery.files.source import read_text

    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise SurgeryError(f"{path} cannot be read as JSON: {error}") from error

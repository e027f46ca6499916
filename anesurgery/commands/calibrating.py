"""`anesurgery ranges`, `certify` and `sensitivity`: what a model does on a calibration set.

`@subcommand` names the public function that `call(...)` calls, with the options that the command shares with
it; `call["shard"]` is one of these, and `call.of(...)` calls another function with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import beside, command, first_of, picture, to_certify
from anesurgery.commands.options import (
    Html,
    Inputs,
    Model,
    Overwrite,
    check_pages,
    ending,
    is_folder,
    refuse_for_folders,
)
from anesurgery.commands.subcommand import Call, Outcome, subcommand
from anesurgery.commands.waiting import waiting
from anesurgery.display import finite
from anesurgery.errors import SurgeryError

Merge = Annotated[
    list[Path] | None, typer.Option("--merge", help="A file that --save wrote. Repeat for each share.")
]
Save = Annotated[
    Path | None, typer.Option(help="A JSON file to write the result to, for --merge.", callback=ending(".json"))
]
OptionalModel = Annotated[
    str | None, typer.Argument(help="An .mlpackage, .mlmodel or .mlmodelc; none with --merge.")
]
Modes = Annotated[
    list[str] | None,
    typer.Option("--mode", help="palettize-4, linear-8, linear-4-block-32, prune-50, ...; repeat."),
]
Bits = Annotated[float | None, typer.Option(help="Propose modes with this many bits on average.")]
MaxSize = Annotated[str | None, typer.Option(help="Propose modes for this size of all weights, as 20MB.")]
MaxKl = Annotated[
    float | None, typer.Option(help="Propose the smallest modes with at most this KL divergence.")
]
MinPsnr = Annotated[float | None, typer.Option(help="Propose the smallest modes with at least this PSNR.")]
CompressedOut = Annotated[Path | None, typer.Option("--out", "-o", help="The compressed .mlpackage to write.")]
Feedback = Annotated[list[str] | None, typer.Option(help="OUTPUT=INPUT to feed back. Default: found by name.")]
Worst = Annotated[Path | None, typer.Option(help="An .npz file to write the worst inputs to.")]


@subcommand("checking.ranges:ranges", waits="running the model in three arithmetics", screen=True)
def ranges(
    call: Call,
    model: OptionalModel = None,
    inputs: Inputs = None,
    merge: Merge = None,
    save: Save = None,
    overwrite: Overwrite = False,
) -> Outcome:
    """Show the range of every op. Exit code 1 if a value overflows fp16 or the Neural Engine."""
    if model is not None and is_folder(model):
        asked = {"--inputs": inputs, "--shard": call["shard"], "--merge": merge, "--save": save}
        refuse_for_folders(asked | {f"--{name}": call[name] for name in ("function", "member")})
        folder = call.of("placement.folders:ranges_folder", waits="models")(model)
        all_fit = all(getattr(observed, "ok", False) for observed in folder.models.values())
        then = first_of(folder, "ranges", model, lambda observed: not getattr(observed, "ok", False))
        return Outcome(folder, then=then, code=int(not all_fit))
    from anesurgery.checking.ranges import Ranges

    check_pages(overwrite, save)
    _check_one_source(model, merge)
    observed = _merged(merge, Ranges) if merge else call(model, inputs)
    _save(observed, save)
    then = to_certify(model) if observed.ok else command("fix", model, "safe_numbers")
    return Outcome(observed, wrote=[save], then=then if model else "", code=int(not observed.ok))


@subcommand("placement.certifying:certify", waits="running the model in each arithmetic", screen=True)
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
    """Return the outcome of `certify` and `prove` for one model, with the next step: a repair or a picture."""
    if not certificate.ok:
        repair = command("fix", model, "safe_numbers", target=target)
        return Outcome(certificate, wrote=wrote, then=repair, code=1)
    more = f"On a Mac, time it: {command('measure', model)}"
    return Outcome(certificate, wrote=wrote, then=picture(model, target), more=more)


def _pairs(feedback: list[str] | None) -> dict[str, str] | None:
    """Return output -> input, from OUTPUT=INPUT.

    Raises:
        SurgeryError: there is no "=" in one, or an output is named twice.
    """
    pairs: dict[str, str] = {}
    for pair in feedback or ():
        output, equals, fed_back = pair.partition("=")
        if not equals:
            raise SurgeryError(f"--feedback {pair}: write it as OUTPUT=INPUT")
        if output in pairs:
            raise SurgeryError(f"--feedback {pair}: the output {output} is fed back to {pairs[output]} already")
        pairs[output] = fed_back
    return pairs or None


@subcommand("compressing.sensitivity:sensitivity", waits="weights", screen=True, without=("precision",))
def sensitivity(
    call: Call,
    model: OptionalModel = None,
    inputs: Inputs = None,
    modes: Modes = None,
    bits: Bits = None,
    max_size: MaxSize = None,
    max_kl: MaxKl = None,
    min_psnr: MinPsnr = None,
    out: CompressedOut = None,
    merge: Merge = None,
    save: Save = None,
    overwrite: Overwrite = False,
) -> Outcome:
    """Measure how much compressing each weight changes the outputs, and propose bits for each."""
    from anesurgery.compressing.sensitivity import MODES, Sensitivity
    from anesurgery.files.writing import write_atomically

    options = {"bits": bits, "max_bytes": max_size, "max_kl": max_kl, "min_psnr": min_psnr}
    goals = {name: goal for name, goal in options.items() if goal is not None}
    check_pages(overwrite, save)
    _check_out(out, goals, model, overwrite)
    if not (merge and out):  # merged costs need the model, too, to write it compressed
        _check_one_source(model, merge)
    costs = _merged(merge, Sensitivity) if merge else call(model, inputs, tuple(modes or MODES))
    _save(costs, save)
    plain, shown = costs.to_json(), [costs]
    if goals:
        proposal = costs.propose(**goals)
        plain |= {"proposal": proposal.to_json()}
        shown.append(proposal)
        if out is not None:
            with waiting("compressing with coremltools", call.silent):
                compressed, place = proposal.apply(model), out.expanduser().absolute()
                write_atomically(place, lambda path: compressed.save(str(path)), overwrite)
    smaller = beside(model, ".mlpackage", "int4") if model and costs.total else ""
    then = command("compress", model, smaller, "--bits", 4) if smaller else ""
    return Outcome(plain, shown=shown, wrote=[save, out], then=then if out is None else command("see", out))


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


def _check_one_source(model: str | None, merge: list[Path] | None) -> None:
    """See that there is either a model to measure or results to merge.

    Raises:
        SurgeryError: there are both, or none.
    """
    if (model is None) == (not merge):
        raise SurgeryError("give a model to measure, or the results of its shares by --merge")


def _merged(paths: list[Path], kind: Any) -> Any:
    """Return the results of shares as one; `kind` is their class."""
    first, *others = [kind.from_json(_json(path)) for path in paths]
    return first.merge(*others)


def _save(result: Any, path: Path | None) -> None:
    """Write a result, so that it can be merged; infinities are words."""
    from anesurgery.files.arrays import write_text

    if path is not None:
        write_text(path, json.dumps(finite(result.to_json()), indent=2, allow_nan=False))


def _json(path: Path) -> Any:
    from anesurgery.files.source import read_json

    try:
        return read_json(path.expanduser())
    except (OSError, ValueError, RecursionError) as error:
        raise SurgeryError(f"{path} cannot be read as JSON: {error}") from error

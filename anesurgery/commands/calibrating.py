"""`anesurgery ranges`, `certify` and `sensitivity`: what a model does on a calibration set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import command, first_of, picture
from anesurgery.commands.options import (
    Aim,
    Function,
    Inputs,
    Jobs,
    Json,
    Member,
    Model,
    Quiet,
    Scheduler,
    Seed,
    check_page,
    is_folder,
    refuse_for_folders,
    show,
)
from anesurgery.commands.waiting import load_engine, progress, waiting
from anesurgery.registry import INTERPRETER

Share = Annotated[
    str | None,
    typer.Option(help="Do only a share of the work, as 3/8. --merge joins them.", show_default=False),
]
Parts = Annotated[
    list[Path] | None,
    typer.Option("--merge", help="A file that --save wrote. Repeat for each share.", show_default=False),
]
Save = Annotated[
    Path | None, typer.Option(help="A JSON file to write the result to, for --merge.", show_default=False)
]
Measured = Annotated[
    str | None,
    typer.Argument(help="An .mlpackage, .mlmodel or .mlmodelc; none with --merge.", show_default=False),
]


def ranges(
    model: Measured = None,
    inputs: Inputs = None,
    chip: Annotated[str | None, typer.Option(help='The chip whose arithmetic counts, as "M1".')] = None,
    shard: Share = None,
    merge: Parts = None,
    save: Save = None,
    function: Function = None,
    member: Member = None,
    jobs: Jobs = 1,
    scheduler: Scheduler = None,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the range of every op. Exit code 1 if a value overflows fp16 or the Neural Engine."""
    load_engine(quiet)
    if model is not None and is_folder(model):
        asked = {"--inputs": inputs, "--shard": shard, "--merge": merge, "--save": save}
        asked |= {"--function": function, "--member": member}
        _ranges_folder(model, asked, chip, seed, (jobs, scheduler), as_json, quiet)
        return
    from anesurgery.checking.ranges import Ranges
    from anesurgery.checking.ranges import ranges as certify
    from anesurgery.files import arrays
    from anesurgery.show import surgeries

    if (parts := _parts(model, merge, Ranges)) is not None:
        observed = parts[0].merge(*parts[1:])
    else:
        with waiting("running the model in three arithmetics", quiet):
            options: dict[str, Any] = {"function": function, "member": member, "shard": shard, "seed": seed}
            options |= {"jobs": jobs, "scheduler": scheduler}
            observed = certify(model, arrays.read_all(inputs), chip=chip, **options)
    _save(observed, save)
    fix = command("certify", model) if observed.ok else command("fix", model, "safe_numbers")
    then = fix if model else ""
    wrote = [save] if save is not None else []
    group = surgeries.ranges_group(observed)
    show(observed.to_json(), group, as_json, quiet, wrote, then=then)
    if not observed.ok:
        raise typer.Exit(1)


def _ranges_folder(
    model: str,
    asked: dict[str, Any],
    chip: str | None,
    seed: int,
    where: tuple[int, Any],
    as_json: bool,
    quiet: bool,
) -> None:
    """The ranges of each model in a folder; exit code 1 where one is not sound, or was refused."""
    from anesurgery.placement.folders import ranges_folder
    from anesurgery.show.folder_table import folder_group

    refuse_for_folders(asked)
    with progress("models", quiet or as_json) as bar:
        folder = ranges_folder(model, chip=chip, seed=seed, jobs=where[0], scheduler=where[1], progress=bar)
    then = first_of(folder, "ranges", model, lambda one: not getattr(one, "ok", False))
    show(folder.to_json(), folder_group(folder), as_json, quiet, then=then)
    if not all(getattr(one, "ok", False) for one in folder.models.values()):
        raise typer.Exit(1)


def certify(
    model: Model,
    inputs: Inputs = None,
    target: Aim = None,
    gate: Annotated[float, typer.Option(help="The least PSNR of each output, in dB.")] = 40.0,
    search: Annotated[int, typer.Option(min=0, help="Number of further inputs to try, to find bad ones.")] = 0,
    steps: Annotated[
        int, typer.Option(min=1, help="Number of calls in a row, with outputs fed back to inputs.")
    ] = 1,
    feedback: Annotated[
        list[str] | None, typer.Option(help="OUTPUT=INPUT to feed back. Default: found by name.")
    ] = None,
    worst: Annotated[
        Path | None, typer.Option(help="An .npz file to write the worst inputs to.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the ops coloured by error.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Let --html and --worst replace files.")] = False,
    engine: Annotated[
        str, typer.Option(help="coreai: Apple's Core AI runtime must give the same outputs too.")
    ] = INTERPRETER,
    function: Function = None,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check op by op whether a model keeps its numbers in fp16 and on the engine. If not, exit code 1."""
    load_engine(quiet)
    from anesurgery.files import arrays
    from anesurgery.placement.certifying import certify as certified
    from anesurgery.show.certificates import certificate_group

    check_page(html, overwrite)
    check_page(worst, overwrite)
    with waiting("running the model in each arithmetic", quiet):
        samples = arrays.read_all(inputs)
        certificate = certified(
            model,
            samples,
            target=target,
            function=function,
            gate=gate,
            search=search,
            steps=steps,
            feedback=_pairs(feedback),
            engine=engine,
            seed=seed,
        )
    if html is not None:
        certificate.save_html(html)
    if worst is not None:
        arrays.write(worst.expanduser(), certificate.worst_inputs, overwrite)
    wrote = [path for path in (html, worst) if path is not None]
    then, more = command("fix", model, "safe_numbers", target=target), ""
    if certificate.ok:
        then, more = picture(model, target), f"On a Mac, time it: {command('measure', model)}"
    show(certificate.to_json(), certificate_group(certificate), as_json, quiet, wrote, then=then, more=more)
    if not certificate.ok:
        raise typer.Exit(1)


def _pairs(feedback: list[str] | None) -> dict[str, str] | None:
    """Output -> input, from OUTPUT=INPUT.

    Raises:
        SurgeryError: there is no "=" in one.
    """
    from anesurgery.errors import SurgeryError

    if any("=" not in one for one in feedback or ()):
        raise SurgeryError(f"--feedback {' '.join(feedback or ())}: write it as OUTPUT=INPUT")
    return dict(one.split("=", 1) for one in feedback) if feedback else None


def sensitivity(
    model: Measured = None,
    inputs: Inputs = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            help="palettize-4, linear-8, linear-4-block-32, prune-50, ...; repeat.", show_default=False
        ),
    ] = None,
    bits: Annotated[
        float | None, typer.Option(help="Propose modes with this many bits on average.", show_default=False)
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(help="Propose modes for this size of all weights, as 20MB.", show_default=False),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Propose the smallest modes with at most this KL divergence.", show_default=False),
    ] = None,
    min_psnr: Annotated[
        float | None,
        typer.Option(help="Propose the smallest modes with at least this PSNR.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The compressed .mlpackage to write.", show_default=False)
    ] = None,
    smallest: Annotated[
        int, typer.Option(min=0, help="Leave weights with up to this many elements alone.")
    ] = 2048,
    shard: Share = None,
    merge: Parts = None,
    save: Save = None,
    jobs: Jobs = 1,
    scheduler: Scheduler = None,
    function: Function = None,
    seed: Seed = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace the --out package if it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what compressing each weight costs at the outputs, and propose bits for each weight."""
    load_engine(quiet)
    from anesurgery.compressing.sensitivity import MODES, Sensitivity
    from anesurgery.compressing.sensitivity import sensitivity as measure
    from anesurgery.files import arrays
    from anesurgery.show import weight_costs

    goals = {"bits": bits, "max_bytes": max_size, "max_kl": max_kl, "min_psnr": min_psnr}
    goals = {name: goal for name, goal in goals.items() if goal is not None}
    check_out(out, goals, model, overwrite)
    if (parts := _parts(None if merge and out else model, merge, Sensitivity)) is not None:
        costs = parts[0].merge(*parts[1:])
    else:
        options: dict[str, Any] = {
            "function": function,
            "shard": shard,
            "jobs": jobs,
            "scheduler": scheduler,
            "seed": seed,
            "smallest": smallest,
        }
        with progress("weights", quiet or as_json) as bar:
            costs = measure(model, arrays.read_all(inputs), tuple(mode or MODES), progress=bar, **options)
    _save(costs, save)
    proposal = costs.propose(**goals) if goals else None
    if out is not None and proposal is not None:
        with waiting("compressing with coremltools", quiet):
            write(proposal.apply(model), out, overwrite, model)
    shown = [weight_costs.sensitivity_group(costs)]
    shown += [] if proposal is None else [weight_costs.proposal_group(proposal)]
    from rich.console import Group

    wrote = [path for path in (save, out) if path is not None]
    then = command("see", out) if out is not None else command("compress", model, "--bits", 4) if model else ""
    show(weight_costs.result_json(costs, proposal), Group(*shown), as_json, quiet, wrote, then=then)


def check_out(out: Path | None, goals: dict[str, Any], model: str | None, overwrite: bool) -> None:
    """See that a compressed model may be written, before anything is measured.

    Raises:
        SurgeryError: it may not, or there is nothing to write.
    """
    from anesurgery.errors import SurgeryError
    from anesurgery.files.writing import check_target

    if out is None:
        return
    if not goals or model is None:
        raise SurgeryError("--out needs the model and a goal: --bits, --max-size, --max-kl or --min-psnr")
    check_target(Path(model).expanduser(), out.expanduser().absolute(), overwrite)


def write(model: Any, out: Path, overwrite: bool, source: str | None) -> None:
    """Write what coremltools made, atomically."""
    from anesurgery.files.writing import write_atomically

    write_atomically(out.expanduser().absolute(), lambda place: model.save(str(place)), overwrite)


def _parts(model: str | None, merge: list[Path] | None, kind: Any) -> list[Any] | None:
    """The shares to merge; None where a model is to be measured."""
    from anesurgery.errors import SurgeryError

    if (model is None) == (not merge):
        raise SurgeryError("give a model to measure, or the results of its shares by --merge")
    return [kind.from_json(_json(path)) for path in merge] if merge else None


def _save(result: Any, path: Path | None) -> None:
    """Write a result, so that it can be merged; infinities are words."""
    from anesurgery.display import finite
    from anesurgery.files.arrays import write_text

    if path is not None:
        write_text(path, json.dumps(finite(result.to_json()), indent=2, allow_nan=False))


def _json(path: Path) -> Any:
    from anesurgery.errors import SurgeryError
    from anesurgery.files.source import read_text

    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise SurgeryError(f"{path} cannot be read as JSON: {error}") from error

"""Commands about models of Core AI: `to-coreai`, `to-coreml` and `lint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Aim, Json, Model, OldOut, Out, Quiet, existing, one_place, show
from anesurgery.commands.waiting import load_engine, waiting

Asset = Annotated[
    str, typer.Argument(metavar="AIMODEL", help="An .aimodel folder.", show_default=False, callback=existing)
]


def to_coreml(
    model: Asset,
    positional_out: OldOut = None,
    out: Out = None,
    ios: Annotated[
        int | None, typer.Option(help="First release of iOS that must run it: 15 to 18; the oldest that can.")
    ] = None,
    longest: Annotated[
        int, typer.Option(min=1, help="Largest size of axes that the model leaves open.")
    ] = 2048,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the .mlpackage that devices without Core AI run (iOS 15 to 26)."""
    target = one_place(out, positional_out, f"{Path(model).stem}.mlpackage")
    load_engine(quiet)
    from anesurgery.coreai.fallback import to_coreml as write

    with waiting("reading the model", quiet):
        written = write(model, target, ios=ios, longest=longest, overwrite=overwrite)
    show(written.to_json(), str(written), as_json, quiet, [target], then=command("see", target))


def to_coreai(
    model: Model,
    positional_out: OldOut = None,
    out: Out = None,
    mode: Annotated[
        str,
        typer.Option(help="ship, for Apple's devices, or check: all in fp32, for Apple's runtime on Linux."),
    ] = "ship",
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write the .aimodel of a model: Core AI, Apple's format since iOS and macOS 27."""
    target = one_place(out, positional_out, f"{Path(model).stem}.aimodel")
    load_engine(quiet)
    from anesurgery.coreai.translating import to_coreai as write

    with waiting("translating", quiet):
        written = write(model, target, mode=mode, overwrite=overwrite)
    show(written.to_json(), str(written), as_json, quiet, [target], then=command("lint", target))


def lint(model: Asset, target: Aim = None, as_json: Json = False, quiet: Quiet = False) -> None:
    """List known faults of Core AI in a model, with the repair. Exit code 1 if there is one."""
    load_engine(quiet)
    from anesurgery.coreai.rules import lint as linted

    with waiting("reading the model", quiet):
        found = linted(model, target)
    repairs = list(dict.fromkeys(finding.remedy for finding in found.findings if finding.remedy))
    words = ("fix", model, ",".join(repairs)) if repairs else ("see", model)
    show(found.to_json(), str(found), as_json, quiet, then=command(*words, target=target))
    if not found.ok:
        raise typer.Exit(1)

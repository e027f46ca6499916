"""Commands from one format to another: `to-coreml`, `to-coreai`, `decompile`, `executorch`; and `lint`."""

from __future__ import annotations

from typing import Annotated

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Model, existing
from anesurgery.commands.subcommand import Call, MaybePlace, Outcome, Place, subcommand

Asset = Annotated[str, typer.Argument(metavar="AIMODEL", help="An .aimodel folder.", callback=existing)]


@subcommand("coreai.reading:to_coreml", waits="reading the model")
def to_coreml(call: Call, model: Asset, out: Place) -> Outcome:
    """Convert an .aimodel to an .mlpackage for devices without Core AI (iOS 15 to 26)."""
    return Outcome(call(model, out), wrote=[out], then=command("see", out))


@subcommand("coreai.translating:to_coreai", waits="translating")
def to_coreai(call: Call, model: Model, out: Place) -> Outcome:
    """Convert a model to Core AI (.aimodel), Apple's new format in iOS 27 and macOS 27."""
    return Outcome(call(model, out), wrote=[out], then=command("lint", out))


@subcommand("coreai.rules:lint", waits="reading the model")
def lint(call: Call, model: Asset) -> Outcome:
    """List known problems of Core AI in a model, with the repair. Exit code 1 if there is one."""
    found = call(model)
    repairs = list(dict.fromkeys(finding.remedy for finding in found.findings if finding.remedy))
    words = ("fix", model, ",".join(repairs)) if repairs else ("see", model)
    return Outcome(found, then=command(*words, target=call["target"]), code=int(not found.ok))


@subcommand("files.package:decompile", waits="decompiling")
def decompile(
    call: Call,
    source: Annotated[str, typer.Argument(metavar="MODELC", help="An .mlmodelc folder.")],
    out: Place,
) -> Outcome:
    """Turn a compiled ML Program (.mlmodelc) back into a package."""
    written = call(source, out)
    plain = {"path": str(written.path), "notes": list(written.notes)}
    return Outcome(plain, shown=str(written), then=command("see", out))


@subcommand("files.executorch_program:executorch")
def executorch(
    call: Call,
    source: Annotated[str, typer.Argument(metavar="PTE", help="A .pte file.")],
    out: MaybePlace = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> Outcome:
    """List the Core ML parts of an ExecuTorch program (.pte); with --out, write them into a folder."""
    program = call(source)
    lines, record = str(program), program.to_json()
    if out is None:
        return Outcome(record, shown=lines, then=command("executorch", source, "--out", "models"))
    models = [str(path) for path in program.extract(out, overwrite=overwrite)]
    return Outcome(record | {"models": models}, shown=lines, wrote=models, then=command("see", *models[:1]))

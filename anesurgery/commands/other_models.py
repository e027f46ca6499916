"""Commands that make other models of one: at several sizes, in chunks, or in another format.

These are `sizes`, `choose-sizes`, `split`, `merge` and `extract`, then `to-coreml`, `to-coreai`, `decompile`,
`executorch`. `lint` looks at what `to-coreai` makes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Model, Overwrite, existing
from anesurgery.commands.subcommand import Call, MaybePlace, Outcome, Place, subcommand
from anesurgery.commands.waiting import waiting
from anesurgery.display import counted, drawn
from anesurgery.errors import SurgeryError

Asset = Annotated[str, typer.Argument(metavar="AIMODEL", help="An .aimodel folder.", callback=existing)]
Out = Annotated[str, typer.Option("--out", "-o", help="The .mlpackage to write.")]
SHAPE = "With --at: the shape that a custom layer makes. Repeat for more."
Shape = Annotated[list[str] | None, typer.Option(metavar="BLOB=CxHxW", help=SHAPE)]
Models = Annotated[list[str], typer.Argument(metavar="NAME=MODEL...", help="Functions and their models.")]
Name = Annotated[str, typer.Argument(help="The function.")]


@subcommand("splitting.split:split", waits="cutting", engine=False, names={"max_bytes": "max_size"})
def split(call: Call, model: Model, out: Place, shape: Shape = None, overwrite: Overwrite = False) -> Outcome:
    """Cut a model into chunks that run one after the other: a folder of packages, or an .mlpackage with all."""
    if [call["parts"], call["max_bytes"], call["at"]].count(None) != 2:
        raise SurgeryError("give either --parts N or --max-size 950MB or --at unsupported")
    chain = call(model, shapes=dict(map(read_shape, shape or ())))
    path = chain.save(out, overwrite=overwrite)
    plain, then = {"path": str(path), **drawn(chain, "json")}, command("see", out, target=call["target"])
    return Outcome(plain, shown=chain, wrote=[out], then=then)


def read_shape(text: str, *, has_length: bool = False) -> tuple[str, tuple[int | None, ...]]:
    """Read the name and the shape in "name=3x224x224"; if it `has_length`, in "ids=1xN", with None for N.

    Raises:
        SurgeryError: it is no name with a shape, or only one of the text and `has_length` has an N.
    """
    name, _, shape = text.rpartition("=")
    axes = shape.split("x")
    if not name or ("N" in axes) != has_length or not all(n == "N" or (n.isdigit() and int(n)) for n in axes):
        with_length = "is not INPUT=1xN, with N in the place of the length"
        fixed = "is no name with a shape; write it as input_ids=1x128"
        raise SurgeryError(f"{text!r} {with_length if has_length else fixed}")
    return name, tuple(None if n == "N" else int(n) for n in axes)


@subcommand("splitting.merge:merge", waits="merging", engine=False)
def merge(call: Call, models: Models, out: Out) -> Outcome:
    """Write one package with several models as functions that share equal weights."""
    pairs = [pair.partition("=") for pair in models]
    if wrong := [name for name, sign, path in pairs if not (name and sign and path)]:
        raise SurgeryError(f"{wrong[0]!r} is not NAME=MODEL, as prefill=prefill.mlpackage")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise SurgeryError("two models have the same name; each function needs its own")
    path = call({name: path for name, _, path in pairs}, out)
    words = f"{counted(len(pairs), 'function')}: {', '.join(name for name, _, _ in pairs)}"
    return Outcome({"path": str(path)}, shown=words, wrote=[out], then=command("see", out))


@subcommand("splitting.merge:extract", waits="extracting")
def extract(call: Call, model: Model, function: Name, out: Place) -> Outcome:
    """Write a package with one function of a model."""
    path = call(model, function, out)
    return Outcome({"path": str(path)}, shown="", wrote=[out], then=command("see", out))


Lengths = Annotated[Path, typer.Argument(help="A text file: a length on each line, or a length and how often.")]
Count = Annotated[int, typer.Option("--count", "-k", help="The most sizes to choose.")]
FlexibleModel = Annotated[
    str | None, typer.Option(help="A model with dynamic shapes. Its expected time decides.")
]
OpenShapes = Annotated[
    str | None, typer.Option(metavar="INPUT=1xN,...", help="The shapes of its inputs at the length N.")
]
Chip = Annotated[str | None, typer.Option(help="The chip and OS for the expected time.")]
Plot = Annotated[
    Path | None, typer.Option(help="Write a plot: .png, .svg or .pdf. An existing file is replaced.")
]
Shapes = Annotated[
    list[str], typer.Option(metavar="INPUT=1x64,...", help="The shapes of the inputs at a size; repeat.")
]


@subcommand("splitting.size_choice:choose_sizes", engine=False)
def choose_sizes(
    call: Call,
    lengths: Lengths,
    count: Count = 4,
    model: FlexibleModel = None,
    size: OpenShapes = None,
    target: Chip = None,
    plot: Plot = None,
) -> Outcome:
    """Choose the sizes with the least padding, or the least time, for a sample of lengths."""
    if len({model is None, size is None, target is None}) > 1:
        raise SurgeryError("--model, --size and --target go together, as --size ids=1xN --target 'M4/macOS 15'")
    from anesurgery.files.plot_files import check_plot

    if plot is not None:
        check_plot(plot)
    time, then = None, ""
    if model is not None and size is not None:
        shapes = dict(read_shape(shape, has_length=True) for shape in size.split(","))
        time = call.of("shipping.several_sizes:size_times", "estimating times")(model, shapes, lengths, target)
    choice = call(lengths, count, time=time)
    if plot is not None:
        choice.save_plot(plot)
    if model is not None and size is not None:
        then = _sizes_command(model, size, choice.best.sizes)
    return Outcome(choice, wrote=[plot], then=then)


def _sizes_command(model: str, size: str, lengths: Sequence[int]) -> str:
    """Return the command that makes a model at the chosen lengths."""
    each = [("--size", re.sub(r"(?<=[=x])N(?=x|,|$)", str(length), size)) for length in lengths]
    return command(
        "sizes", model, *(word for pair in each for word in pair), "--out", f"{Path(model).stem}_sizes"
    )


@subcommand("shipping.several_sizes:sizes", waits="making the sizes", engine=False)
def sizes(call: Call, model: Model, out: Place, size: Shapes, overwrite: Overwrite = False) -> Outcome:
    """Make a model at several fixed sizes that share their weights."""
    each = [dict(map(read_shape, text.split(","))) for text in size]
    if any(shapes.keys() != each[0].keys() for shapes in each):
        raise SurgeryError("each --size needs the same inputs, as --size ids=1x64,mask=1x64")
    sized = call(model, {name: [shapes[name] for shapes in each] for name in each[0]})
    with waiting("saving", call.silent):
        path = sized.save(out, overwrite=overwrite)
    rows = [row.to_json() for row in sized.rows]
    return Outcome({"path": str(path), "sizes": rows}, shown=str(sized), wrote=[out], then=command("see", out))


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

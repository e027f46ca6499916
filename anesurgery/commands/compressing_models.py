"""`anesurgery compress`: each weight in the form that the target runs fast, corrected by samples.

`anesurgery compress-cache`: the keys and values of a decoder in 8 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import beside, command
from anesurgery.commands.options import (
    Aim,
    Function,
    Jobs,
    Json,
    Model,
    OldOut,
    Out,
    Quiet,
    Scheduler,
    check_page,
    one_place,
    show,
)
from anesurgery.commands.waiting import load_engine, progress
from anesurgery.errors import SurgeryError


def compress(
    model: Model,
    inputs: Annotated[
        list[Path] | None,
        typer.Option(
            help="An .npz file of arrays by input name, one sample, or a folder of them; repeat for more. "
            "Random inputs when absent, which correct little."
        ),
    ] = None,
    positional_out: OldOut = None,
    out: Out = None,
    bits: Annotated[float, typer.Option(help="Bits of each number: 1, 2, 3, 4, 6 or 8.")] = 4,
    forms: Annotated[
        list[str] | None,
        typer.Option(
            "--form", help="A form in place of bits, such as sparse-50-palette4. Repeat for a choice."
        ),
    ] = None,
    mixed: Annotated[
        bool | None, typer.Option(help="Give each weight its own bits, measured at the outputs. Slow.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(
            help="The most bytes of all weights, such as '300 MB'. Each weight gets its own form.",
            show_default=False,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(help="With --bits 8: inputs of linear and conv in 8 bits too (percentile, kl or max)."),
    ] = None,
    balance: Annotated[
        bool | None,
        typer.Option(help="Move scales between channels so that weights round better (AWQ, SmoothQuant)."),
    ] = None,
    target: Aim = None,
    for_: Annotated[
        str, typer.Option("--for", help="speed skips forms that were measured slower than fp16; or size.")
    ] = "speed",
    smallest: Annotated[
        int, typer.Option(min=0, help="Leave weights with up to this many elements alone.")
    ] = 2048,
    function: Function = None,
    work: Annotated[
        Path | None,
        typer.Option(help="A folder for finished weights. A run that was stopped goes on from there."),
    ] = None,
    jobs: Jobs = 1,
    scheduler: Scheduler = None,
    html: Annotated[Path | None, typer.Option(help="A page to write.", show_default=False)] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a plot of size against loss: .png, .svg or .pdf.", show_default=False),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="A mode of coremltools to measure too, as palettize-4. Repeat for more.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT, --html and --plot if they exist.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compress the weights of a model in forms that the chip runs fast, corrected by samples (GPTQ)."""
    place = one_place(out, positional_out, beside(model, stem="small"))
    load_engine(quiet)
    from anesurgery.compressing.compression import compress as compressed
    from anesurgery.compressing.peers import USUAL
    from anesurgery.files import arrays
    from anesurgery.files.plot_files import check_plot
    from anesurgery.rewriting.ml_program import check_out
    from anesurgery.show import compressions

    check_out(model, place, overwrite)
    check_page(html, overwrite)
    check_page(plot, overwrite)
    if plot is not None:
        check_plot(plot)
    samples: list[Any] = arrays.read_all(inputs) or _drawn(model, function)
    options: dict[str, Any] = {
        "target": target,
        "for_": for_,
        "smallest": smallest,
        "function": function,
        "mixed": mixed,
        "forms": forms or None,
        "max_bytes": max_size,
        "activations": activations,
        "balance": balance,
        "work": work,
        "jobs": jobs,
        "scheduler": scheduler,
        "against": tuple(against if against is not None else USUAL if plot is not None else ()),
    }
    with progress("weights", quiet or as_json) as bar:
        compression = compressed(model, bits, inputs=samples, progress=bar, **options)
    compression.save(place, overwrite=overwrite)
    if html is not None:
        compression.save_html(html)
    if plot is not None:
        compression.save_plot(plot)
    wrote = [path for path in (place, html, plot) if path is not None]
    shown = compressions.compression_group(compression)
    show(compression.to_json(), shown, as_json, quiet, wrote, then=command("compare", model, place))


DRAWN = 16
"""Random samples for whoever gave none; a quarter of them is held out."""


def _drawn(model: str, function: str | None) -> list[Any]:
    """Random inputs, with a warning that says how to give real ones."""
    from anesurgery.errors import warn
    from anesurgery.interpret import Predictor

    predictor = Predictor(model, function=function)
    samples = [predictor.sample(seed) for seed in range(DRAWN)]
    names = ", ".join(f"{name}=..." for name in samples[0])
    warn(
        f"no --inputs: weights are corrected by {DRAWN} random samples, which say little about real ones; "
        f"save real ones, each with np.savez('1.npz', {names}), and give their folder as --inputs"
    )
    return samples


def compress_cache(
    model: Model,
    texts: Annotated[
        Path,
        typer.Option(
            help="A file with some dozens of texts, one on each line, as tokens: 3,14,15.", show_default=False
        ),
    ],
    out: Out = None,
    scales: Annotated[
        str | None,
        typer.Option(
            help="One scale for each head or each channel. Default: the better one.", show_default=False
        ),
    ] = None,
    target: Aim = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it exists.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Keep the keys and values of a decoder in 8 bits, if they are inputs and outputs (iOS 26)."""
    place = one_place(out, None, beside(model, stem="small"))
    tokens = _texts(texts)
    load_engine(quiet)
    from anesurgery.compressing.cache_codes import compress_cache as compressed
    from anesurgery.rewriting.ml_program import check_out

    check_out(model, place, overwrite)
    cache = compressed(model, tokens, scales=scales, target=target)
    cache.save(place, overwrite=overwrite)
    show(cache.to_json(), str(cache), as_json, quiet, [place], then=command("see", place, target=target))


def _texts(file: Path) -> list[list[int]]:
    """The tokens of each line of a file.

    Raises:
        SurgeryError: it cannot be read, or a line holds something else.
    """
    try:
        lines = file.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SurgeryError(f"--texts {file} cannot be read: {error}") from error
    texts: list[list[int]] = []
    for number, line in enumerate(lines, 1):
        try:
            texts += [[int(word) for word in line.split(",")]] if line.strip() else []
        except ValueError:
            raise SurgeryError(
                f"--texts {file}, line {number}: write the tokens of a text as 3,14,15"
            ) from None
    return texts

"""`anesurgery compress`: each weight in the form that the target runs fast, corrected by samples.

`anesurgery compress-cache`: the keys and values of a decoder in 8 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import command as next_command
from anesurgery.commands.options import Html, Model, Overwrite, check_pages
from anesurgery.commands.subcommand import Call, Outcome, Place, subcommand
from anesurgery.errors import SurgeryError

Samples = Annotated[
    list[Path] | None,
    typer.Option(
        help="An .npz file of arrays by input name, one sample, or a folder of them; repeat for more. "
        "Random inputs when absent, which correct little."
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Write a plot of size against loss: .png, .svg or .pdf.")]
Against = Annotated[
    list[str] | None,
    typer.Option(help="A mode of coremltools to measure too, as palettize-4. Repeat for more."),
]
Texts = Annotated[
    Path, typer.Option(help="A file with a few dozen texts, one on each line, as token ids: 3,14,15.")
]


@subcommand(
    "compressing.compression:compress",
    waits="weights",
    screen=True,
    names={"forms": "form", "max_bytes": "max_size"},
)
def compress(
    call: Call,
    model: Model,
    out: Place,
    inputs: Samples = None,
    html: Html = None,
    plot: Plot = None,
    against: Against = None,
    overwrite: Overwrite = False,
) -> Outcome:
    """Compress the weights of a model in formats that are fast on the chip, with samples (GPTQ)."""
    from anesurgery.compressing.compression import USUAL_MODES
    from anesurgery.files.plot_files import check_plot
    from anesurgery.rewriting.ml_program import check_out

    check_out(model, out, overwrite)
    check_pages(overwrite, html, plot)
    if plot is not None:
        check_plot(plot)
    modes = tuple(against or ())
    if against is None and plot is not None:
        modes = USUAL_MODES
    samples = inputs or _drawn(model, call["function"])
    compression = call(model, inputs=samples, against=modes)
    if not inputs and not call.silent:  # no earlier: a wrong option ends the call
        _warn_of_random(samples[0])
    compression.save(out, overwrite=overwrite)
    if html is not None:
        compression.save_html(html)
    if plot is not None:
        compression.save_plot(plot)
    return Outcome(compression, wrote=[out, html, plot], then=next_command("compare", model, out))


DRAWN = 16
"""Random samples for whoever gave none; a quarter of them is held out."""


def _drawn(model: str, function: str | None) -> list[Any]:
    """Draw random inputs."""
    from anesurgery.interpret import Predictor

    predictor = Predictor(model, function=function)
    return [predictor.sample(seed) for seed in range(DRAWN)]


def _warn_of_random(sample: Any) -> None:
    """Warn that samples were drawn, with how to give real ones."""
    from anesurgery.errors import warn

    names = ", ".join(f"{name}=..." for name in sample)
    warn(
        f"no --inputs: weights are corrected by {DRAWN} random samples, which say little about real ones; "
        f"save real ones, each with np.savez('1.npz', {names}), and give their folder as --inputs"
    )


@subcommand("compressing.cache_codes:compress_cache")
def compress_cache(call: Call, model: Model, texts: Texts, out: Place, overwrite: Overwrite = False) -> Outcome:
    """Store the cache of a language model in 8 bits, if it is an input and an output (iOS 26)."""
    from anesurgery.rewriting.ml_program import check_out

    tokens = _texts(texts)
    check_out(model, out, overwrite)
    cache = call(model, tokens)
    cache.save(out, overwrite=overwrite)
    return Outcome(cache, wrote=[out], then=next_command("see", out, target=call["target"]))


def _texts(file: Path) -> list[list[int]]:
    """Read the tokens of each line of a file.

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

"""`anesurgery build` and `anesurgery chat`: from a checkpoint to a folder that writes, and to its answers."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Aim, Json, OldOut, Out, Quiet, Seed, one_place, show
from anesurgery.commands.waiting import load_engine, waiting


def build(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="HF_FOLDER", help="A checkpoint: config, safetensors, tokenizer.", show_default=False
        ),
    ],
    positional_out: OldOut = None,
    out: Out = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2, help="The most tokens of prompt and answer. Default: 2048, or the model's own limit."
        ),
    ] = None,
    target: Aim = None,
    bits: Annotated[int | None, typer.Option(help="4 or 8 bits for each weight. Default: fp16.")] = None,
    limit: Annotated[str | None, typer.Option(help='The most weights of a chunk, as "900 MB".')] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Number of prompt tokens that are read at once.")] = 64,
    cache: Annotated[
        str, typer.Option(help="Where keys and values are kept: state or io (inputs and outputs).")
    ] = "state",
    smaller: Annotated[
        list[int] | None,
        typer.Option("--smaller", min=2, help="Add functions for this smaller context. Repeat for more."),
    ] = None,
    shorter: Annotated[
        list[int] | None,
        typer.Option("--shorter", min=2, help="Add functions for this shorter prefill. Repeat for more."),
    ] = None,
    width: Annotated[
        int, typer.Option(min=1, help="Number of tokens that a step reads. The last one is new.")
    ] = 1,
    head: Annotated[
        str, typer.Option(help="logits, or argmax: the likeliest token of each part of the vocabulary.")
    ] = "logits",
    samples: Annotated[
        Path | None,
        typer.Option(help="With --bits: a text that corrects the rounding of weights.", show_default=False),
    ] = None,
    format: Annotated[str, typer.Option(help="coreml, coreai (iOS 27) or both, compared.")] = "coreml",
    overwrite: Annotated[bool, typer.Option(help="Replace a finished build.")] = False,
    ask: Annotated[
        str | None, typer.Option("--chat", help="Then answer this prompt, as chat does.", show_default=False)
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn a Hugging Face checkpoint into a folder that writes text. A stopped build goes on."""
    place = one_place(out, positional_out, f"{Path(folder).name}_built")
    load_engine(quiet)
    from anesurgery.shipping.building import build as make

    with waiting("building", quiet or as_json):
        built = make(
            folder,
            place,
            context=context,
            target=target,
            bits=bits,
            limit=limit,
            prefill=prefill,
            cache=cache,
            contexts=smaller or (),
            shorter=shorter or (),
            width=width,
            head=head,
            samples=samples,
            format=format,
            overwrite=overwrite,
            quiet=True,
        )
    then = "" if ask is not None else command("chat", place, "hello")
    show(built.to_json(), str(built), as_json, quiet, [place], then=then)
    if ask is not None:
        _answer(place, ask)


def chat(
    folder: Annotated[Path, typer.Argument(help="A folder that build made.", show_default=False)],
    prompt: Annotated[str, typer.Argument(help="The prompt.", show_default=False)],
    steps: Annotated[int | None, typer.Option(min=1, help="The most tokens to write.")] = None,
    template: Annotated[bool | None, typer.Option(help="Use the chat template, if there is one.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 always picks the likeliest token.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from this many tokens. 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from this share of the probability.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="The least probability of a token, relative to the likeliest.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Values above 1 give fewer repetitions.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text. Repeat for more.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, fp16 or ane.")] = "fp32",
    drop: Annotated[
        int | None, typer.Option(help="When the context is full, forget this many of the oldest tokens.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="Of a folder that holds both: coreml or coreai.")] = None,
    seed: Seed = 0,
    quiet: Quiet = False,
) -> None:
    """Chat with a model that build made. Default sampling: that of its checkpoint."""
    load_engine(quiet)
    own = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    chosen = {name: value for name, value in own.items() if value is not None}
    options = {"steps": steps, "template": template, "stop": stop, "precision": precision}
    options |= {"drop": drop, "format": format}
    _answer(folder, prompt, chosen, seed=seed, **options)


def _answer(folder: Path, prompt: str, chosen: Mapping[str, Any] | None = None, **options: Any) -> None:
    """Print what a model that was built answers, as it writes.

    Args:
        folder: that was built.
        prompt: what to say.
        chosen: options of sampling, in place of those of the checkpoint.
        options: others of `chat`.
    """
    from anesurgery.files.runner_file import read_runner
    from anesurgery.interpret.sampler import Sampler
    from anesurgery.shipping.chatting import chat as talk

    sampler = Sampler(**{**read_runner(folder).sampling, **(chosen or {})})
    for piece in talk(folder, prompt, sampler=sampler, **options):
        print(piece, end="", flush=True)
    print()


def swift(
    folder: Annotated[
        Path,
        typer.Argument(help="A folder that build or sizes made, or a package of arrays.", show_default=False),
    ],
    to: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    overwrite: Annotated[bool, typer.Option(help="Replace what is there.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a Swift package that runs a built model, a model of several sizes, or a plain one."""
    load_engine(quiet)
    from anesurgery.shipping.swift_package import swift as write

    place = write(folder, to, overwrite=overwrite)
    then = f"cd {shlex.quote(str(to))} && swift build"
    show({"package": str(place)}, "", as_json, quiet, [to], then=then)

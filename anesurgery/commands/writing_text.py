"""`anesurgery build`, `chat`, `swift` and `generate`: from a checkpoint to a folder that writes text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery.commands.next_steps import command, to_certify
from anesurgery.commands.options import Model
from anesurgery.commands.subcommand import Call, Outcome, Place, subcommand
from anesurgery.errors import SurgeryError

Checkpoint = Annotated[
    Path, typer.Argument(metavar="HF_FOLDER", help="A checkpoint: config, safetensors, tokenizer.")
]
Ask = Annotated[str | None, typer.Option("--chat", help="Then answer this prompt, as chat does.")]
Built = Annotated[Path, typer.Argument(help="A folder that build made.")]
Shipped = Annotated[Path, typer.Argument(help="A folder that build or sizes made, or a package of arrays.")]
Prompt = Annotated[str, typer.Argument(help="The prompt.")]
Tokens = Annotated[str, typer.Option(help="The ids of the first tokens, such as 3,14,15.")]
Steps = Annotated[int, typer.Option(min=1, help="How many tokens to write.")]
TEMPERATURE = typer.Option(min=0, help="0 always picks the likeliest token.")
TOP_K = typer.Option(min=0, help="Sample from this many tokens. 0: all.")
TOP_P = typer.Option(min=0, max=1, help="Sample from this share of the probability.")
MinP = Annotated[
    float | None, typer.Option(help="The least probability of a token, relative to the likeliest.")
]
Penalty = Annotated[float | None, typer.Option(help="Values above 1 give fewer repetitions.")]
"""Options of sampling; `chat` takes those of the checkpoint by default."""


@subcommand("shipping.building:build", waits="building", names={"contexts": "smaller"})
def build(call: Call, folder: Checkpoint, out: Place, ask: Ask = None) -> Outcome:
    """Turn a Hugging Face checkpoint into a model with a cache. An interrupted build resumes."""
    built = call(folder, out, quiet=True)
    if ask is None:
        return Outcome(built, wrote=[out], then=command("chat", out, "hello"))
    answer = partial(_answer, call.of("shipping.chatting:chat"), out, ask, {})
    return Outcome(built, wrote=[out], then="", after=answer)


@subcommand("shipping.chatting:chat", json=False)
def chat(
    call: Call,
    folder: Built,
    prompt: Prompt,
    temperature: Annotated[float | None, TEMPERATURE] = None,
    top_k: Annotated[int | None, TOP_K] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text. Repeat for more.")] = None,
) -> None:
    """Chat with a model that `build` wrote. It samples as its checkpoint says, by default."""
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampling |= {"repetition_penalty": repetition_penalty}
    _answer(call, folder, prompt, {name: x for name, x in sampling.items() if x is not None}, stop=stop)


def _answer(call: Call, folder: Path, prompt: str, sampling: Mapping[str, Any], **options: Any) -> None:
    """Print what a model that was built answers, as it writes.

    Args:
        call: `chat`.
        folder: that was built.
        prompt: what to say.
        sampling: options of sampling, in place of those of the checkpoint.
        options: others of `chat`.
    """
    from anesurgery.files.runner_file import read_runner
    from anesurgery.interpret.sampler import Sampler

    for piece in call(
        folder, prompt, sampler=Sampler(**{**read_runner(folder).sampling, **sampling}), **options
    ):
        print(piece, end="", flush=True)
    print()


@subcommand("shipping.swift_package:swift")
def swift(
    call: Call,
    folder: Shipped,
    to: Annotated[Path, typer.Option("--out", "-o", "--to", help="The folder to make.")],
) -> Outcome:
    """Write a Swift package that runs a model, or a folder that `build` or `sizes` wrote."""
    package = {"package": str(call(folder, to))}
    return Outcome(package, shown="", wrote=[to], then=f"cd {shlex.quote(str(to))} && swift build")


@subcommand("interpret.decoding:generate")
def generate(
    call: Call,
    model: Model,
    ids: Tokens,
    steps: Steps = 20,
    temperature: Annotated[float, TEMPERATURE] = 0.0,
    top_k: Annotated[int, TOP_K] = 0,
    top_p: Annotated[float, TOP_P] = 1.0,
    stop: Annotated[list[int] | None, typer.Option(help="Stop after this token. Repeat for more.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, fp16 or ane.")] = "fp32",
) -> Outcome:
    """Write text after some tokens with a language model, with or without a cache."""
    try:
        prompt = [int(word) for word in ids.split(",")]
    except ValueError:
        raise SurgeryError(f"--ids {ids!r}: write the tokens as 3,14,15") from None
    from anesurgery.interpret.sampler import Sampler

    sampler = Sampler(temperature, top_k, top_p)
    generation = call(model, prompt, steps, sampler, stop=stop, precision=precision)
    plain = {
        "written": list(generation.written),
        "prefill_seconds": generation.prefill_seconds,
        "tokens_per_second": generation.tokens_per_second,
    }
    shown = f"{' '.join(map(str, generation.written))}\n{generation}"
    return Outcome(plain, shown=shown, then=to_certify(model))

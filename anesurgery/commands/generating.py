"""`anesurgery generate`: let a decoder write."""

from __future__ import annotations

from typing import Annotated

import typer

from anesurgery.commands.next_steps import command
from anesurgery.commands.options import Json, Model, Quiet, Seed, show
from anesurgery.commands.waiting import load_engine
from anesurgery.errors import SurgeryError


def generate(
    model: Model,
    ids: Annotated[str, typer.Option(help="The first tokens, as 3,14,15.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="How many tokens to write.")] = 20,
    temperature: Annotated[float, typer.Option(min=0, help="0 always picks the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many tokens. 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from this share of the probability.")
    ] = 1.0,
    stop: Annotated[list[int] | None, typer.Option(help="Stop after this token. Repeat for more.")] = None,
    precision: Annotated[str, typer.Option(help="fp32, fp16 or ane.")] = "fp32",
    drop: Annotated[
        int | None, typer.Option(help="When the context is full, forget this many of the oldest tokens.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Let a decoder write text after some tokens, with or without a cache."""
    try:
        prompt = [int(word) for word in ids.split(",")]
    except ValueError:
        raise SurgeryError(f"--ids {ids!r}: write the tokens as 3,14,15") from None
    load_engine(quiet)
    from anesurgery.interpret.decoding import generate as write
    from anesurgery.interpret.sampler import Sampler

    sampler = Sampler(temperature, top_k, top_p)
    generation = write(
        model,
        prompt,
        steps,
        sampler,
        stop=stop,
        seed=seed,
        precision=precision,
        drop=drop,
        quiet=quiet or as_json,
    )
    plain = {
        "written": list(generation.written),
        "prefill_seconds": generation.prefill_seconds,
        "tokens_per_second": generation.tokens_per_second,
    }
    shown = f"{' '.join(map(str, generation.written))}\n{generation}"
    show(plain, shown, as_json, quiet, then=command("certify", model))

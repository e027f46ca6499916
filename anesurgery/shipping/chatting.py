"""Talk to a model that was built, on the interpreter: a prompt in, pieces of text out."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from anesurgery.doors import door
from anesurgery.errors import SurgeryError
from anesurgery.files.runner_file import Runner, read_runner
from anesurgery.interpret.decoding import Decoder, stream
from anesurgery.interpret.sampler import Sampler, is_whole
from anesurgery.shipping.prompts import Messages, Text, until

Stop = str | int | Collection[str | int] | None


@door("prompt", "stop", "sampler")
def chat(
    place: str | os.PathLike[str],
    prompt: str | Messages,
    *,
    steps: int | None = None,
    template: bool | None = None,
    sampler: Sampler | None = None,
    stop: Stop = None,
    seed: int = 0,
    precision: str = "fp32",
    drop: int | None = None,
) -> Iterator[str]:
    """What a model answers, piece by piece as it is written.

    Args:
        place: a folder that `anesurgery.build` made.
        prompt: a text, or messages as [{"role": "user", "content": "..."}].
        steps: how many tokens at most; None: to the end of the context, or, with `drop`, to an end token.
        template: is the prompt written as the checkpoint's chat template says? None: where it has one.
        sampler: chooses a token from logits; by default with what the checkpoint samples with.
        stop: texts before which, and tokens after which, to stop, besides the end tokens of the checkpoint.
        seed: of the sampler: a whole number from 0 up.
        precision: the arithmetic of the interpreter: "fp32", "fp16" or "ane".
        drop: how many of the oldest tokens to forget at once, where prompt and answer outgrow the context; what
            is left is read again as a text of its own. None: an error.

    Returns:
        Pieces of text; together they are the answer.

    Raises:
        InterpretError: the prompt does not fit into the context, or an option cannot be what it is.
        LoadError: the folder cannot be read, or its files are not those that were built.
        SurgeryError: there is no chat template and one is asked for, or it fails.
    """
    folder = Path(place).expanduser()
    runner = read_runner(folder)
    runner.check(folder)
    text = Text.of(folder, runner)
    words, ends = _stops(stop)
    tokens = text.tokens(prompt, template=template)
    chosen = sampler or Sampler(**runner.sampling)
    decoder = Decoder(folder, precision=precision, drop=drop)
    every = (*runner.ends, *ends)
    written = stream(decoder, tokens, steps, chosen, stop=every or None, seed=seed)
    return until(text.pieces(_answer(written, every)), words)


def _answer(tokens: Iterator[int], ends: Collection[int]) -> Iterator[int]:
    """The tokens before one that ends the answer."""
    for token in tokens:
        if token in ends:
            return
        yield token


def _stops(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The texts and the tokens at which to stop.

    Raises:
        SurgeryError: one is neither.
    """
    several = isinstance(stop, Collection) and not isinstance(stop, (str, bytes))
    given = () if stop is None else tuple(stop) if several else (stop,)
    for one in given:
        if not (isinstance(one, str) and one) and not is_whole(one):
            raise SurgeryError(f"stop={stop!r:.60}: {one!r:.40} is neither a text nor a token")
    return tuple(s for s in given if isinstance(s, str)), tuple(int(s) for s in given if not isinstance(s, str))


__all__ = ["Runner", "chat"]

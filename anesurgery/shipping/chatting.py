"""Talk to a model that was built, on the interpreter: a prompt in, pieces of text out."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anesurgery.doors import door
from anesurgery.errors import LoadError, SurgeryError
from anesurgery.files.runner_file import Runner, read_runner
from anesurgery.interpret.decoding import Decoder, stream
from anesurgery.interpret.sampler import Sampler, is_whole

Stop = str | int | Collection[str | int] | None


@door("prompt", "stop", "sampler", draws=True)
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
    format: str | None = None,
) -> Iterator[str]:
    """Yield the answer of a model, piece by piece.

    Args:
        place: a folder that `anesurgery.build` made.
        prompt: a text, or messages as [{"role": "user", "content": "..."}].
        steps: the most tokens to write. Default: to the end of the context, or, with `drop`, to an end token.
        template: use the checkpoint's chat template? Default: if it has one.
        sampler: chooses a token from logits; by default with what the checkpoint samples with.
        stop: texts and tokens that end the answer, besides the end tokens of the checkpoint. Texts are left
            out.
        seed: of the sampler: a whole number from 0 up.
        precision: the arithmetic of the interpreter: "fp32", "fp16" or "ane".
        drop: how many of the oldest tokens to forget when the context is full; the rest is read again. None: an
            error.
        format: of a folder that holds both: "coreml" or "coreai". Default: "coreml" where it is there.

    Returns:
        Pieces of text; together they are the answer.

    Raises:
        InterpretError: the prompt does not fit into the context, or an option has a wrong value.
        LoadError: the folder cannot be read, or its files are not those that were built.
        SurgeryError: a chat template was asked for and is missing, or it fails.
    """
    folder = Path(place).expanduser()
    runner = read_runner(folder)
    runner.check(folder)
    text = Text.of(folder, runner)
    words, ends = _stops(stop)
    tokens = text.tokens(prompt, template=template)
    chosen = sampler or Sampler(**runner.sampling)
    decoder = Decoder(folder / runner.in_format(format), precision=precision, drop=drop)
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


# Text for a model that reads tokens: the tokenizer and the chat template of a checkpoint.
#
# The tokenizer is a file of the tokenizers library. A template is Jinja, run in a sandbox: it comes with the
# checkpoint, from whoever made that.

ROLES = ("system", "user", "assistant", "tool")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Text:
    """Text to tokens and back."""

    tokenizer: Any
    """Of the tokenizers library."""
    template: str
    """"" for none."""
    special: Mapping[str, str]

    @classmethod
    def of(cls, folder: Path, runner: Runner) -> Text:
        """The prompts of a folder that was built.

        Raises:
            LoadError: it has no tokenizer, or one that cannot be read; or the tokenizers library is missing.
        """
        if not runner.tokenizer:
            raise LoadError(f"{folder} has no tokenizer; give token ids to `anesurgery.generate`")
        template = ""
        if runner.template:
            template = (folder / runner.template).read_text(encoding="utf-8")
        return cls(read_tokenizer(folder / runner.tokenizer), template, runner.special)

    def tokens(self, prompt: str | Messages, *, template: bool | None = None) -> list[int]:
        """The tokens of a prompt.

        Args:
            prompt: a text, or messages as [{"role": "user", "content": "..."}].
            template: is it written as the chat template says? None: where there is one.

        Raises:
            SurgeryError: it is asked for, and there is none; the template fails; or the prompt is empty.
        """
        messages = prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
        if template is None:
            template = bool(self.template)
        if not template and not isinstance(prompt, str):
            raise SurgeryError("messages need a chat template, and the checkpoint has none; give one text")
        words = self.written(messages) if template else str(prompt)
        found: list[int] = self.tokenizer.encode(words, add_special_tokens=not template).ids
        if not found:
            raise SurgeryError("the prompt has no tokens; give a text")
        return found

    def written(self, messages: Messages) -> str:
        """Messages as the template writes them, up to where the answer begins.

        Raises:
            SurgeryError: there is no template, a message has no role or content, or the template fails.
        """
        if not self.template:
            raise SurgeryError("the checkpoint has no chat template; ask with template=False (--no-template)")
        for message in messages:
            if not isinstance(message, Mapping) or message.get("role") not in ROLES or "content" not in message:
                raise SurgeryError(f"{message!r:.80} is no message; write {{'role': 'user', 'content': '...'}}")
        try:
            template = _environment().from_string(self.template)
            return template.render(messages=list(messages), add_generation_prompt=True, **self.special)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise SurgeryError(f"the chat template failed: {error}; ask with template=False") from error

    def pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        """Text as it comes: characters of several tokens when they are whole, and what is left at the end."""
        from tokenizers.decoders import DecodeStream

        stream, read, given = DecodeStream(skip_special_tokens=True), list[int](), ""
        for token in tokens:
            read.append(token)
            if piece := stream.step(self.tokenizer, token):
                given += piece
                yield piece
        whole = str(self.tokenizer.decode(read, skip_special_tokens=True))
        if whole != given and whole.startswith(given):  # a character that lacks its last bytes
            yield whole[len(given) :]


def read_tokenizer(file: Path) -> Any:
    """A tokenizer of the tokenizers library.

    Raises:
        LoadError: it cannot be read, or the library is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise LoadError("text needs the tokenizers library: pip install 'anesurgery[chat]'") from error
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises Exception itself
        raise LoadError(f"{file} is no tokenizer that the tokenizers library reads: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of Hugging Face expect."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])

    def fail(words: str) -> None:
        raise TemplateError(words)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, **options)

    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": fail, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Text up to the first of some strings; what may be the beginning of one is held back.

    ::

        >>> list(until(["one t", "wo", " three"], ["two"]))
        ['one ']
    """
    held = ""
    for piece in pieces:
        held += piece
        ends = [place for stop in stops if (place := held.find(stop)) >= 0]
        if ends:
            held = held[: min(ends)]
            break
        back = max((n for s in stops for n in range(1, len(s)) if held.endswith(s[:n])), default=0)
        if len(held) > back:
            yield held[: len(held) - back]
            held = held[len(held) - back :]
    if held:
        yield held

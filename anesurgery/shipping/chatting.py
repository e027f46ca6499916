"""Chat with a model that `build` made, on this library's interpreter (`anesurgery.chat`).

The first half runs the model: prompt, stop texts and stop tokens, pieces of text. The second half (`Text`) is
the tokenizer and the chat template of the checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
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
    words, ends = _split_stops(stop)
    tokens = text.tokens(prompt, template=template)
    chosen = sampler or Sampler(**runner.sampling)
    decoder = Decoder(folder / runner.in_format(format), precision=precision, drop=drop)
    every = (*runner.ends, *ends)
    rendered = stream(decoder, tokens, steps, chosen, stop=every or None, seed=seed)
    return until(text.pieces(_until_end_token(rendered, every)), words)


def _until_end_token(tokens: Iterator[int], ends: Collection[int]) -> Iterator[int]:
    """Yield tokens up to the first end token, which is left out."""
    for token in tokens:
        if token in ends:
            return
        yield token


def _split_stops(stop: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the texts and the tokens of `stop`, apart.

    Raises:
        SurgeryError: one is neither.
    """
    is_collection = isinstance(stop, Collection) and not isinstance(stop, (str, bytes))
    if stop is None:
        stops: tuple[Any, ...] = ()
    else:
        stops = tuple(stop) if is_collection else (stop,)
    for one in stops:
        if not (isinstance(one, str) and one) and not is_whole(one):
            raise SurgeryError(f"stop={stop!r:.60}: {one!r:.40} is neither a text nor a token")
    return tuple(s for s in stops if isinstance(s, str)), tuple(int(s) for s in stops if not isinstance(s, str))


# The tokenizer is a file of the tokenizers library. A chat template is Jinja code that comes with the
# checkpoint, from whoever made it, so it runs in a sandbox.

ROLES = ("system", "user", "assistant", "tool")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Text:
    """Converts text to tokens and back, with the tokenizer and the chat template of a checkpoint."""

    tokenizer: Any
    """A `Tokenizer` of the tokenizers library."""
    template: str
    """The chat template; "" for none."""
    special: Mapping[str, str]
    """Names of special tokens, as templates read them -> their text."""

    @classmethod
    def of(cls, folder: Path, runner: Runner) -> Text:
        """Read the tokenizer and the template of a folder that `build` made.

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
        """Return the token ids of a prompt.

        Args:
            prompt: a text, or messages as [{"role": "user", "content": "..."}].
            template: apply the chat template? None: if there is one.

        Raises:
            SurgeryError: there is no template to apply, the template fails, or the prompt is empty.
        """
        messages = prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
        if template is None:
            template = bool(self.template)
        if not template and not isinstance(prompt, str):
            raise SurgeryError("messages need a chat template, and the checkpoint has none; give one text")
        text = self.rendered(messages) if template else str(prompt)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not template).ids
        if not ids:
            raise SurgeryError("the prompt has no tokens; give a text")
        return ids

    def rendered(self, messages: Messages) -> str:
        """Return messages as the template renders them, up to where the answer begins.

        Raises:
            SurgeryError: there is no template, a message has no role or content, or the template fails.
        """
        if not self.template:
            raise SurgeryError("the checkpoint has no chat template; ask with template=False (--no-template)")
        for message in messages:
            if not isinstance(message, Mapping) or message.get("role") not in ROLES or "content" not in message:
                raise SurgeryError(f"{message!r:.80} is no message; write {{'role': 'user', 'content': '...'}}")
        try:
            template = _template_environment().from_string(self.template)
            given = {"tools": None, "documents": None, "add_generation_prompt": True}  # none, as templates ask
            return template.render(messages=list(messages), **given, **self.special)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise SurgeryError(f"the chat template failed: {error}; ask with template=False") from error

    def pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield text as tokens come in; a character that takes several tokens comes when it is complete."""
        from tokenizers.decoders import DecodeStream

        stream, read, yielded = DecodeStream(skip_special_tokens=True), list[int](), ""
        for token in tokens:
            read.append(token)
            if piece := stream.step(self.tokenizer, token):
                yielded += piece
                yield piece
        whole = str(self.tokenizer.decode(read, skip_special_tokens=True))
        if whole != yielded and whole.startswith(yielded):  # a character that lacks its last bytes
            yield whole[len(yielded) :]


def read_tokenizer(file: Path) -> Any:
    """Read a file of the tokenizers library.

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


class _Generation(Extension):
    """Renders what is between `generation` and `endgeneration`, which mark answers for a training."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        """Return the nodes between the tags; a name that they set is theirs alone."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja sandbox, with the filters and functions that templates of Hugging Face use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )

    def fail(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": fail, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment


def until(pieces: Iterable[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield text up to the first stop string; text that may begin a stop string is held back.

    ::

        >>> list(until(["one t", "wo", " three"], ["two"]))
        ['one ']
    """
    buffer = ""
    for piece in pieces:
        buffer += piece
        stop_positions = [position for stop in stops if (position := buffer.find(stop)) >= 0]
        if stop_positions:
            buffer = buffer[: min(stop_positions)]
            break
        held_back = max((n for s in stops for n in range(1, len(s)) if buffer.endswith(s[:n])), default=0)
        if len(buffer) > held_back:
            yield buffer[: len(buffer) - held_back]
            buffer = buffer[len(buffer) - held_back :]
    if buffer:
        yield buffer

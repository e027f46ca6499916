"""The command line: its commands, each a function, some in files of their own.

Exit codes: 0 all is well; 1 a promise was not kept, two models differ, a range overflows, or the doctor found
something; 64 bad usage or bad input; 70 a defect of this program; 130 interrupted. `inspect --status` ends with
the status of the model: 0 every op prefers the ANE, 1 some do, 2 none does.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from anesurgery import __version__
from anesurgery.commands.options import BAD_INPUT, DEFECT
from anesurgery.display import printable
from anesurgery.errors import ProofError, SurgeryError, SurgeryWarning, near_matches

USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""The class of the usage errors of typer, which brings click under one name or another."""


OTHER_WORDS = {
    "analyse analyze check info report show": "`anesurgery see`",
    "optimise optimize repair rewrite": "`anesurgery fix`",
    "test validate verify": "`anesurgery prove`",
    "bench benchmark profile time": "`anesurgery measure`",
    "palettize prune quantise quantize": "`anesurgery compress`",
    "convert": "`anesurgery to-coreai` or `to-coreml`; in Python, apply(module, 'auto', inputs=x) converts",
}
"""Words that other tools have -> what they are here."""
MODELS = (".mlpackage", ".mlmodel", ".mlmodelc", ".aimodel", ".onnx", ".pte")


class _Commands(TyperGroup):
    """The commands; what is written wrongly is an error of ours in a line, and not a box."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options before the command."""
        with _said_in_a_line(ctx) if args else nullcontext():
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; a word of another tool, or a model, is answered with the command to write."""
        word = args[0]
        if self.get_command(ctx, word) is None:
            here = [f"`anesurgery see {word}`"] if word.rstrip("/").lower().endswith(MODELS) else []
            here += [words for others, words in OTHER_WORDS.items() if word.lower() in others.split()]
            if here:
                raise SurgeryError(f"no command {word!r}; say {here[0]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Read the words of the command, and run it."""
        with _said_in_a_line(ctx):
            return super().invoke(ctx)


@contextmanager
def _said_in_a_line(ctx: Any) -> Iterator[None]:
    try:
        yield
    except USAGE_ERROR as error:
        path = f"{ctx.command_path} {ctx.invoked_subcommand or ''}".strip()
        words = error.format_message().strip().rstrip(".")
        if names := getattr(error, "possibilities", None):  # the likeliest first; typer sorts by letters
            words = f"{words.partition(' (')[0]}; {near_matches(error.option_name, names)}"
        raise SurgeryError(f"{words}; `{path} --help` shows what it takes") from None


app = typer.Typer(
    cls=_Commands,
    help="Rewrite Core ML models for the Apple Neural Engine, and check the result on any machine.\n\n"
    "Exit codes: 0 all is well; 1 a promise was not kept or two models differ; 64 bad usage or input; "
    "70 a defect of this program; 130 interrupted. "
    "`inspect --status`: 0 all, 1 some, 2 no ops on the Neural Engine.\n\n"
    "--debug, anywhere, shows the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

DEBUG = "--debug"
"""Anywhere on the command line: errors come with their traceback."""


def main() -> None:
    """Run the command line; errors are said on stderr, and end it with an exit code of their own."""
    USAGE_ERROR.exit_code = BAD_INPUT
    debug = DEBUG in sys.argv
    sys.argv = [word for word in sys.argv if word != DEBUG]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_in_a_line
            app()
    except Exception as error:
        if debug:
            raise
        foreseen = isinstance(error, SurgeryError)
        words = str(error) if foreseen else f"{type(error).__name__}: {error} ({DEBUG} shows where)"
        print(printable(f"anesurgery: {words}"), file=sys.stderr)
        sys.exit(1 if isinstance(error, ProofError) else BAD_INPUT if foreseen else DEFECT)


_SHOWN_BY_PYTHON = warnings.showwarning


def _say_in_a_line(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Print a warning of ours without the line of code that it was raised at, which is none of the user's."""
    if issubclass(category, SurgeryWarning):
        print(printable(f"warning: {message}"), file=sys.stderr)
    else:
        _SHOWN_BY_PYTHON(message, category, *place, **more)


def _version(asked: bool) -> None:
    if asked:
        print(f"anesurgery {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the whole command line."""


COMMANDS: Mapping[str, Mapping[str, str]] = {
    "See, fix, prove": {
        "trying": "example",
        "inspecting": "inspect",
        "applying": "apply",
        "comparing": "prove",
    },
    "Look closer": {"applying": "plan", "trying": "draw", "comparing": "run compare diff"},
    "Numbers and compressed weights": {
        "calibrating": "ranges certify sensitivity",
        "compressing_models": "compress compress_cache",
    },
    "Language models": {"writing_text": "build chat generate"},
    "Sizes, chunks and apps": {
        "other_models": "sizes choose_sizes split merge extract",
        "writing_text": "swift",
    },
    "Other formats": {"other_models": "to_coreai to_coreml lint decompile executorch"},
    "What is known": {"trying": "list_ explain", "machines": "chips doctor"},
    "Teams and devices": {"trying": "serve", "reviewing": "review", "recording": "measure learn calibrate"},
}
"""Title in the help -> module of `anesurgery.commands` -> its commands under that title, in this order."""

ALIASES = {"inspect": "see", "apply": "fix"}
"""Command -> its other name."""


def _add_command(title: str, file: str, name: str) -> None:
    """Add a command of a module to the app, with its alias, under a title of the help."""
    function = getattr(importlib.import_module(f"anesurgery.commands.{file}"), name)
    app.command(name.strip("_").replace("_", "-"), rich_help_panel=title)(function)
    if name in ALIASES:
        app.command(ALIASES[name], help=f"The same as {name}.", rich_help_panel=title)(function)


for _title, _files in COMMANDS.items():
    for _file, _names in _files.items():
        for _name in _names.split():
            _add_command(_title, _file, _name)

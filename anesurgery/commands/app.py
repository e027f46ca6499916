"""The command line: its commands, each a function, some in files of their own.

Exit codes: 0 all is well; 1 a promise was not kept, two models differ, a range overflows, or the doctor found
something; 64 bad usage or bad input; 70 a defect of this program; 130 interrupted. `inspect --status` ends with
the status of the model: 0 every op prefers the ANE, 1 some do, 2 none does.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Annotated, Any

import typer

from anesurgery import __version__
from anesurgery.commands.options import BAD_INPUT, DEFECT
from anesurgery.display import printable
from anesurgery.errors import ProofError, SurgeryError, SurgeryWarning

app = typer.Typer(
    help="Rewrite Core ML models for the Apple Neural Engine, and check the result on any machine.\n\n"
    "Exit codes: 0 all is well; 1 a promise was not kept or two models differ; 64 bad usage or input; "
    "70 a defect of this program; 130 interrupted. "
    "`inspect --status`: 0 all, 1 some, 2 no ops on the ANE.\n\n"
    "--debug, anywhere, shows the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

DEBUG = "--debug"
"""Anywhere on the command line: errors come with their traceback."""


USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""The class of the usage errors of typer, which brings click under one name or another."""


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


COMMANDS = {
    "trying": "list_ explain example draw",
    "inspecting": "inspect",
    "applying": "apply plan",
    "converting": "decompile executorch lint to_coreml to_coreai",
    "writing_text": "generate build chat swift",
    "splitting_models": "split merge extract",
    "machines": "doctor chips",
    "recording": "measure learn calibrate",
    "comparing": "run compare diff prove",
    "calibrating": "ranges certify sensitivity",
    "sizing": "choose_sizes sizes",
    "compressing_models": "compress compress_cache",
    "reviewing": "review",
    "serving_models": "serve",
}
"""Module of `anesurgery.commands` -> its commands, in the order in which the help lists them."""

ALIASES = {"inspect": "see", "apply": "fix"}
"""Command -> its other name."""

for _file, _names in COMMANDS.items():
    _module = importlib.import_module(f"anesurgery.commands.{_file}")
    for _name in _names.split():
        _function = getattr(_module, _name)
        app.command(_name.strip("_").replace("_", "-"))(_function)
        if _name in ALIASES:
            app.command(ALIASES[_name], help=f"The same as {_name}.")(_function)

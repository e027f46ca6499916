"""What the commands of the command line share: arguments, exit codes, and how a result is shown."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from anesurgery import registry

BAD_INPUT = 64
"""Exit code of bad usage and bad input, as in sysexits.h; 2 is left to `inspect --status`."""
DEFECT = 70
"""Exit code of an unforeseen error: a defect of this program."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Model = Annotated[str, typer.Argument(help="An .mlpackage, .mlmodel or .mlmodelc.", show_default=False)]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the sampled inputs.")]
Function = Annotated[str | None, typer.Option(help="Which function, by name; the default one when absent.")]
Member = Annotated[
    str | None, typer.Option(help="Of a pipeline, one of its models by name or number; all when absent.")
]


def complete_steps(incomplete: str) -> list[str]:
    """For the shell: recipes and passes, after each comma again."""
    done, comma, word = incomplete.rpartition(",")
    return [f"{done}{comma}{name}" for name in complete_name(word)]


def complete_name(incomplete: str) -> list[str]:
    """For the shell: names of recipes and passes."""
    names = [*registry.recipe_names(), *registry.pass_names()]
    return [name for name in names if name.startswith(incomplete)]


Aim = Annotated[str | None, typer.Option(help='Chip and OS: "M1/macOS 14", "M4+", "iPhone/iOS 18", "any".')]


def show(plain: Any, shown: Any, as_json: bool, quiet: bool) -> None:
    """Print plain data as JSON, or something for a rich console, or nothing."""
    if as_json:
        print(json.dumps(finite(plain), indent=2, allow_nan=False))
    elif not quiet:
        from anesurgery.show.console import PlainConsole

        PlainConsole().print(shown)


def finite(value: Any) -> Any:
    """Plain data as JSON can hold it: what is infinite or NaN as a word."""
    if isinstance(value, dict):
        return {key: finite(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(held) for held in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""What the commands of the command line share: arguments, and how a result is shown."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Model = Annotated[str, typer.Argument(help="An .mlpackage, or a compiled .mlmodelc.", show_default=False)]


def show(plain: Any, shown: Any, as_json: bool, quiet: bool) -> None:
    """Print plain data as JSON, or something for a rich console, or nothing."""
    if as_json:
        print(json.dumps(plain, indent=2))
    elif not quiet:
        from rich.console import Console

        Console().print(shown)

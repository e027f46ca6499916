"""The commands `list` and `explain`, which import neither torch nor coremltools."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from anesurgery import registry
from anesurgery.commands.next_steps import command, ended
from anesurgery.commands.options import Json, Quiet, complete_name, show
from anesurgery.commands.waiting import load_engine
from anesurgery.commands.written_options import written_options
from anesurgery.display import folded, written
from anesurgery.errors import UnknownName


def list_(
    kinds: Annotated[str, typer.Argument(help="recipes, passes or all.")] = "all",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List all recipes and passes, with one sentence each."""
    if kinds not in ("all", "recipes", "passes"):
        raise UnknownName("kind", kinds, ["recipes", "passes", "all"])
    rows = [("recipe", n) for n in registry.recipe_names() if kinds != "passes"]
    if kinds != "recipes":
        rows += [("pass", n) for n in registry.op_pass_names()]
        rows += [("layer pass", n) for n in registry.pass_names() if ("pass", n) not in rows]
    table = Table("name", "kind", "what it does", box=None)
    for kind, name in rows:
        table.add_row(name, kind, registry.summary(name))
    plain = [{"name": n, "kind": k, "summary": registry.summary(n)} for k, n in rows]
    show(plain, table, as_json, quiet, then=command("explain", rows[0][1]))


def explain(
    name: Annotated[
        str, typer.Argument(help="A pass or recipe.", show_default=False, autocompletion=complete_name)
    ],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Explain a pass or recipe: what it does, when it refuses, its evidence and its options."""
    text, options = registry.documentation(name), _options_of(name)
    lines = [f"  {step}.{key} = {value!r}" for step, opts in options.items() for key, value in opts.items()]
    shown = "\n".join([text.rstrip(), "", "Options:" if lines else "No options.", *lines])
    if as_json or quiet:
        show({"name": name, "documentation": text, "options": options}, shown, as_json, quiet, then="")
    else:
        print(folded(shown))
        print(ended(then=command("example", "gpt2"), more=f"On your model: {command('fix', 'MODEL', name)}"))


def _options_of(name: str) -> dict[str, dict[str, Any]]:
    """The options of a pass, or of each step of a recipe: read from its file, or by importing it."""
    if (options := written_options(name)) is not None:
        return options
    load_engine()
    from anesurgery.surgery import find_recipe

    steps = find_recipe(name).steps if name in registry.recipe_names() else (registry.make_pass(name),)
    return {step.name: {k: written(v) for k, v in step.options().items()} for step in steps}

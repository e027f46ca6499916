"""The commands `list` and `explain`, which import neither torch nor coremltools."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from anesurgery import registry
from anesurgery.commands.next_steps import command
from anesurgery.commands.options import complete_name
from anesurgery.commands.subcommand import Outcome, subcommand
from anesurgery.commands.waiting import load_engine
from anesurgery.commands.written_options import written_options
from anesurgery.display import folded, written
from anesurgery.errors import UnknownName
from anesurgery.show.report import Table

Kinds = Annotated[str, typer.Argument(help="recipes, passes or all.")]
Name = Annotated[str, typer.Argument(help="A pass or recipe.", autocompletion=complete_name)]


@subcommand(engine=False)
def list_(kinds: Kinds = "all") -> Outcome:
    """List all recipes and passes, with one sentence each."""
    if kinds not in ("all", "recipes", "passes"):
        raise UnknownName("kind", kinds, ["recipes", "passes", "all"])
    rows = [("recipe", n) for n in registry.recipe_names() if kinds != "passes"]
    if kinds != "recipes":
        rows += [("pass", n) for n in registry.op_pass_names()]
        rows += [("layer pass", n) for n in registry.pass_names() if ("pass", n) not in rows]
    plain = [{"name": n, "kind": k, "summary": registry.summary(n)} for k, n in rows]
    table = Table(("name", "kind", "what it does"), [tuple(row.values()) for row in plain], ruled=False)
    return Outcome(plain, table, then=command("explain", rows[0][1]))


@subcommand(engine=False)
def explain(name: Name) -> Outcome:
    """Explain a pass or recipe: what it does, when it refuses, its evidence and its options."""
    text, options = registry.documentation(name), _options_of(name)
    lines = [f"  {step}.{key} = {value!r}" for step, opts in options.items() for key, value in opts.items()]
    shown = folded("\n".join([text.rstrip(), "", "Options:" if lines else "No options.", *lines]))
    then, more = command("example", "gpt2"), f"On your model: {command('fix', 'MODEL', name)}"
    return Outcome({"name": name, "documentation": text, "options": options}, shown, then=then, more=more)


def _options_of(name: str) -> dict[str, dict[str, Any]]:
    """The options of a pass, or of each step of a recipe: read from its file, or by importing it."""
    if (options := written_options(name)) is not None:
        return options
    load_engine()
    from anesurgery.surgery import find_recipe

    steps = find_recipe(name).steps if name in registry.recipe_names() else (registry.make_pass(name),)
    return {step.name: {k: written(v) for k, v in step.options().items()} for step in steps}

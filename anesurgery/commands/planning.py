"""`anesurgery plan`, and how the command line names steps, options and ranges."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from anesurgery import registry
from anesurgery.commands.next_steps import command
from anesurgery.commands.options import (
    SUFFIXES,
    Gate,
    Inputs,
    Json,
    Member,
    Model,
    Quiet,
    Seed,
    complete_steps,
    model_first,
    show,
)
from anesurgery.commands.waiting import load_engine, waiting
from anesurgery.errors import SurgeryError, UnknownName


def plan(
    source: Model,
    steps: Annotated[
        str | None,
        typer.Argument(
            help="A recipe. Default: the passes that inspect names.",
            show_default=False,
            autocompletion=complete_steps,
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help='Chip or product, and OS: "M1/macOS 14", "iPhone 15 Pro".')
    ] = None,
    inputs: Inputs = None,
    member: Member = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Set an option: multiple=32, embedding_matmul.mode=input. STEP=false leaves a step out.",
        ),
    ] = None,
    gate: Gate = 40.0,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a recipe would do, and why, without editing. `apply MODEL PLAN.json` does it."""
    if steps is not None:
        source, steps = model_first(source, steps, quiet or as_json)
    load_engine(quiet)
    steps = steps or default_recipe(source)
    from anesurgery.files import arrays
    from anesurgery.show.plans import plan_group
    from anesurgery.surgery import plan as planned

    with waiting("planning", quiet or as_json):
        made = planned(
            source,
            chosen_steps(steps, option or []),
            target=target,
            inputs=arrays.read_all(inputs),
            member=member,
            gate=gate,
            seed=seed,
        )
    then = command("fix", source, steps, target=target) if made.steps else command("see", source, target=target)
    show(made.to_json(), plan_group(made), as_json, quiet, then=then)


def default_recipe(source: str) -> str:
    """The recipe for whatever the model is."""
    from anesurgery.placement.models import of_layers

    return "neuralnetwork_ane" if of_layers(source) else "auto"


def is_plan(steps: str) -> bool:
    """Does the command line name a file with a plan?"""
    return steps.endswith(".json")


def read_plan(path: str, options: list[str] | None) -> Any:
    """The plan in a file.

    Raises:
        SurgeryError: options are given too; those of its steps stand in it.
        LoadError: it cannot be read.
    """
    from anesurgery.rewriting.edit_plan import Plan

    if options:
        raise SurgeryError(f"--set is for a recipe; the options of the steps of {path} stand in it")
    return Plan.read(Path(path))


def chosen_steps(names: str, options: list[str]) -> Any:
    """A recipe, or a list of passes, with the options of the command line."""
    values = dict(_option(text) for text in options)
    listed = [n.strip() for n in names.split(",") if n.strip()]
    if not listed:
        raise SurgeryError("no recipe or pass is named; `anesurgery list` shows them")
    if len(listed) == 1 and listed[0] in registry.recipe_names():
        from anesurgery.surgery import find_recipe

        return find_recipe(listed[0]).with_options(**_nested(values))
    for name in listed:
        if name.endswith(SUFFIXES):
            raise SurgeryError(f"{name!r} is no pass or recipe; to write the result there, say --out {name}")
        if name not in [*registry.pass_names(), *registry.recipe_names()]:
            raise UnknownName(
                "pass or recipe", name, [*registry.recipe_names(), *registry.pass_names()], "anesurgery list"
            )
    from anesurgery.surgery import Recipe, steps_of

    ours = Recipe("the command line", tuple(steps_of(listed)))
    return list(ours.with_options(**_nested(values)).steps)


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SurgeryError(f"--set {text!r}: write it as option=value")
    value = {"True": "true", "False": "false", "None": "null"}.get(value, value)
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value


def value_range(text: str) -> tuple[str, tuple[int, int]]:
    """What is assumed of an input: "input_ids=0:50256"."""
    parts = re.fullmatch(r"(.+)=(-?\d+):(-?\d+)", text.strip())
    if parts is None:
        raise SurgeryError(f"--assume {text!r}: write it as input_ids=0:50256")
    return parts[1], (int(parts[2]), int(parts[3]))


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """`step.option` keys as dictionaries of options by step."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        step, dot, name = key.partition(".")
        if dot:
            nested.setdefault(step, {})[name] = value
        else:
            nested[key] = value
    return nested

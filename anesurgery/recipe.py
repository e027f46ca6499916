"""A recipe: a named list of passes with options, in an order that is written down, and what it promises."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from anesurgery import registry
from anesurgery.errors import UnknownName
from anesurgery.mil import Program
from anesurgery.pattern import Refusal
from anesurgery.surgery import Pass, Pipeline


@dataclass(frozen=True)
class Recipe:
    """Steps for a family of models. Calling it on a model gives the changed model."""

    name: str
    steps: tuple[Pass, ...]
    applies_to: Callable[[Program], Refusal | None] = lambda program: None
    """Why the recipe is not for a program, or None."""
    psnr: float = 60.0
    """Promised PSNR in dB of the outputs against the unmodified model, in fp16 as stored."""

    def __post_init__(self) -> None:
        Pipeline(self.steps)  # checks the order once

    def with_options(self, **options: Any) -> Recipe:
        """The recipe with other options.

        Args:
            options: `<pass>=False` leaves a step out, True keeps it; `<pass>={"option": value}` sets options;
                a bare option name goes to the one step that has it (`multiple=32`).

        Raises:
            UnknownName: no step has that name or option.
        """
        steps = list(self.steps)
        for key, value in options.items():
            steps = self._with_option(steps, key, value)
        return dataclasses.replace(self, steps=tuple(steps))

    def _with_option(self, steps: list[Pass], key: str, value: Any) -> list[Pass]:
        names = [step.name for step in self.steps]
        if key in names and isinstance(value, bool):
            return [step for step in steps if value or step.name != key]
        if key in names and isinstance(value, dict):
            return [_set(step, value) if step.name == key else step for step in steps]
        owners = [step for step in steps if key in step.options()]
        if len(owners) != 1:
            known = [*names, *(option for step in steps for option in step.options())]
            raise UnknownName(f"option of {self.name}:", key, known)
        return [_set(step, {key: value}) if step is owners[0] else step for step in steps]

    def __call__(self, model: Any, **options: Any) -> Any:
        """Apply the recipe: path or MLModel in, MLModel out.

        Args:
            model: path of a package, MLModel, or MIL program.
            options: those of `anesurgery.apply` (`target`, `prove`, `quiet`), all others go to the steps.

        Raises:
            SurgeryError: nothing applied at all, or a promise was not kept.
        """
        from anesurgery.operate import apply, split_options

        ours, theirs = split_options(options)
        return apply(model, self.with_options(**theirs), **ours).model

    def pipeline(self, base: Any = None, **options: Any) -> Any:
        """A coremltools PassPipeline with the steps in it, for `ct.convert(pass_pipeline=...)`."""
        from anesurgery.bridge import pass_pipeline

        return pass_pipeline(self.with_options(**options).steps, base)

    def __str__(self) -> str:
        return "\n".join([f"{self.name}:", *(f"  {i}. {s}" for i, s in enumerate(self.steps, 1))])


def _set(step: Pass, options: dict[str, Any]) -> Pass:
    registry.check_options(step.name, options, list(step.options()))
    return dataclasses.replace(step, **options)


def steps_of(passes: Any) -> Iterable[Pass]:
    """Passes from what a user may give: a name, a Pass, a Recipe, or a list of them."""
    if isinstance(passes, Recipe):
        yield from passes.steps
    elif isinstance(passes, Pass):
        yield passes
    elif isinstance(passes, str):
        if passes in registry.recipe_names():
            yield from registry.recipe(passes).steps
        else:
            yield registry.make_pass(passes)
    elif isinstance(passes, type) and issubclass(passes, Pass):
        yield passes()
    else:
        for step in passes:
            yield from steps_of(step)

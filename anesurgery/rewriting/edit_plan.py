"""What will be done to a model, as data: the steps, why each is there, what was left out, and what it gains."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anesurgery import registry
from anesurgery.checking.exactness import Near
from anesurgery.display import Drawn, drawn, draws, written
from anesurgery.doors import check_fields
from anesurgery.errors import DAMAGED, LoadError, Refusal
from anesurgery.files.source import read_json
from anesurgery.placement.durations import Change, change
from anesurgery.placement.score import Score
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Pass

FORMAT = "anesurgery.steps/1"
AGAIN = "`anesurgery plan --json` writes one"
MAY = "repairs what may go wrong: "
"""Before the names of the rules that a step answers, where no inputs show that they matter."""


@dataclass(frozen=True)
class Planned:
    """One step of a plan, and why it is there."""

    step: Pass
    why: str
    searched: bool = False
    """Did the search find it? Then it goes where its check fails; what was asked for is an error."""

    def __str__(self) -> str:
        return f"{self.step}: {self.why}" if self.why else str(self.step)


Words = str | Callable[[], str]
"""A text, or a function that computes it when somebody asks."""


@dataclass(frozen=True, repr=False)
class Plan(Drawn):
    """The chosen steps of a recipe for one model and target."""

    recipe: str
    """What was asked for, by name."""
    target: str | None = None
    """Chip and OS."""
    steps: tuple[Planned, ...] = ()
    """In the order in which they run, each with the reason."""
    left_out: tuple[tuple[str, Refusal], ...] = ()
    """Name of a step that was tried or looked at, and why it is not in the plan."""
    notes: tuple[str, ...] = ()
    """What was gained by which steps, what grows, and what the search leaves open."""
    warnings: tuple[str, ...] = ()
    """What is lost by steps that were asked for."""
    judged: Words = field(default="", repr=False, compare=False)
    """What the whole gains; "" where it was not judged."""
    wrong: str = ""
    """What the first line of a report says of wrong numbers: how wrong outputs are, or what is repaired."""
    outputs: tuple[Near | None, Near | None] = (None, None)
    """dB by arithmetic before and after, of what the model means on the inputs at hand; None where not run."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The expected time and the shares before and after, as plain data."""
    ops: Mapping[str, int] = field(default_factory=dict)
    """Number of ops (or layers) by type in the model that it was made for."""

    @cached_property
    def gain(self) -> str:
        """What the whole gains, in words, and on which chips; "" where it was not judged."""
        return self.judged if isinstance(self.judged, str) else self.judged()

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, without the reasons."""
        return tuple(one.step for one in self.steps)

    @property
    def searched(self) -> frozenset[Pass]:
        """The steps that the search added."""
        return frozenset(one.step for one in self.steps if one.searched)

    def without(self, step: Pass, why: str) -> Plan:
        """Return the plan without a step whose check failed."""
        steps = tuple(one for one in self.steps if one.step is not step)
        left = (step.name, Refusal(f"tried, and it failed: {why}"))
        return replace(self, steps=steps, left_out=(*self.left_out, left))

    def held_for(self, ops: Mapping[str, int], target: str | None) -> Plan:
        """Return the plan for a model and a target. For another model or target, only the steps remain.

        Args:
            ops: number of ops by type in the model.
            target: chip and OS.
        """
        same = not self.ops or dict(self.ops) == dict(ops)  # one that was written by hand has none
        if same and Target.parse(self.target) == Target.parse(target):
            return self
        other = f"for {self.target or 'no target'}" if same else "for another model"
        words = f"the plan was made {other}: its steps are run, and what it says of gains does not hold here"
        return Plan(self.recipe, target, self.steps, warnings=(words,), ops=ops)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, from which `from_json` makes the plan again."""
        return drawn(self, "json")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Make a plan from plain data.

        Raises:
            LoadError: it is no plan, or one of another version.
            UnknownName: no such pass or option.
        """
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise LoadError(f'no plan: "format" is not "{FORMAT}"; {AGAIN}')
        try:
            made = cls._of_json(data)
            check_fields(made)
        except KeyError as error:
            raise LoadError(f"no plan: {error} is missing; {AGAIN}") from error
        except DAMAGED as error:
            raise LoadError(f"not a plan: a field has another type ({error}); {AGAIN}") from error
        return made

    @classmethod
    def _of_json(cls, data: Mapping[str, Any]) -> Plan:
        steps = [
            Planned(registry.make_pass(s["name"], **_options(s)), s["why"], s["searched"])
            for s in data["steps"]
        ]
        left = [(row["pass"], Refusal(row["reason"], _place(row["at"]))) for row in data["left_out"]]
        plain = {name: data[name] for name in ("recipe", "target", "wrong", "figures", "ops")}
        before, after = map(_decibels, data["outputs"])
        notes, warnings = tuple(data["notes"]), tuple(data["warnings"])
        parts: dict[str, Any] = {"steps": tuple(steps), "left_out": tuple(left), "outputs": (before, after)}
        return cls(**plain, **parts, judged=data["gain"], notes=notes, warnings=warnings)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `anesurgery plan --json` wrote.

        Raises:
            LoadError: the file cannot be read, or holds no plan.
        """
        place = Path(path).expanduser()
        try:
            content = read_json(place)
        except (ValueError, RecursionError) as error:
            raise LoadError(f"{place} is no plan, as {error}; {AGAIN}") from error
        try:
            return cls.from_json(content)
        except LoadError as error:
            raise LoadError(f"{place}: {error}") from error

    def __repr__(self) -> str:
        return str(self)


def _decibels(near: Mapping[str, Any] | None) -> dict[str, float] | None:
    """DB by arithmetic; JSON holds what is infinite as a string."""
    return None if near is None else {name: float(value) for name, value in near.items()}


def _options(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a step; lists are tuples again."""
    return {name: _tuples(value) for name, value in step["options"].items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _place(name: str) -> Any:
    """Return what has the name of an op, as far as a report shows it."""
    return SimpleNamespace(name=name) if name else None


def _plain(value: Any) -> Any:
    """Return the value of an option as JSON holds it."""
    return [*map(_plain, value)] if isinstance(value, (tuple, list)) else written(value)


@draws("Plan", "json")
def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data."""
    return {
        "format": FORMAT,
        "recipe": plan.recipe,
        "target": plan.target,
        "steps": [
            {
                "name": one.step.name,
                "options": {k: _plain(v) for k, v in one.step.options().items()},
                "why": one.why,
                "searched": one.searched,
            }
            for one in plan.steps
        ],
        "left_out": [
            {"pass": name, "reason": r.reason, "at": r.where.name if r.where else ""}
            for name, r in plan.left_out
        ],
        "gain": plan.gain,
        "wrong": plan.wrong,
        "outputs": list(plan.outputs),
        "figures": dict(plan.figures),
        "ops": dict(plan.ops),
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }


def figures(before: Score | None, after: Score | None) -> dict[str, Any]:
    """Return the expected time, the share of the ANE and the switches before and after, as plain data."""
    if before is None or after is None:
        return {}
    times = after.expected.times(before.expected)
    told: Change | None = None if times is None else change(*times)
    each = [{"share": one.share, "switches": one.switches, "weights": one.weights} for one in (before, after)]
    return {
        "time": None if told is None else told.to_json(),
        "relative cost": None if told is not None else after.over(before).cost,
        "before": each[0],
        "after": each[1],
    }

"""A state becomes an input and an output: the caller keeps it.

The input `cache` takes what the output `cache_out` of the call before gave; zeros at first. The loop around it
stands in docs/decoders.md. `states` names the states; all by default.

Refuses when the model has no states, and when a branch or a loop uses one.

Why it helps: with two states models fail with 0x1d on M-series, macOS 26.0.1, and models before iOS 18 have
none (reported: john-rocky/CoreML-LLM, which packs the others into inputs).

Grade: none: the interface changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Pass, Program, Refusal, Session, Var
from anesurgery.errors import UnknownName
from anesurgery.interpret.predictor import run
from anesurgery.mil import function_of
from anesurgery.regions.small_builds import again
from anesurgery.rewriting import stored_states
from anesurgery.rewriting.example_programs import cache_example


@dataclass(frozen=True)
class CacheAsIo(Pass):
    """States as inputs and outputs."""

    name = "cache_as_io"
    follows = ("add_cache", "join_states", "pad_state")
    states: Sequence[str] | None = None
    """Names of the states; all by default."""

    def requires(self, program: Program) -> Refusal | None:
        """States of these names.

        Raises:
            UnknownName: there is no such state.
        """
        states = stored_states.shared_shapes(list(program.functions.values()))
        for name in self.states or ():
            if name not in states:
                raise UnknownName("state", name, states)
        return None if states else Refusal("the model has no states")

    def run(self, program: Program, session: Session) -> None:
        """Edit all functions alike."""
        functions = list(program.functions.values())
        names = list(self.states or stored_states.shared_shapes(functions))
        for name in list(names):
            if (refusal := stored_states.within_block(functions, name)) is not None:
                session.refuse(self.name, refusal)
                names.remove(name)
        for name in names:
            for function, state in stored_states.each(program, name):
                shape, dtype = stored_states.held_shape(state), stored_states.held_type(state)
                with an.GraphEdits(self, session, function) as edits:
                    form = _Held(edits.new_input(name, shape, dtype), f"{name}_out")
                    stored_states.StoredStates(edits, {state: form}).edit()
            words = f"give {name} as an input, zeros at first, and {name}_out of each call to the next one"
            change = an.InterfaceChange(words, (name, f"{name}_out"), call=_called(names))
            session.declare(self.name, name, change, (), ())


def _called(names: Sequence[str]) -> Any:
    """One call with empty caches, and what it gives besides them."""

    def call(model: Any, values: an.Values, precision: str) -> an.Values:
        held = {n: v for n, v in function_of(model, None).inputs.items() if n in names}
        empty = {n: np.zeros(an.static_shape(v) or (), an.np_dtype(v)) for n, v in held.items()}
        outputs = run(model, {**values, **empty}, precision=precision)
        return {n: v for n, v in outputs.items() if n not in {f"{name}_out" for name in held}}

    return call


@dataclass
class _Held(stored_states.Form):
    """What the caller gave, and what was made of it since."""

    value: Var
    output: str
    """The name of the output that gives it."""

    def read(self, mb: Builder, op: an.Operation) -> Var:
        return self.value

    def update(self, mb: Builder, op: an.Operation, stored: Var) -> Var:
        return again(mb, op, x=stored, name=f"{op.name}_held")

    def write(self, mb: Builder, op: an.Operation, stored: Var) -> Var:
        self.value = stored
        return stored

    def end(self, edits: an.GraphEdits) -> None:
        edits.new_output(self.output, self.value)


example = cache_example

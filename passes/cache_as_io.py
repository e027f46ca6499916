"""A state becomes an input and an output: the caller keeps it.

A state is memory that Core ML keeps between calls: ops read it (`read_state`), change it (`slice_update`) and
write it back (`coreml_update_state`). Afterwards there is no state: a model with the state `cache` has an input
`cache` and an output `cache_out` of the same shape and dtype. The caller gives zeros in the first call, and in
each later one the `cache_out` of the call before; docs/decoders.md has this loop. `states` names the states to
change; all by default.

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
from anesurgery.rewriting.passes import cache_example


@dataclass(frozen=True)
class CacheAsIo(Pass):
    """Replaces states by inputs and outputs, in every function that has them."""

    name = "cache_as_io"
    follows = ("add_cache", "join_states", "pad_state")
    states: Sequence[str] | None = None
    """Names of the states; all by default."""

    def requires(self, program: Program) -> Refusal | None:
        """Return why the pass does not apply: the model has no states.

        Raises:
            UnknownName: `states` names a state that does not exist.
        """
        states = stored_states.shared_shapes(list(program.functions.values()))
        for name in self.states or ():
            if name not in states:
                raise UnknownName("state", name, states)
        return None if states else Refusal("the model has no states")

    def run(self, program: Program, session: Session) -> None:
        """Edit every function; refuse states that are used inside a branch or loop."""
        functions = list(program.functions.values())
        names = list(self.states or stored_states.shared_shapes(functions))
        for name in list(names):
            if (refusal := stored_states.refusal_within_block(functions, name)) is not None:
                session.refuse(self.name, refusal)
                names.remove(name)
        for name in names:
            for function, state in stored_states.functions_with_state(program, name):
                shape, dtype = stored_states.held_shape(state), stored_states.held_type(state)
                with an.GraphEdits(self, session, function) as edits:
                    form = _StateAsValue(edits.new_input(name, shape, dtype), f"{name}_out")
                    stored_states.StoredStates(edits, {state: form}).edit()
            words = f"give {name} as an input, zeros at first, and {name}_out of each call to the next one"
            change = an.InterfaceChange(words, (name, f"{name}_out"), call=_call_with_empty_caches(names))
            session.declare(self.name, name, change, (), ())


def _call_with_empty_caches(names: Sequence[str]) -> Any:
    """Return a function that calls the new model with zeros as caches and leaves the caches out of the outputs.

    Checks compare its result with one call of the old model, whose states begin with zeros too.
    """

    def call(model: Any, values: an.Values, precision: str) -> an.Values:
        caches = {n: v for n, v in function_of(model, None).inputs.items() if n in names}
        empty = {n: np.zeros(an.static_shape(v) or (), an.np_dtype(v)) for n, v in caches.items()}
        outputs = run(model, {**values, **empty}, precision=precision)
        return {n: v for n, v in outputs.items() if n not in {f"{name}_out" for name in caches}}

    return call


@dataclass
class _StateAsValue(stored_states.Form):
    """Replaces the reads and writes of one state by a plain value, from the new input to the new output."""

    value: Var
    """The current content: the new input, and after each write the value that was written."""
    output: str
    """The name of the output that returns the last content."""

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

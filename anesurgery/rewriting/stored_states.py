"""Change how states are held, in every function that has them; all other ops still read the same numbers.

For example, a state of (8, 60) may be held as (8, 64). A *stored* value has the new form: what is read from the
state, what `slice_update` makes of that (unless another op reads it), and what is written back. A `Form` builds
these. Any other op that reads one gets the *plain* value, the one before the change: here a slice of 60. It is
built once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from anesurgery.errors import Refusal
from anesurgery.mil import Function, Operation, Program, Var, consumers, nested_ops, types
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.graph_edits import GraphEdits

Shape = tuple[int, ...]


def states_of(function: Function) -> dict[str, Var]:
    """Return the states of a function by name."""
    return {name: var for name, var in function.inputs.items() if types.is_state(var.sym_type)}


def held_shape(state: Var) -> Shape:
    """Return the shape of what a state holds."""
    return tuple(int(d) for d in state.sym_type.wrapped_type().get_shape())


def held_type(state: Var) -> Any:
    """Return the element type of what a state holds, as `new_input` takes it."""
    return state.sym_type.wrapped_type().get_primitive()


def state_of(op: Operation) -> Var | None:
    """Return the state that an op reads or writes; None of other ops."""
    state = op.inputs.get("state", op.inputs.get("input"))
    return state if isinstance(state, Var) and types.is_state(state.sym_type) else None


def functions_with_state(program: Program, name: str) -> Iterator[tuple[Function, Var]]:
    """Yield each function that has a state of a name, and that state."""
    for function in program.functions.values():
        if (state := states_of(function).get(name)) is not None:
            yield function, state


def refusal_within_block(functions: Iterable[Function], name: str) -> Refusal | None:
    """Return why a state cannot get another form: an op inside a branch or a loop uses it."""
    for function in functions:
        state = states_of(function).get(name)
        for outer in function.operations:
            for op in nested_ops(outer):
                if state is not None and state_of(op) is state:
                    return Refusal(f"the state {name} is used inside a {outer.op_type}", op)
    return None


class Form:
    """How a state is held. `StoredStates` calls its methods; each builds the value that an op makes then."""

    def read(self, mb: Builder, op: Operation) -> Var:
        """Build the stored value that a `read_state` gives."""
        raise NotImplementedError

    def update(self, mb: Builder, op: Operation, stored: Var) -> Var:
        """Build the stored value that a `slice_update` of a stored value gives."""
        raise NotImplementedError

    def write(self, mb: Builder, op: Operation, stored: Var) -> Var:
        """Build the stored value that a `coreml_update_state` gives, which writes `stored`."""
        raise NotImplementedError

    def plain(self, mb: Builder, stored: Var) -> Var:
        """Build the plain value of a stored one; by default they are the same."""
        return stored

    def stored(self, mb: Builder, value: Var) -> Var:
        """Build the stored value of a plain one, which was not read from the state; by default the same."""
        return value

    def end(self, edits: GraphEdits) -> None:
        """Finish a function, after all its ops were visited and before dead ops are removed."""


@dataclass
class StoredStates:
    """The states of one function that get another form."""

    edits: GraphEdits
    forms: dict[Var, Form]
    """State -> how it is held."""
    _stored: dict[Var, tuple[Var, Form]] = field(default_factory=dict)
    """Old value -> (the stored value in its place, the form of its state)."""
    _plain: dict[Var, Var] = field(default_factory=dict)
    """Old value -> the plain value in its place."""

    def edit(self) -> None:
        """Edit the function, op by op, so that nothing reads the old states any more."""
        old: list[Operation] = []
        for op in list(self.edits.function.operations):
            mb = self.edits.before(op)
            if self.try_to_store(mb, op):
                old.append(op)
            else:
                self.read_plain(mb, op)
        for output in list(self.edits.function.outputs):
            if (value := self.plain(output)) is not output:
                if value.op is None:  # an input keeps its name
                    value = self.edits.last().identity(x=value, name=f"{output.name}_given")
                self.edits.replace_output(output, value)
                self.edits.take_name(output, value)
        for form in self.forms.values():
            form.end(self.edits)
        for op in reversed(old):  # readers first; `end` may have removed some
            if op.enclosing_block is not None:
                op.enclosing_block.remove_ops([op])
        self.edits.remove()

    def try_to_store(self, mb: Builder, op: Operation) -> bool:
        """Build the stored value of an op that reads, updates or writes a state, and return whether it does."""
        if op.op_type == "read_state" and op.input in self.forms:
            form = self.forms[op.input]
            result = form.read(mb, op)
        elif op.op_type == "slice_update" and op.x in self._stored and not _is_read_as_value(op):
            stored, form = self._stored[op.x]
            self.read_plain(mb, op, but="x")
            result = form.update(mb, op, stored)
        elif op.op_type == "coreml_update_state" and op.state in self.forms:
            form = self.forms[op.state]
            stored = self._stored[op.value][0] if op.value in self._stored else form.stored(mb, op.value)
            result = form.write(mb, op, stored)
        else:
            return False
        self._stored[op.outputs[0]] = (result, form)
        return True

    def read_plain(self, mb: Builder, op: Operation, but: str = "") -> None:
        """Let an op, and those in its blocks, read plain values, except its input `but`."""
        for each_op in (op, *nested_ops(op)):
            self._set_inputs(mb, each_op, but)
            for block in each_op.blocks:
                if any(v in self._stored for v in block.outputs):
                    block.set_outputs([self.plain(v, mb) for v in block.outputs])

    def _set_inputs(self, mb: Builder, op: Operation, but: str) -> None:
        """Let one op read plain values, except its input `but`."""
        changed: dict[str, object] = {}
        for name, value in op.inputs.items():
            if name == but:
                continue
            if isinstance(value, (list, tuple)) and any(v in self._stored for v in value):
                changed[name] = tuple(self.plain(v, mb) for v in value)
            elif isinstance(value, Var) and value in self._stored:
                changed[name] = self.plain(value, mb)
        if changed:
            op.set_inputs(no_check_var_types=True, **changed)

    def plain(self, var: Var, mb: Builder | None = None) -> Var:
        """Return the plain value in the place of an old one; a value that is not stored is itself."""
        if var not in self._stored:
            return var
        if var not in self._plain:
            stored, form = self._stored[var]
            self._plain[var] = form.plain(mb or self.edits.last(), stored)
        return self._plain[var]


def _is_read_as_value(op: Operation) -> bool:
    """Is an update read as a value, and not only written to the state?"""
    return any(r.op_type not in ("coreml_update_state", "slice_update") for r in consumers(op.outputs[0]))


def shared_shapes(functions: Sequence[Function]) -> dict[str, Shape]:
    """Return the shapes of all states by name; functions of one model share them."""
    return {name: held_shape(var) for f in functions for name, var in states_of(f).items()}

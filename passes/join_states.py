"""Stack states of the same shape (the first axis may differ) into one state.

Each old state has its own rows of the new one, in the order of the inputs. Reads slice these rows, and updates
write to them. `joined` is the name of the new state.

Refuses when no two states have the same type and the same other axes in each function, when an update starts
from something other than the current content of the state, and when a branch or a loop uses one of them.

Why it helps: one state works where two fail with 0x1d (reported: john-rocky/CoreML-LLM, M-series, macOS
26.0.1); two work on A19.

Grade: none: the interface changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Pass, Program, Refusal, Session, Var, mb
from anesurgery.regions.small_builds import cut
from anesurgery.rewriting import stored_states


@dataclass(frozen=True)
class JoinStates(Pass):
    """Several states in one."""

    name = "join_states"
    follows = ("add_cache",)
    joined: str = "joined_state"
    """The name of the new state."""

    def run(self, program: Program, session: Session) -> None:
        """Join the first group of states that agree, in all functions alike."""
        functions = list(program.functions.values())
        names = _group(functions[0])
        if len(names) < 2 or any(_group(f) != names for f in functions):
            session.refuse(self.name, "no two states agree in all but their first axis, in every function")
            return
        for function in functions:
            reasons = [stored_states.refusal_within_block([function], name) for name in names]
            if (
                refusal := next((r for r in (*reasons, _why_not_joined(function)) if r is not None), None)
            ) is not None:
                session.refuse(self.name, refusal)
                return
        for function in functions:
            with an.GraphEdits(self, session, function) as edits:
                self.join(edits, names)
        words = f"the states {', '.join(names)} are rows of one, {self.joined}"
        change = an.InterfaceChange(words, (*names, self.joined))
        session.declare(self.name, self.joined, change, names, [self.joined])

    def join(self, edits: an.GraphEdits, names: Sequence[str]) -> None:
        """Join the states of one function."""
        old = [stored_states.states_of(edits.function)[name] for name in names]
        shapes = [stored_states.held_shape(v) for v in old]
        whole = (sum(s[0] for s in shapes), *shapes[0][1:])
        new = edits.new_input(self.joined, whole, stored_states.held_type(old[0]), state=True)
        first = np.cumsum([0, *(s[0] for s in shapes)])
        forms: dict[Var, stored_states.Form] = {
            v: _Rows(new, shape, int(at)) for v, shape, at in zip(old, shapes, first[:-1], strict=True)
        }
        stored_states.StoredStates(edits, forms).edit()
        for name in names:
            edits.drop_input(name)


def _why_not_joined(function: an.Function) -> Refusal | None:
    """Return why an update may start from another content than the joined state has; None if none does."""
    writes: Counter[Any] = Counter()
    read: dict[Var, tuple[Any, int]] = {}
    for op in function.operations:
        state = stored_states.state_of(op)
        if op.op_type == "coreml_update_state":
            if op.value in read and read[op.value] != (state, writes[state]):
                return Refusal("it writes what was read of another state, or before another write", op)
            writes[state] += 1
        if op.op_type in ("read_state", "coreml_update_state"):
            read[op.outputs[0]] = (state, writes[state])
        elif op.op_type == "slice_update" and op.x in read:
            state, version = read[op.x]
            if op.x.op.op_type == "slice_update" or version != writes[state]:
                return Refusal("it updates what is not in the state at that time", op)
            read[op.outputs[0]] = (state, version)
    return None


def _group(function: an.Function) -> list[str]:
    """Return the names of the first states that agree in type and all axes but the first."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, var in stored_states.states_of(function).items():
        shape = stored_states.held_shape(var)
        if len(shape) > 1:
            groups.setdefault((shape[1:], an.dtype_name(var)), []).append(name)
    return next((names for names in groups.values() if len(names) > 1), [])


@dataclass
class _Rows(stored_states.Form):
    """Some rows of the joined state."""

    state: Var
    shape: tuple[int, ...]
    first: int

    def read(self, mb: Builder, op: an.Operation) -> Var:
        return mb.read_state(input=self.state, name=f"{op.name}_joined")

    def update(self, mb: Builder, op: an.Operation, stored: Var) -> Var:
        inputs, others = an.op_inputs(op), len(self.shape) - 1
        for name, mask, open_end in (("begin", "begin_mask", 0), ("end", "end_mask", self.shape[0])):
            masked = an.constant(op.inputs.get(mask))
            shift = self.first
            if masked is not None and masked[0]:  # all rows of the old state, which are some of the joined one
                inputs[mask] = np.array([False, *masked[1:]], bool)
                keep = np.array([0, *[1] * others], np.int32)
                inputs[name] = mb.mul(x=op.inputs[name], y=keep, name=f"{op.name}_{name}_rest")
                shift += open_end
            if shift:
                rows = np.array([shift, *[0] * others], np.int32)
                inputs[name] = mb.add(x=inputs[name], y=rows, name=f"{op.name}_{name}")
        inputs["x"] = mb.read_state(input=self.state, name=f"{op.name}_before")  # others may have written since
        return mb.slice_update(**inputs, name=f"{op.name}_joined")

    def write(self, mb: Builder, op: an.Operation, stored: Var) -> Var:
        return mb.coreml_update_state(state=self.state, value=stored, name=f"{op.name}_joined")

    def plain(self, mb: Builder, stored: Var) -> Var:
        return cut(mb, stored, 0, self.first, self.shape[0], name=f"{stored.name}_rows")

    def stored(self, mb: Builder, value: Var) -> Var:
        rest = list(self.shape[1:])
        begin = np.array([self.first, *[0] * len(rest)], np.int32)
        end = np.array([self.first + self.shape[0], *rest], np.int32)
        held = mb.read_state(input=self.state, name=f"{value.name}_before")
        return mb.slice_update(x=held, update=value, begin=begin, end=end, name=f"{value.name}_in_rows")


@an.example(
    mb.TensorSpec((1, 4), an.types.fp16),
    mb.TensorSpec((1,), an.types.int32),
    mb.StateTensorSpec((8, 4), dtype=an.types.fp16),
    mb.StateTensorSpec((8, 4), dtype=an.types.fp16),
    opset="iOS18",
)
def example(n: Var, at: Var, k: Var, v: Var) -> Var:
    """Two caches of eight tokens, of which one row is written."""
    b = mb.concat(values=(at, np.array([0], np.int32)), axis=0, name="b")
    e = mb.add(x=b, y=np.array([1, 4], np.int32), name="e")
    writes = []
    for name, state in (("k", k), ("v", v)):
        held = mb.read_state(input=state, name=f"{name}h")
        u = mb.slice_update(x=held, update=n, begin=b, end=e, name=f"{name}u")
        writes.append(mb.coreml_update_state(state=state, value=u, name=f"{name}a"))
    return mb.add(x=writes[0], y=writes[1], name="sum")

"""Pad the last axis of a state to a multiple of 32.

The added elements hold zeros: updates are padded, and reads are cut back, so the values stay the same.

Refuses when the width is already a multiple, when a write covers only a part of the last axis, and when a
branch or a loop uses the state.

Why it helps: a state 270 wide failed on the ANE, one of 256 ran (measured, M4, macOS 15.2: coremltools issue
2631).

Grade: none: the interface changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Pass, Program, Refusal, Session, Var
from anesurgery.regions.small_builds import again, cut
from anesurgery.rewriting import stored_states
from anesurgery.rewriting.passes import cache_example


@dataclass(frozen=True)
class PadState(Pass):
    """States with a width that the ANE takes."""

    name = "pad_state"
    follows = ("add_cache", "join_states")
    multiple: int = an.option(32, least=2)
    """What the width becomes a multiple of."""

    def run(self, program: Program, session: Session) -> None:
        """Pad each state, in all functions alike."""
        for name, shape in stored_states.shared_shapes(list(program.functions.values())).items():
            missing = -shape[-1] % self.multiple
            refusal = self.against(program, name) if missing else None
            if refusal is not None:
                session.refuse(self.name, refusal)
            if not missing or refusal is not None:
                continue
            wide = (*shape[:-1], shape[-1] + missing)
            for function, old in stored_states.functions_with_state(program, name):
                with an.GraphEdits(self, session, function) as edits:
                    new = edits.new_input(name, wide, stored_states.held_type(old), state=True)
                    stored_states.StoredStates(edits, {old: _Padded(new, shape, missing)}).edit()
            words = f"the state {name} is {'x'.join(map(str, wide))}; the last {missing} of its axis hold zeros"
            session.declare(self.name, name, an.InterfaceChange(words, (name,)), (), ())

    def against(self, program: Program, name: str) -> Refusal | None:
        """Why a state cannot be padded."""
        functions = list(program.functions.values())
        if (refusal := stored_states.refusal_within_block(functions, name)) is not None:
            return refusal
        stored: set[Var] = set()
        for op in (op for function in functions for op in function.operations):
            state = stored_states.state_of(op)
            updates = op.op_type == "slice_update" and op.x in stored
            if updates and op.update.shape[-1] != op.x.shape[-1]:
                return Refusal("a write covers a part of the last axis", op)
            if updates or (state is not None and state.name == name):
                stored.update(op.outputs)
        return None


@dataclass
class _Padded(stored_states.Form):
    """A state whose last axis ends with zeros."""

    state: Var
    shape: tuple[int, ...]
    missing: int

    def read(self, mb: Builder, op: an.Operation) -> Var:
        return mb.read_state(input=self.state, name=f"{op.name}_wide")

    def update(self, mb: Builder, op: an.Operation, stored: Var) -> Var:
        masked = an.constant(op.inputs.get("end_mask"))
        mask = np.array([False] * op.x.rank if masked is None else masked, bool)
        mask[-1] = True
        changed = {"x": stored, "update": self.stored(mb, op.update), "end_mask": mask}
        return again(mb, op, **changed, name=f"{op.name}_wide")

    def write(self, mb: Builder, op: an.Operation, stored: Var) -> Var:
        return mb.coreml_update_state(state=self.state, value=stored, name=f"{op.name}_wide")

    def plain(self, mb: Builder, stored: Var) -> Var:
        return cut(mb, stored, len(self.shape) - 1, 0, self.shape[-1], name=f"{stored.name}_cut")

    def stored(self, mb: Builder, value: Var) -> Var:
        ends = [0] * (2 * value.rank - 1) + [self.missing]
        return mb.pad(x=value, pad=ends, constant_val=an.np_dtype(value).type(0), name=f"{value.name}_wide")


example = cache_example

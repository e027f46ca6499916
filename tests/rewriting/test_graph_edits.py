"""`GraphEdits`: what passes do that find their own places keeps names and types, and is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from anesurgery.authoring import Function, GraphEdits, Pass, Program, Session, Var, mb
from anesurgery.checking.grades import Grade
from anesurgery.errors import PassError, ProofError
from anesurgery.mil import ct, types
from anesurgery.passes.fold_constants import FoldConstants
from anesurgery.passes.pad_state import PadState
from anesurgery.testing import apply_pass, assert_same_numbers, text_of

Edit = Callable[[GraphEdits], None]


@dataclass(frozen=True)
class Edited(Pass):
    """A pass that does one thing."""

    name: ClassVar[str] = "edited"
    edit: Edit

    def run(self, program: Program, session: Session) -> None:
        with GraphEdits(self, session, program.functions["main"]) as edits:
            self.edit(edits)


def small() -> Program:
    """y = relu(x) + 1, and relu(x) is an output too."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3), types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> tuple[Var, Var]:
        r = mb.relu(x=x, name="r")
        return r, mb.add(x=r, y=np.float16(1), name="y")

    made: Program = program
    return made


def value(function: Function, name: str) -> Var:
    return next(v for op in function.operations for v in op.outputs if v.name == name)


def negated_twice(edits: GraphEdits, back: float = -1.0) -> None:
    """Negate a value, and negate that: it is read by all that read the value, but for its own operand."""
    old = value(edits.function, "r")
    mb = edits.after(old)
    new = mb.mul(x=mb.mul(x=old, y=np.float16(-1)), y=np.float16(back))
    edits.compare("r", (old, new))
    edits.replace(old, new)
    edits.record("r")


def test_a_value_that_is_made_of_the_old_one_replaces_it_elsewhere() -> None:
    after, session = apply_pass(Edited(negated_twice), small())
    assert text_of(after) == "\n".join(
        [
            "main(%x: 2x3xfp16) {",
            "  %r_replaced: 2x3xfp16 = relu(x=%x)",
            "  %r_edited_mul: 2x3xfp16 = mul(x=%r_replaced, y=-1)",
            "  %r: 2x3xfp16 = mul(x=%r_edited_mul, y=-1)",
            "  %y: 2x3xfp16 = add(x=%r, y=1)",
            "  return %r, %y",
            "}",
        ]
    )
    assert_same_numbers(small(), after, rtol=0)
    (change,) = session.changes
    assert change.after == ("mul r_edited_mul", "mul r")
    assert change.proof is not None
    assert change.proof.grade >= Grade.PROVED


def test_a_wrong_edit_is_refused() -> None:
    with pytest.raises(ProofError, match="pass edited at r: old and new differ"):
        apply_pass(Edited(lambda edits: negated_twice(edits, 1.0)), small())


def test_new_ops_have_the_scopes_of_their_place() -> None:
    program = small()
    for op in program.functions["main"].operations:
        op.scopes = {"place": [op.name]}
    Edited(negated_twice).run(program, Session())
    made = value(program.functions["main"], "r_edited_mul").op
    assert made is not None
    assert made.scopes == {"place": ["r"]}


def narrower(edits: GraphEdits) -> None:
    old = value(edits.function, "r")
    edits.replace(old, edits.after(old).reduce_sum(x=old, axes=[1]))


def input_and_output(edits: GraphEdits) -> None:
    x = edits.function.inputs["x"]
    edits.replace_output(value(edits.function, "r"), x)
    edits.replace(x, edits.first().relu(x=x))


def still_read(edits: GraphEdits) -> None:
    edits.drop_input("x")


def backwards(edits: GraphEdits) -> None:
    ops = list(edits.function.operations)
    edits.reorder(ops[::-1], ops)


def incomplete(edits: GraphEdits) -> None:
    ops = list(edits.function.operations)
    edits.reorder(ops[:-1], ops[:1])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (narrower, "%r is 2x3xfp16, its replacement 2xfp16"),
        (input_and_output, "%x is an input and an output, and must stay"),
        (still_read, "the input %x cannot go: %x is still read"),
        (backwards, "is out of order"),
        (incomplete, "1 ops are left out of the order"),
    ],
)
def test_what_cannot_be_done_is_said(edit: Edit, words: str) -> None:
    with pytest.raises(PassError, match=words):
        apply_pass(Edited(edit), small())


def test_inputs_and_outputs_come_and_go() -> None:
    def edit(edits: GraphEdits) -> None:
        one = edits.new_input("one", (2, 3), types.fp16)
        edits.replace(edits.function.inputs["x"], one)
        edits.drop_input("x")
        edits.replace_output(value(edits.function, "y"))
        edits.new_output("same", one)
        assert [op.op_type for op in edits.remove() if op.op_type != "const"] == ["add"]

    after, _ = apply_pass(Edited(edit), small())
    assert text_of(after).splitlines() == [
        "main(%one: 2x3xfp16) {",
        "  %r: 2x3xfp16 = relu(x=%one)",
        "  %same: 2x3xfp16 = identity(x=%one)",
        "  return %r, %same",
        "}",
    ]


def test_an_output_that_a_state_held_keeps_its_name() -> None:
    state = mb.StateTensorSpec((8, 4), types.fp16)

    @mb.program(input_specs=[mb.TensorSpec((8, 4), types.fp16), state], opset_version=ct.target.iOS18)
    def program(x: Var, cache: Var) -> Var:
        new = mb.slice_update(x=mb.read_state(input=cache), update=x, begin=[0, 0], end=[8, 4], name="new")
        mb.coreml_update_state(state=cache, value=new)
        return new

    after, session = apply_pass(PadState(), program)
    assert session.changes
    assert [v.name for v in after.functions["main"].outputs] == ["new"]


def test_a_folded_number_stays_a_number() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        size = mb.gather(x=mb.shape(x=x), indices=np.int32(1), axis=0, name="size")
        return mb.mul(x=x, y=mb.cast(x=size, dtype="fp16", name="n"), name="y")

    after, session = apply_pass(FoldConstants(), program)
    assert session.changes
    (product,) = (op for op in after.functions["main"].operations if op.op_type == "mul")
    assert product.y.shape == ()
    assert product.y.val == 4

"""Copies of programs: the same text, nothing shared that an edit touches, and valid for the host."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from anesurgery import registry
from anesurgery.files.copying import copy_program
from anesurgery.loading import load
from anesurgery.mil import Program, Var, blocks, mb, new_symbol, walk_ops
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session
from anesurgery.semantics.inference import FixedShapes
from anesurgery.testing import assert_same_numbers
from anesurgery.text import to_text

CONTROL = ("unroll_loop", "unroll_recurrent", "fix_shapes", "join_states", "fold_constants", "split_conv3d")
"""Passes whose examples hold nested blocks, lists, dynamic shapes and states."""


def example(name: str) -> Program:
    made: Program = import_module(f"anesurgery.passes.{name}").example()
    return made


@pytest.mark.parametrize("name", CONTROL)
def test_an_edit_of_the_copy_leaves_the_original(name: str) -> None:
    program = example(name)
    before, copy = to_text(program), copy_program(program)
    assert to_text(copy) == before
    copy.validate()
    session = Session()
    run_pass(registry.make_pass(name), copy, session)
    assert session.changes
    assert to_text(program) == before
    program.validate()


@pytest.mark.parametrize("name", CONTROL)
def test_nothing_that_an_edit_touches_is_shared(name: str) -> None:
    program = example(name)
    copy = copy_program(program)
    assert not {id(op) for op in walk_ops(program)} & {id(op) for op in walk_ops(copy)}
    assert not {id(b) for b in blocks(program)} & {id(b) for b in blocks(copy)}
    values = [{id(v) for op in walk_ops(p) for v in op.outputs} for p in (program, copy)]
    assert not values[0] & values[1]
    ours = set(walk_ops(copy))
    for op in ours:
        assert all(v.op is op and set(v.child_ops) <= ours for v in op.outputs)
        assert op.enclosing_block in set(blocks(copy))


def test_each_length_has_ends_of_its_own() -> None:
    """Coremltools overwrites a negative end, while it infers shapes, with what it means at one length."""

    @mb.program(input_specs=[mb.TensorSpec((1, new_symbol(), 4))])
    def program(x: Var) -> Var:
        ends = {"begin": [0, 0, 0], "end": [1, -1, 4], "end_mask": [True, False, True]}
        return mb.slice_by_index(x=mb.relu(x=x), **ends)

    for length in (9, 5, 7):
        twin = copy_program(program)
        for again in (length + 1, length):
            copy = copy_program(twin)
            FixedShapes({"x": (1, again, 4)}, 1).fix(copy.functions["main"])
            assert copy.functions["main"].outputs[0].shape == (1, again - 1, 4)
    assert "end=[1, -1, 4]" in to_text(program)


def test_a_specification_given_twice_makes_two_inputs() -> None:
    program = mb.program(input_specs=[mb.TensorSpec((4,))] * 2)(lambda x, y: mb.add(x=x, y=y))

    copy = copy_program(program)
    assert {name: v.name for name, v in copy.functions["main"].inputs.items()} == {"x": "x", "y": "y"}
    copy.validate()


def test_a_copy_of_a_real_model_computes_the_same(corpus: Path) -> None:
    program = load(corpus / "silero_unified_palette_4bit.mlpackage").program
    assert_same_numbers(program, copy_program(program))

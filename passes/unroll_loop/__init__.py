"""Unroll a loop with a constant number of rounds, and replace a list by the values that were written to it.

The pass computes the counter of the loop, and thereby whether a round runs. Ops that do not change from round
to round are written once. For a `cond` with a run-time condition, both branches are computed and one is
selected. An element read from a list is the value that was written there, or a slice of it; the same holds for
the rows of a tensor that a loop fills by `scatter`, as a GRU of torch does, which are joined once at the end.

Refuses when the number of rounds depends on an input, when it is above `max_rounds`, when more than `most_ops`
ops would be written, when a nested op draws random numbers or updates a state, when a selected branch gives a
list or a symbolic shape, and when an element of a list is read that was not written at a known index.

Why it helps: control flow and lists stay on the CPU (hollance/neural-engine, smpanaro/more-ane-transformers,
reported). What unrolling gains was not measured.

Grade: bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Program, Refusal, Rewrite, Var, mb
from anesurgery.facts.loops import MOST_UNROLLED, MOST_WRITTEN
from anesurgery.mil import reads
from anesurgery.passes.unroll_loop.inlining import Inliner
from anesurgery.regions.small_builds import again, joined

READERS = an.ops.names("list_read list_gather list_length")


@dataclass(frozen=True)
class UnrollLoop(Rewrite):
    """`while_loop`, `cond` and lists become the ops that run."""

    name = "unroll_loop"
    kinds = an.ops.CONTROL | READERS
    refines = True
    """The elements of a list are declared with sizes of their own; what is written has those of the program."""
    max_rounds: int = an.option(MOST_UNROLLED, least=1)
    """Most rounds of a loop that is unrolled."""
    most_ops: int = an.option(MOST_WRITTEN, least=1)
    """Most ops that a loop may become."""

    def check(self, m: Match) -> Match | Refusal:
        """Match known rounds, and elements that were written at known places."""
        op = m.root
        if op.op_type in READERS:
            elements = list_length(op.ls) if op.op_type == "list_length" else elements_read(op)
            return elements if isinstance(elements, Refusal) else m.bind(elements=elements)
        Inliner(None, self.max_rounds, self.most_ops).inline_control(op)
        return m.bind(ops=(op, *_list_makers(op)))

    def rewrite(self, mb: Builder, m: Match) -> Any:
        """Build the ops of all rounds; return a value for each output."""
        op = m.root
        if op.op_type == "list_length":
            return mb.const(val=np.int32(m.elements))
        if op.op_type in READERS:
            return _gathered(mb, m.elements, op.op_type == "list_gather")
        inliner = Inliner(mb, self.max_rounds, self.most_ops)
        values = [inliner.read(v) for v in inliner.inline_control(op)]
        pairs: dict[Var, Var] = {}
        for old, new in zip(op.outputs, values, strict=True):
            if an.types.is_list(old.sym_type):
                pairs |= {r.outputs[0]: again(mb, r, ls=new) for r in _readers(old)}
            pairs[old] = new if isinstance(new, Var) else mb.const(val=new)
        return pairs


def _readers(ls: Var) -> list[an.Operation]:
    """Return the ops in the block of a list that read elements at constant indices."""
    block = ls.op.enclosing_block if ls.op is not None else None
    return [
        r
        for r in an.consumers(ls)
        if r.op_type in READERS
        and r.enclosing_block is block
        and all(an.constant(v) is not None for n, v in r.inputs.items() if n != "ls" and v is not None)
    ]


def _list_makers(op: an.Operation) -> list[an.Operation]:
    """Return the ops that make the lists which a loop reads."""
    makers: dict[an.Operation, None] = {}
    waiting = [v for v in reads(op) if an.types.is_list(v.sym_type)]
    while waiting:
        maker = waiting.pop().op
        if maker is not None and maker not in makers and maker.op_type in an.ops.LISTS:
            makers[maker] = None
            waiting += [v for v in reads(maker) if an.types.is_list(v.sym_type)]
    return list(makers)


def _gathered(mb: Builder, elements: Sequence[Element], stacked: bool) -> Var:
    """Return elements of a list: stacked along a new first axis, or the single one."""
    if not stacked:
        return _row(mb, *elements[0], squeezed=True)
    values = {element.value for element in elements}
    first, rows = elements[0].value, [element.row for element in elements]
    if len(values) == 1 and rows[0] is not None and rows == list(range(int(first.shape[0]))):
        return first
    if all(row is None for row in rows):
        return mb.stack(values=tuple(element.value for element in elements), axis=0)
    return joined(mb, [_row(mb, *element, squeezed=False) for element in elements], 0)


def _row(mb: Builder, value: Var, row: int | None, squeezed: bool) -> Var:
    """Return one element, with or without a first axis of length 1."""
    if row is None:
        return value if squeezed else mb.expand_dims(x=value, axes=[0])
    if value.shape[0] != 1:
        rest = [0] * (value.rank - 1)
        value = mb.slice_by_size(x=value, begin=[row, *rest], size=[1, *(-1 for _ in rest)])
    return mb.squeeze(x=value, axes=[0]) if squeezed else value


class Element(NamedTuple):
    """The source of an element of a list."""

    value: Var
    row: int | None
    """The row of the value that is the element; None if the element is the whole value."""


def list_length(ls: Var) -> int | Refusal:
    """Return the length of a list."""
    op = ls.op
    if op is None or op.op_type not in an.ops.LISTS:
        return Refusal(f"%{ls.name} comes from {'outside' if op is None else op.op_type}")
    at = an.constant(op.inputs[{"make_list": "init_length", "list_write": "index"}.get(op.op_type, "indices")])
    if at is None:
        return Refusal(f"the places written of %{ls.name} are dynamic")
    if op.op_type == "make_list":
        return int(at)
    before = list_length(op.ls)
    return before if isinstance(before, Refusal) else max(before, int(np.max(at)) + 1)


def elements_read(op: an.Operation) -> list[Element] | Refusal:
    """Return the sources of the elements that an op reads, or why they are not known."""
    at = an.constant(op.inputs["index" if op.op_type == "list_read" else "indices"])
    if at is None:
        return Refusal(f"the places read of %{op.ls.name} are dynamic")
    read: list[Element] = []
    for i in np.ravel(at):
        if isinstance(one := _element(op.ls, int(i)), Refusal):
            return one
        read.append(one)
    return read


def _element(ls: Var, at: int) -> Element | Refusal:
    """Return the source of the last write to one element."""
    op = ls.op
    if op is not None and op.op_type in ("list_write", "list_scatter"):
        places = an.constant(op.inputs["index" if op.op_type == "list_write" else "indices"])
        if places is None:
            return Refusal(f"the places written of %{ls.name} are dynamic")
        written = [int(i) for i in np.ravel(places)]
        if min(written, default=0) < 0:
            return Refusal(f"an element of %{ls.name} is written by its place from the end")
        if at not in written:
            return _element(op.ls, at)
        row = len(written) - 1 - written[::-1].index(at)  # of the last write
        return Element(op.value, row if op.op_type == "list_scatter" else None)
    if op is not None and op.op_type == "make_list":
        return Refusal(f"element {at} of %{ls.name} was never written")
    return Refusal(f"%{ls.name} comes from {'outside' if op is None else op.op_type}")


def example() -> Program:
    """Two rounds of a loop that writes each row of its input, times its number, into a list."""

    def go_on(i: Var, ls: Var) -> Var:
        return mb.less(x=i, y=np.int32(2), name="more")

    @mb.program(input_specs=[mb.TensorSpec((2, 3))])
    def program(x: Var) -> Var:
        rows = mb.list_scatter(
            ls=mb.make_list(init_length=2, dynamic_length=False, elem_shape=(3,), name="empty"),
            indices=np.arange(2, dtype=np.int32),
            value=x,
            name="rows",
        )

        def body(i: Var, ls: Var) -> tuple[Var, Var]:
            row = mb.relu(x=mb.list_read(ls=rows, index=i, name="row"), name="kept")
            following = mb.add(x=i, y=np.int32(1), name="next")
            return following, mb.list_write(ls=ls, index=i, value=row, name="written")

        start = mb.const(val=np.int32(0), name="start")
        start_list = mb.make_list(init_length=2, dynamic_length=False, elem_shape=(3,), name="made")
        _, ls = mb.while_loop(_cond=go_on, _body=body, loop_vars=(start, start_list), name="loop")
        return mb.list_gather(ls=ls, indices=np.arange(2, dtype=np.int32), name="y")

    return program

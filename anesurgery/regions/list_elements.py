"""Where the elements of a list were written, where the places are constant."""

from __future__ import annotations

import numpy as np

from anesurgery.errors import Refusal
from anesurgery.mil import Operation, Var, constant
from anesurgery.ops import LISTS

Element = tuple[Var, "int | None"]
"""Where an element of a list comes from: a value, or a row of one."""


def length(ls: Var) -> int | Refusal:
    """How long a list is."""
    op = ls.op
    if op is None or op.op_type not in LISTS:
        return Refusal(f"%{ls.name} comes from {'outside' if op is None else op.op_type}")
    at = constant(op.inputs[{"make_list": "init_length", "list_write": "index"}.get(op.op_type, "indices")])
    if at is None:
        return Refusal(f"the places written of %{ls.name} are dynamic")
    if op.op_type == "make_list":
        return int(at)
    before = length(op.ls)
    return before if isinstance(before, Refusal) else max(before, int(np.max(at)) + 1)


def elements(op: Operation) -> list[Element] | Refusal:
    """The elements that an op reads of a list, or why they are not known."""
    at = constant(op.inputs["index" if op.op_type == "list_read" else "indices"])
    if at is None:
        return Refusal(f"the places read of %{op.ls.name} are dynamic")
    read: list[Element] = []
    for i in np.ravel(at):
        if isinstance(one := _element(op.ls, int(i)), Refusal):
            return one
        read.append(one)
    return read


def _element(ls: Var, at: int) -> Element | Refusal:
    """Where one element was written last."""
    op = ls.op
    if op is not None and op.op_type in ("list_write", "list_scatter"):
        places = constant(op.inputs["index" if op.op_type == "list_write" else "indices"])
        if places is None:
            return Refusal(f"the places written of %{ls.name} are dynamic")
        written = [int(i) for i in np.ravel(places)]
        if at not in written:
            return _element(op.ls, at)
        row = len(written) - 1 - written[::-1].index(at)
        return op.value, row if op.op_type == "list_scatter" else None
    if op is not None and op.op_type == "make_list":
        return Refusal(f"element {at} of %{ls.name} was never written")
    return Refusal(f"%{ls.name} comes from {'outside' if op is None else op.op_type}")

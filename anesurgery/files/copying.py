"""Copies of programs to try steps on: the graph is copied as it is, and no op is inferred anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import lru_cache
from typing import Any, cast

import numpy as np

from anesurgery.mil import Block, Function, Operation, Program, Var

LARGEST_RANK = 8
"""Arrays of no more elements are copied."""


_NOTED: ContextVar[dict[Any, Any] | None] = ContextVar("noted", default=None)


@contextmanager
def origins(noted: dict[Any, Any]) -> Iterator[None]:
    """Note within of which op or value each copy was made, through copies of copies."""
    token = _NOTED.set(noted)
    try:
        yield
    finally:
        _NOTED.reset(token)


def copied(program: Program) -> Program:
    """A copy that can be edited without touching the original; large arrays, types and symbols are shared."""
    twin = copy(program)
    twin.functions = {name: _Copy().function(function) for name, function in program.functions.items()}
    return twin


class _Copy:
    """Old values, ops and blocks of one function, each with its copy."""

    def __init__(self) -> None:
        self.vars: dict[Var, Var] = {}
        self.ops: dict[Operation, Operation] = {}
        self.blocks: dict[Block, Block] = {}

    def function(self, old: Function) -> Function:
        """The copy of a function."""
        empty: Any = copy(old)
        empty._input_dict = OrderedDict((name, self.input(name, v)) for name, v in old.inputs.items())
        empty.placeholder_inputs = {
            name: self.placeholder(p, empty._input_dict.get(name))
            for name, p in cast(Any, old).placeholder_inputs.items()
        }
        filled = cast(Function, self.filled(old, empty))
        for var, new in self.vars.items():
            self.wire(var, new)
        if (noted := _NOTED.get()) is not None:
            for copies in (self.ops, self.vars):
                noted.update((new, noted.get(old, old)) for old, new in copies.items())
        return filled

    def input(self, name: str, old: Any) -> Any:
        """The copy of an input; one that has two names, of a specification given twice, is read by the last."""
        if old.name == name:
            return self.var(old)
        unread = copy(old)
        unread.name, unread._child_ops, unread.consuming_blocks = name, [], []
        return unread

    def placeholder(self, old: Any, var: Any) -> Any:
        """What stands for an input when a program is built."""
        new = copy(old)
        new.outputs = [self.var(v) for v in old.outputs] if var is None else [var]
        return new

    def filled(self, old: Any, new: Any) -> Block:
        """The copy of a block, with the copies of its ops."""
        self.blocks[old] = new
        new._internal_vars = {self.var(v) for v in old._internal_vars}
        new._block_inputs = type(old._block_inputs)(map(self.var, old._block_inputs))
        new.operations = type(old.operations)([self.op(o, new) for o in old.operations])
        new._outputs = [self.var(v) for v in old._outputs]
        return cast(Block, new)

    def op(self, old: Any, block: Block) -> Operation:
        """The copy of an op, in the copy of its block."""
        new = self.ops[old] = _like(old)
        new.enclosing_block, new.scopes = block, copy(old.scopes)
        new._input_vars = {name: self.operand(value) for name, value in old._input_vars.items()}
        vars(new).update(new._input_vars)
        new.blocks = []
        for nested in old.blocks:
            inner: Any = copy(nested)
            inner.outer_op = new
            new.blocks.append(self.filled(nested, inner))
        new._output_vars = [self.var(v) for v in old._output_vars]
        return cast(Operation, new)

    def operand(self, value: Any) -> Any:
        """The copy of what an op reads: a value, several, or nothing."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.operand(v) for v in value)
        return self.var(value) if isinstance(value, Var) else value

    def var(self, old: Var) -> Var:
        """The copy of a value, which is wired when all ops are there."""
        new = self.vars.get(old)
        if new is None:
            new = self.vars[old] = _like(old)
            held: Any = getattr(old, "_sym_val", None)
            if held is not None and isinstance(held.val, np.ndarray) and held.val.size <= LARGEST_RANK:
                own = _like(held)  # coremltools writes into the ends of slices when it infers shapes
                own.val = held.val.copy()
                setattr(new, "_sym_val", own)  # noqa: B010
        return new

    def wire(self, old: Any, new: Any) -> None:
        """Let the copy of a value know its op and its readers."""
        new._op = None if old._op is None else self.ops[old._op]
        new._child_ops = _known(self.ops, old._child_ops)
        new.consuming_blocks = _known(self.blocks, old.consuming_blocks)
        new._nonreplaceable_vars_upstream = set(_known(self.vars, old._nonreplaceable_vars_upstream))


def _known(copies: dict[Any, Any], olds: Iterable[Any]) -> list[Any]:
    """The copies of those that belong to the function."""
    return [copies[old] for old in olds if old in copies] if olds else []


def _like(old: Any) -> Any:
    """A copy of an op, a value or a number; `copy` itself asks each time how that is done."""
    kind: Any = type(old)
    new = kind.__new__(kind)
    for name in _slots(kind):
        setattr(new, name, getattr(old, name))
    if hasattr(old, "__dict__"):
        vars(new).update(vars(old))
    return new


@lru_cache(512)
def _slots(kind: type) -> tuple[str, ...]:
    """The names of what objects of a class hold outside of their dictionary."""
    return tuple(name for base in kind.__mro__ for name in vars(base).get("__slots__", ()))

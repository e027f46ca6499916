"""Copy a program, so that a step can be tried on the copy.

The graph is copied object by object, without type inference. Large arrays and types are shared.
"""

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

MOST_COPIED_ELEMENTS = 8
"""Arrays with up to so many elements are copied: coremltools writes into the ends of slices in place."""
_ORIGINALS: ContextVar[dict[Any, Any] | None] = ContextVar("originals", default=None)


@contextmanager
def recording_originals(originals: dict[Any, Any]) -> Iterator[None]:
    """Record {op or value of a copy: its original} for copies made in the body, and copies of these."""
    token = _ORIGINALS.set(originals)
    try:
        yield
    finally:
        _ORIGINALS.reset(token)


def copy_program(program: Program) -> Program:
    """Return a copy that can be edited without changing the original; large arrays and types are shared."""
    twin = copy(program)
    twin.functions = {
        name: _FunctionCopier().copy_function(function) for name, function in program.functions.items()
    }
    return twin


class _FunctionCopier:
    """Copies one function: `vars`, `ops` and `blocks` map each original to its copy."""

    def __init__(self) -> None:
        self.vars: dict[Var, Var] = {}
        self.ops: dict[Operation, Operation] = {}
        self.blocks: dict[Block, Block] = {}

    def copy_function(self, old: Function) -> Function:
        """Return the copy of a function."""
        empty: Any = copy(old)
        empty._input_dict = OrderedDict((name, self._copy_input(name, v)) for name, v in old.inputs.items())
        empty.placeholder_inputs = {
            name: self._copy_placeholder(p, empty._input_dict.get(name))
            for name, p in cast(Any, old).placeholder_inputs.items()
        }
        filled = cast(Function, self._fill_block(old, empty))
        for var, new in self.vars.items():
            self._link(var, new)
        if (originals := _ORIGINALS.get()) is not None:
            for copies in (self.ops, self.vars):
                originals.update((new, originals.get(old, old)) for old, new in copies.items())
        return filled

    def _copy_input(self, name: str, old: Any) -> Any:
        """Return the copy of an input; an input given twice is read under its last name only."""
        if old.name == name:
            return self._copy_var(old)
        unread = copy(old)
        unread.name, unread._child_ops, unread.consuming_blocks = name, [], []
        return unread

    def _copy_placeholder(self, old: Any, var: Any) -> Any:
        """Return the copy of the object that stands for an input while a program is built."""
        new = copy(old)
        new.outputs = [self._copy_var(v) for v in old.outputs] if var is None else [var]
        return new

    def _fill_block(self, old: Any, new: Any) -> Block:
        """Fill `new`, the empty copy of a block, with the copies of its ops."""
        self.blocks[old] = new
        new._internal_vars = {self._copy_var(v) for v in old._internal_vars}
        new._block_inputs = type(old._block_inputs)(map(self._copy_var, old._block_inputs))
        new.operations = type(old.operations)([self._copy_op(o, new) for o in old.operations])
        new._outputs = [self._copy_var(v) for v in old._outputs]
        return cast(Block, new)

    def _copy_op(self, old: Any, block: Block) -> Operation:
        """Return the copy of an op, inside `block`, the copy of its block."""
        new = self.ops[old] = _shallow_copy(old)
        new.enclosing_block, new.scopes = block, copy(old.scopes)
        new._input_vars = {name: self._copy_operand(value) for name, value in old._input_vars.items()}
        vars(new).update(new._input_vars)
        new.blocks = []
        for nested in old.blocks:
            inner: Any = copy(nested)
            inner.outer_op = new
            new.blocks.append(self._fill_block(nested, inner))
        new._output_vars = [self._copy_var(v) for v in old._output_vars]
        return cast(Operation, new)

    def _copy_operand(self, value: Any) -> Any:
        """Return the copy of an operand: a value, a list of values, or None."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._copy_operand(v) for v in value)
        return self._copy_var(value) if isinstance(value, Var) else value

    def _copy_var(self, old: Var) -> Var:
        """Return the copy of a value; `_link` connects it when all ops are copied."""
        new = self.vars.get(old)
        if new is None:
            new = self.vars[old] = _shallow_copy(old)
            stored: Any = getattr(old, "_sym_val", None)
            array = None if stored is None else stored.val
            if isinstance(array, np.ndarray) and array.size <= MOST_COPIED_ELEMENTS:
                own = _shallow_copy(stored)
                own.val = array.copy()
                setattr(new, "_sym_val", own)  # noqa: B010
        return new

    def _link(self, old: Any, new: Any) -> None:
        """Connect the copy of a value to the copies of its op and consumers."""
        new._op = None if old._op is None else self.ops[old._op]
        new._child_ops = _copies_of(self.ops, old._child_ops)
        new.consuming_blocks = _copies_of(self.blocks, old.consuming_blocks)
        new._nonreplaceable_vars_upstream = set(_copies_of(self.vars, old._nonreplaceable_vars_upstream))


def _copies_of(copies: dict[Any, Any], olds: Iterable[Any]) -> list[Any]:
    """Return the copies of those objects that belong to the function."""
    return [copies[old] for old in olds if old in copies] if olds else []


def _shallow_copy(old: Any) -> Any:
    """Return a shallow copy of an object; faster than `copy.copy`, which looks up the way to copy each time."""
    kind: Any = type(old)
    new = kind.__new__(kind)
    for name in _slot_names(kind):
        setattr(new, name, getattr(old, name))
    if hasattr(old, "__dict__"):
        vars(new).update(vars(old))
    return new


@lru_cache(512)
def _slot_names(kind: type) -> tuple[str, ...]:
    """Return the names of all `__slots__` of a class and its bases."""
    return tuple(name for base in kind.__mro__ for name in vars(base).get("__slots__", ()))

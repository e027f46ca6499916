"""Run a function op by op, and give each element of each value a name: a hash of how it is computed.

`lockstep` runs two whole models this way, side by side. Elements with equal names are equal. Both models share
one table, so an op of the second model on the same operands as an op of the first is not computed again. A
value is dropped after its last reader; one without a counterpart yet keeps the op and the operands that made
it.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from anesurgery.checking.grades import Grade
from anesurgery.checking.proofs import reason_of
from anesurgery.errors import InterpretError
from anesurgery.interpret import Evaluator
from anesurgery.interpret.arithmetic.bitwise import Bitwise
from anesurgery.interpret.arithmetic.field import Image
from anesurgery.interpret.arithmetic.symbolic import UNLIKE
from anesurgery.mil import Function, Operation, Var, constant, is_constexpr, is_weight, operands, reads, types

LARGEST_VALUE = 1 << 27
"""The most elements of a value or constant of a whole model: naming takes 64 bits for each, 1.1 GB in all."""

_serials = itertools.count()


class NamedValue:
    """A value of one program: its numbers on the sampled inputs, and the names of its elements."""

    __slots__ = ("__weakref__", "grade", "names", "numbers", "op", "operands", "reason", "serial", "var")

    def __init__(
        self,
        var: Var,
        numbers: Any,
        names: Image | torch.Tensor | None,
        *,
        op: Operation | None = None,
        operands: Sequence[NamedValue] = (),
        reason: str = "",
    ) -> None:
        self.var, self.numbers, self.names, self.reason = var, numbers, names, reason
        self.op, self.operands = op, tuple(operands)
        """What it is made of, as long as no value of the other program is known to be the same."""
        self.serial = next(_serials)
        """The same for values whose names and layout are the same."""
        self.grade: Grade = min((v.grade for v in operands), default=Grade.BITS)
        """The weakest grade by which anything upstream was matched."""

    def forget(self) -> None:
        """Drop what made it: from here on its elements are known by their names."""
        self.op, self.operands = None, ()


class ValueTable:
    """Values of the first program by op, attributes, constants and operands."""

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[Hashable, NamedValue] = weakref.WeakValueDictionary()
        self._contents: dict[Var, Hashable] = {}

    def key(self, op: Operation, values: Mapping[Var, NamedValue]) -> Hashable | None:
        """Equal for ops that compute the same; None for an op with nested blocks, or that is no function."""
        if op.blocks or op.op_type in UNLIKE:
            return None
        operands = tuple((name, self._known(var, values)) for name, var in op.inputs.items() if var is not None)
        return op.op_type, str(op.opset_version), operands, tuple(str(v.sym_type) for v in op.outputs)

    def _known(self, var: Any, values: Mapping[Var, NamedValue]) -> Hashable:
        if isinstance(var, (list, tuple)):
            return tuple(self._known(v, values) for v in var)
        if var in values:
            return values[var].serial
        return self._content(var)

    def _content(self, var: Var) -> Hashable:
        """A constant by what it holds."""
        if var not in self._contents:
            made_by = var.op
            if made_by is not None and made_by.op_type != "const":
                rest = tuple((k, self._content(v)) for k, v in made_by.inputs.items() if isinstance(v, Var))
                self._contents[var] = (made_by.op_type, rest)
            else:
                self._contents[var] = _content_digest(constant(var))
        return self._contents[var]

    def enter(self, key: Hashable | None, results: Sequence[NamedValue]) -> None:
        """Remember what an op of the first program made."""
        if key is not None:
            self._made.update({(key, i): value for i, value in enumerate(results)})

    def find(self, key: Hashable | None, count: int) -> list[NamedValue] | None:
        """What the same op made in the first program, if that is still alive."""
        results = [self._made.get((key, i)) for i in range(count)] if key is not None else []
        return [v for v in results if v is not None] if results and None not in results else None


def _content_digest(value: Any) -> Hashable:
    if isinstance(value, (str, bool)) or not hasattr(value, "dtype"):
        return repr(value)
    array = np.ascontiguousarray(value)
    return array.dtype.str, array.shape, hashlib.blake2b(array.data, digest_size=16).digest()


class FunctionRun:
    """One function, run as far as it is asked for."""

    def __init__(
        self,
        function: Function,
        inputs: Mapping[Var, NamedValue],
        kept: set[Var],
        names: Bitwise,
        table: ValueTable,
        *,
        first: bool,
    ) -> None:
        self.ops = [op for op in function.operations if not is_weight(op)]
        self.place = {v: i for i, op in enumerate(self.ops) for v in op.outputs}
        self.values: dict[Var, NamedValue] = dict(inputs)
        self.states = {v: value for v, value in inputs.items() if types.is_state(v.sym_type)}
        self._names, self._table, self._first = names, table, first
        self._kept, self._outputs = kept, set(function.outputs)
        self._readers = Counter(v for op in self.ops for v in set(reads(op)))
        self._at = 0

    @property
    def next(self) -> Operation | None:
        """The op that runs next; None at the end."""
        return self.ops[self._at] if self._at < len(self.ops) else None

    def step(self) -> list[NamedValue]:
        """Run the next op."""
        op = self.ops[self._at]
        self._at += 1
        results = self._make(op)
        self.values |= zip(op.outputs, results, strict=True)
        for var in set(reads(op)):
            self._readers[var] -= 1
        for var in {*reads(op), *op.outputs}:
            self._drop(var)
        return results

    def reach(self, var: Var) -> NamedValue | None:
        """Run until a value is there, and return it; None if it was dropped."""
        while var not in self.values and self.place.get(var, -1) >= self._at:
            self.step()
        return self.values.get(var)

    def there(self, var: Var) -> NamedValue:
        """Return an output, which may be a constant."""
        return self.values[var] if var in self.values else self.constant(var)

    def release(self, var: Var) -> None:
        """Note that nobody needs this value any more."""
        self._kept.discard(var)
        self._drop(var)

    def constant(self, var: Var) -> NamedValue:
        """Return a constant as a value."""
        numbers = Evaluator(_decoding_ops([var]), [var])({})[0]
        return NamedValue(var, numbers, numbers)

    def _drop(self, var: Var) -> None:
        wanted = var in self._kept or var in self._outputs or var in self.states
        if self._readers[var] <= 0 and not wanted:
            self.values.pop(var, None)

    def _make(self, op: Operation) -> list[NamedValue]:
        if op.op_type in ("read_state", "coreml_update_state"):
            return [self._of_state(op)]
        key = self._table.key(op, self.values)
        remembered = None if self._first else self._table.find(key, len(op.outputs))
        used = [self.values[v] for v in dict.fromkeys(reads(op)) if v in self.values]
        if remembered is not None:
            results = [
                _same_elements(var, value, used) for var, value in zip(op.outputs, remembered, strict=True)
            ]
            for value in remembered:
                value.forget()
            return results
        numbers = self._evaluate(op, {v.var: v.numbers for v in used}, "fp32")
        results = [
            NamedValue(v, n, None, op=op, operands=used) for v, n in zip(op.outputs, numbers, strict=True)
        ]
        self._name(op, used, results)
        if self._first:
            self._table.enter(key, results)
        return results

    def _name(self, op: Operation, used: Sequence[NamedValue], results: Sequence[NamedValue]) -> None:
        unnamed = next((v for v in used if v.names is None), None)
        if unnamed is not None:
            for value in results:
                value.reason = unnamed.reason
            return
        try:
            named = self._evaluate(op, {v.var: v.names for v in used}, self._names)
        except InterpretError as error:
            for value in results:
                value.reason = reason_of(error)
            return
        for value, own in zip(results, named, strict=True):
            value.names = own

    def _of_state(self, op: Operation) -> NamedValue:
        """Reading a state gives what was written to it last."""
        state = op.inputs["input" if op.op_type == "read_state" else "state"]
        if op.op_type != "read_state":
            var = op.inputs["value"]
            self.states[state] = self.values[var] if var in self.values else self.constant(var)
        return _same_elements(op.outputs[0], self.states[state], [self.states[state]])

    def _evaluate(self, op: Operation, bound: Mapping[Var, Any], arithmetic: Any) -> list[Any]:
        ops = [*constants_of_ops([op]), op]
        return Evaluator(ops, op.outputs, arithmetic)(bound)


def _same_elements(var: Var, value: NamedValue, used: Sequence[NamedValue]) -> NamedValue:
    """Return another var that holds the same elements in the same layout."""
    twin = NamedValue(var, value.numbers, value.names, reason=value.reason)
    twin.serial = value.serial
    twin.grade = min((v.grade for v in used), default=Grade.BITS)
    return twin


def constants_of_ops(ops: Sequence[Operation]) -> list[Operation]:
    """Return the compressed constants that some ops read."""
    return _decoding_ops([v for op in ops for v in reads(op)])


def _decoding_ops(vars_: Sequence[Var]) -> list[Operation]:
    """Return the ops that decode the compressed constants among some values, in an order in which they run."""
    decoders: dict[Operation, None] = {}
    for var in vars_:
        if var.op is not None and is_constexpr(var.op):
            decoders |= dict.fromkeys(_decoding_ops([v for _, v in operands(var.op)]))
            decoders[var.op] = None
    return list(decoders)

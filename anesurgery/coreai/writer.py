"""Write the functions of a MIL program in Core AI, op by op, by the table of lowerings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from anesurgery.coreai import images, toolkit
from anesurgery.coreai.dtypes import numpy_of
from anesurgery.coreai.lowerings import load_lowerings
from anesurgery.coreai.lowerings.compressed import Spread
from anesurgery.coreai.modes import Mode
from anesurgery.coreai.table import COMPOSED, MISSING, OWN, TABLE, TAKEN_IN
from anesurgery.coreai.values import Constant, Value
from anesurgery.errors import NotExpressible, SurgeryError
from anesurgery.files.interface import Port, Signature
from anesurgery.mil import (
    Array,
    Block,
    Function,
    Operation,
    Program,
    Var,
    consumers,
    dtype_name,
    is_constexpr,
    is_symbolic,
    types,
    walk_ops,
)
from anesurgery.ops import names

FOLDED = 1024
"""Elements of a computed constant that are written as numbers at most; a larger one is computed again."""
UNREAD = names("validate_indices output_indices_dtype sort")
"""Inputs of MIL that no lowering needs: checks of the host, and types and orders that the result has anyway."""
NEW = "_new"
"""What follows the name of a state in the name of the result that becomes it."""


def check_ops(program: Program) -> None:
    """Refuse a program with ops that no lowering is written for, all of them at once.

    Raises:
        NotExpressible: names each, and why.
    """
    load_lowerings()
    unknown = Counter(op.op_type for op in walk_ops(program) if op.op_type not in {*TABLE, "const"})
    if unknown:
        reasons = (
            f"{n} {kind}: {MISSING.get(kind, 'no lowering is written for it')}" for kind, n in unknown.items()
        )
        raise NotExpressible(f"it has ops that Core AI has not: {'; '.join(reasons)}")


def lengths(var: Var) -> list[int]:
    """The shape of a value, -1 where it is dynamic."""
    state = types.is_state(var.sym_type)
    shape = var.sym_type.wrapped_type().get_shape() if state else var.shape
    return [-1 if is_symbolic(length) else int(length) for length in shape]


class Constants:
    """The numbers of a program, each stored once, however many ops and functions read them."""

    def __init__(self) -> None:
        self._attributes: dict[Any, tuple[Array, Any]] = {}

    def attribute(self, numbers: Array, dtype: str) -> Any:
        """What constant ops of an array hold; views of the same memory share it."""
        place = numbers.__array_interface__["data"][0]
        key = (place, numbers.nbytes, numbers.shape, numbers.strides, dtype)
        if key not in self._attributes:
            self._attributes[key] = (
                numbers,
                toolkit.stored(numbers.astype(numpy_of(dtype), copy=False), dtype),
            )
        return self._attributes[key][1]


class Writer:
    """One function, being written."""

    def __init__(
        self, function: Function, forms: Mode, constants: Constants, spaces: Mapping[str, str] | None = None
    ) -> None:
        self.function, self.forms, self.constants = function, forms, constants
        held = function.inputs | {var.name: var for var in function.outputs}
        self.images = images.kept(spaces or {}, held) if forms.has("images") else {}
        """Inputs and outputs that are images -> their colour spaces."""
        self.values: dict[Var, Any] = {}
        """Value of MIL -> the tensor in the program; None of what is no tensor, a label."""
        self.states: dict[Var, Value] = {}
        """State -> its value where the writer is."""
        self.depth = 0
        """How many blocks of control flow the writer is in."""
        self._nodes: dict[Any, Any] = {}

    def type_of(self, var: Var) -> Any:
        """The type of a tensor or state."""
        return toolkit.tensor(lengths(var), self.forms.dtype(dtype_name(var)))

    def write(self, name: str) -> Signature:
        """Write the function into the open program; its inputs, states included, and its outputs."""
        inputs = self.function.inputs
        states = {n: f"{n}{NEW}" for n, var in inputs.items() if types.is_state(var.sym_type)}

        def body(arguments: Sequence[Any]) -> Mapping[str, Any]:
            for (key, var), node in zip(inputs.items(), arguments, strict=True):
                (self.states if key in states else self.values)[var] = self._argument_value(key, var, node)
            self.operations(self.function)
            outputs = [var for var in self.function.outputs if self.values.get(var, var) is not None]
            results = {var.name: self._result(var) for var in outputs}
            return results | {new: self.states[inputs[key]].node for key, new in states.items()}

        types_of = {
            key: toolkit.image(*lengths(var)[2:]) if key in self.images else self.type_of(var)
            for key, var in inputs.items()
        }
        toolkit.graph(name, types_of, body, states)
        given = [self._port(key, var, "state " * (key in states)) for key, var in inputs.items()]
        made = [self._port(v.name, v) for v in self.function.outputs if self.values.get(v, v) is not None]
        return Signature(tuple(given), tuple(made))

    def _argument_value(self, name: str, var: Var, node: Any) -> Value:
        if name not in self.images:
            return Value(node)
        return images.from_image(node, self.images[name], self.forms.dtype(dtype_name(var)))

    def _result(self, var: Var) -> Any:
        value = self.value(var)
        return images.to_image(value, self.images[var.name]) if var.name in self.images else value.node

    def _port(self, name: str, var: Var, word: str = "") -> Port:
        kind = "fp32" if types.is_dict(var.sym_type) else self.forms.dtype(dtype_name(var))
        kind = f"{word}{kind}" if name not in self.images else f"{self.images[name]} image"
        return Port(name, kind, tuple(None if n < 0 else n for n in lengths(var)))

    def block(self, block: Block, inputs: Sequence[Value]) -> list[Value]:
        """The values of a nested block, written where the writer is."""
        self.values |= dict(zip(block.inputs, inputs, strict=True))
        self.depth += 1
        self.operations(block)
        self.depth -= 1
        return [self.value(var) for var in block.outputs]

    def operations(self, block: Block) -> None:
        """Write the ops of a block.

        Raises:
            NotExpressible: an op has a form that Core AI has not; names it.
        """
        for op in block.operations:
            if op.op_type == "const" or self._folded(op):
                continue
            try:
                self._write(op)
            except SurgeryError as error:
                raise NotExpressible(f"op {op.name} ({op.op_type}): {error}") from error
            except Exception as error:
                said = toolkit.refusal(error)
                raise NotExpressible(
                    f"op {op.name} ({op.op_type}): Apple's package refuses it: {said}"
                ) from error

    def _folded(self, op: Operation) -> bool:
        """Are the results known numbers, few enough to be constants?"""
        known = [var.val for var in op.outputs]
        return not is_constexpr(op) and all(v is not None and np.size(v) <= FOLDED for v in known)

    def _write(self, op: Operation) -> None:
        lowering = TABLE[op.op_type]
        more = {"op": op, "forms": self.forms, "writer": self}
        function = partial(lowering.function, **{name: more[name] for name in lowering.asks})
        arguments = self._arguments(op)
        results = self._composed(op, function, arguments) if _is_composed(op) else function(**arguments)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        for var, value in zip(op.outputs, results, strict=True):
            fitted = None if value is None else _fitted(value, var, self.forms.dtype(dtype_name(var)))
            if fitted is not None and isinstance(var.val, (np.ndarray, np.generic)):
                fitted.known = np.asarray(var.val)
            self.values[var] = fitted

    def _composed(
        self, op: Operation, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> list[Value]:
        """The results of an op whose formula stands in a graph of its own, under the op's name."""
        operands = {name: value for name, value in arguments.items() if isinstance(value, Value)}
        described = {name: value for name, value in arguments.items() if name not in operands}

        def body(nodes: Sequence[Any]) -> list[Any]:
            inner = dict(zip(operands, map(Value, nodes), strict=True))
            for name, value in inner.items():
                value.known = operands[name].known
            made = function(**inner, **described)
            several = made if isinstance(made, (list, tuple)) else [made]
            pairs = zip(several, op.outputs, strict=True)
            return [_fitted(value, var, self.forms.dtype(dtype_name(var))).node for value, var in pairs]

        nodes = {name: value.node for name, value in operands.items()}
        return [Value(node) for node in toolkit.composite(f"{OWN}{op.op_type}", nodes, described, body)]

    def _arguments(self, op: Operation) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for name, value in op.inputs.items():
            if value is None or name.startswith("_") or name in UNREAD:
                continue
            if isinstance(value, (list, tuple)):
                arguments[name] = [self.value(v) for v in value]
            elif types.is_state(value.sym_type):
                arguments[name] = None
            else:
                arguments[name] = self._argument(op, name, value)
        return arguments

    def _argument(self, op: Operation, name: str, var: Var) -> Any:
        """An operand; what only describes the op is plain Python."""
        described = getattr(op.input_spec.input_types.get(name), "const", False)
        numbers = var.val
        if numbers is None:
            return self.value(var)
        if is_constexpr(op) and not isinstance(numbers, str) and not name.endswith("axis"):
            return self._constant(var, dtype_name(var))  # a weight is what its parts give in their own dtypes
        if isinstance(numbers, str) or (described and not isinstance(numbers, (np.ndarray, np.generic))):
            return numbers
        few = np.ndim(numbers) == 0 or (np.ndim(numbers) == 1 and numbers.dtype.kind != "f")
        if described and few:
            return numbers.tolist()
        return self.value(var)

    def value(self, var: Var) -> Value:
        """What an op reads."""
        if var not in self.values:
            self.values[var] = self._constant(var, self.forms.dtype(dtype_name(var)))
        return self.values[var]

    def _constant(self, var: Var, dtype: str) -> Constant:
        """A constant in an element type, written once in each block: what stands inside of another is not seen.

        Raises:
            NotExpressible: it is no tensor.
        """
        if var.val is None or isinstance(var.val, str):
            raise NotExpressible(f"%{var.name} is no tensor")
        numbers = np.asarray(var.val)
        if numbers.dtype == object:  # symbols of a program in memory; saved, each says "what is left"
            flat = [-1 if is_symbolic(v) else int(v) for v in numbers.reshape(-1)]
            numbers = np.array(flat, np.int32).reshape(numbers.shape)

        def write() -> Any:
            key = (toolkit.ir.InsertionPoint.current.block, var, dtype)
            if key not in self._nodes:
                self._nodes[key] = toolkit.constant(self.constants.attribute(numbers, dtype))
            return self._nodes[key]

        return Constant(numbers, dtype, write)


def _is_composed(op: Operation) -> bool:
    """Does the formula of an op stand in a graph of its own?"""
    after = TAKEN_IN.get(op.op_type, frozenset())
    return op.op_type in COMPOSED or any(c.op_type in after for var in op.outputs for c in consumers(var))


def _fitted(value: Value, var: Var, dtype: str) -> Value:
    """A result in the element type and shape that MIL infers.

    Raises:
        SurgeryError: they cannot be brought together, which is an error of the lowering.
    """
    if (not types.is_tensor(var.sym_type) and not types.is_scalar(var.sym_type)) or isinstance(value, Spread):
        return value
    value = value.cast(dtype)
    wanted, shape = lengths(var), value.shape
    clash = any(a != b for a, b in zip(shape, wanted, strict=False) if a >= 0 and b >= 0)
    if clash or len(shape) != len(wanted):
        raise SurgeryError(f"it was written with the shape {shape}, and MIL infers {wanted}; please report it")
    return value.refined(wanted)

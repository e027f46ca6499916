"""What a rewrite builds with: coremltools' builder, with places, records, names, scopes and literals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from anesurgery import mil
from anesurgery.errors import PassError, Refused, near_matches
from anesurgery.files.interface import InterfaceChange, Values
from anesurgery.mil import Array, Function, Operation, Parameter, Var, is_compressed, operands
from anesurgery.regions.compressed_weights import build
from anesurgery.regions.reencoding import encoded, numbers_of
from anesurgery.regions.weight_edits import Edit
from anesurgery.rewriting.session import DECODE, KEEP, Recoded, Session

UNTYPED = (np.dtype(np.float64), np.dtype(np.int64))
"""The types of numpy for Python numbers; no MIL value has them."""
MOST_LITERALS = 64
"""An array with more numbers is a table or a weight, not written by hand: tiny numbers in it may become 0."""


def typed(op_type: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of an op, with an element type for each Python number or list of them.

    A number gets the type of the operands with which it must agree; where there are none, of the first float
    operand, if the parameter takes that. What coremltools reads as integers (axes, sizes) stays.

    Args:
        op_type: the type of the op, in the opset of the current function.
        inputs: the inputs by name: values, numpy arrays and numbers, Python's own numbers, strings.

    Raises:
        Refused: a number is infinite or zero in that type, and is not so itself.
    """
    parameters = mil.parameters(op_type)
    ordered = {name: inputs[name] for name in parameters if name in inputs}
    kinds = {name: kind for name, value in ordered.items() if (kind := _dtype(value)) is not None}
    floats = [kind for value in inputs.values() if (kind := _dtype(value)) is not None and kind.kind == "f"]
    result = dict(inputs)
    for name in (name for name, value in ordered.items() if _is_number(value)):
        parameter = parameters[name]
        peers = [kinds[n] for n in kinds if parameter.group and parameters[n].group == parameter.group]
        agreed = [kind for kind in peers if kind.kind == "f"] or peers
        free = floats if _wants_float(parameter, inputs[name]) else []
        if wanted := next((kind for kind in (*agreed, *free) if kind in parameter.dtypes), None):
            result[name] = _as_type(name, inputs[name], wanted)
    return result


def _dtype(value: Any) -> np.dtype[Any] | None:
    """Return the element type of an operand, of a tuple that of its first value; None for Python numbers."""
    if isinstance(value, Var):
        return mil.np_dtype(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return None if value.dtype in UNTYPED else value.dtype
    if isinstance(value, (list, tuple)):
        return next((_dtype(v) for v in value if isinstance(v, (Var, np.ndarray))), None)
    return None


def _numbers(value: Any) -> Iterator[Any]:
    """Yield a number itself, or all items of a nested list."""
    for item in value if isinstance(value, (list, tuple)) else ():
        yield from _numbers(item)
    if not isinstance(value, (list, tuple)):
        yield value


def _is_number(value: Any) -> bool:
    """Is it a Python number, or a list or array that holds nothing else? Truth values are no numbers."""
    if isinstance(value, np.ndarray):
        return value.dtype in UNTYPED
    leaves = list(_numbers(value))
    return bool(leaves) and all(type(leaf) in (int, float, np.float64, np.int64) for leaf in leaves)


def _wants_float(parameter: Parameter, value: Any) -> bool:
    """Is it a float anyway? An integer stays one where the parameter takes integers."""
    return np.asarray(value).dtype.kind == "f" or all(d.kind == "f" for d in parameter.dtypes)


def _as_type(name: str, value: Any, dtype: np.dtype[Any]) -> Any:
    """Return numbers in a type; fractions stay as they are for an integer type, which coremltools then refuses.

    Raises:
        Refused: a number is infinite or zero in that type, and is not so itself.
    """
    numbers = np.asarray(value, np.float64 if dtype.kind == "f" else None)
    if dtype.kind != "f":
        limits = np.iinfo(dtype) if dtype.kind in "iu" and numbers.dtype.kind in "iu" else None
        fits = limits is not None and bool(((limits.min <= numbers) & (numbers <= limits.max)).all())
        return numbers.astype(dtype)[()] if fits else value
    with np.errstate(over="ignore", under="ignore"):
        held = numbers.astype(dtype)
    lost = _lost(numbers, held)
    if lost.any():
        words = f"{name}={numbers[lost][0]:g} is {held[lost][0]:g} in {dtype}"
        raise Refused(f"{words}, which the other operands have")
    return held[()]


def _lost(numbers: Array, held: Array) -> Array:
    """Return which numbers became infinite; and, in a literal, which became 0."""
    infinite = np.isinf(held) & ~np.isinf(numbers)
    return infinite if numbers.size > MOST_LITERALS else infinite | ((held == 0) & (numbers != 0))


class Builder(mil.OpMakers):
    """`mb.add(x=..., y=...)` makes an op right before the root of the match; everything made is recorded."""

    def __init__(self, session: Session, function: Function, pass_name: str, root: Operation) -> None:
        self._session, self._function = session, function
        self._pass_name, self._root = pass_name, root
        self._before: Operation | None = root
        self.made: dict[Operation, None] = {}
        """The ops made so far, constants included, in the order in which they can run: an ordered set."""

    @property
    def block(self) -> mil.Block:
        """The block in which it makes ops: that of the root, or one around it."""
        block = (self._before or self._root).enclosing_block
        assert block is not None
        return block

    def before(self, op: Operation) -> Builder:
        """Return a builder that inserts its ops right before another op, in the same block or one around it."""
        other = Builder(self._session, self._function, self._pass_name, self._root)
        other._before, other.made = op, self.made
        return other

    def behind(self) -> Builder:
        """Return a builder that makes its ops right behind the root."""
        ops = cast(mil.Block, self._root.enclosing_block).operations
        other = self.before(self._root)
        other._before = None if self._root is ops[-1] else mil.next_op(self._root)
        return other

    def __getattr__(self, op_type: str) -> Callable[..., Var]:
        """Return the builder of one op type; takes the MIL inputs by name, `name=` is optional.

        Python numbers get the element type of the op's first float operand.
        """
        make = getattr(mil.mb, op_type, None)
        if make is None:
            raise AttributeError(f"there is no op {op_type!r}; {near_matches(op_type, mil.op_types())}")

        def build(**inputs: Any) -> Any:
            wish = inputs.pop("name", None) or f"{self._root.name}_{self._pass_name}_{op_type}"
            name = self._session.fresh_name(self._function, wish)
            if op_type == "pad":  # whose default, an fp32 zero, does not load beside other types
                inputs.setdefault("constant_val", mil.np_dtype(inputs["x"]).type(0))
            try:
                with mil.inside(self.block):
                    result = make(before_op=self._before, name=name, **typed(op_type, inputs))
            except ValueError:
                _check_names(op_type, inputs)
                raise
            self._record(result[0] if isinstance(result, (tuple, list)) else result)
            return result

        return build

    def shared(self, key: tuple[Any, ...], make: Callable[[], Array], name: str) -> Var:
        """Return one constant for all edits that ask with the same key; it stands at the head of the function.

        Args:
            key: all that the content depends on (for content derived from a weight: the weight's var).
            make: computes the content, called for a new key only.
            name: the wish for a name.
        """
        full_key = (self._function, *key)
        constant = self._session.shared.get(full_key)
        if constant is None or constant.op is None or constant.op.enclosing_block is None:
            fresh = self._session.fresh_name(self._function, name)
            with mil.inside(self._function):
                first = self._function.operations[0]
                constant = mil.mb.const(val=np.asarray(make(), order="C"), name=fresh, before_op=first)
            self._session.shared[full_key] = constant
        assert constant.op is not None
        self._note_made(constant.op)
        return constant

    def shared_value(self, key: tuple[Any, ...], reads: Sequence[Var], build: Callable[[Builder], Var]) -> Var:
        """Return one computed value for all edits that ask with the same key; it follows what it reads.

        Args:
            key: all that the value depends on.
            reads: what it reads.
            build: makes the value with the builder given, called for a new key only.
        """
        full_key = (self._function, *key)
        value = self._session.shared.get(full_key)
        if value is None or (value.op is not None and value.op.enclosing_block is None):
            place = mil.first_op_after(reads, self._root)
            maker = self.before(place)
            maker.made = {}
            with mil.inside(cast(mil.Block, place.enclosing_block)):
                value = build(maker)
            self._session.shared[full_key] = value
            self._session.shared_ops[full_key] = list(maker.made)
        self.made |= dict.fromkeys(self._session.shared_ops[full_key])
        return value

    def stored_like(
        self,
        weight: Var,
        numbers: Callable[[], Array],
        key: tuple[Any, ...],
        name: str,
        edit: Edit | None = None,
        reason: str = "",
        exact: bool = False,
    ) -> Var:
        """Build computed numbers in the place of a stored weight.

        If that weight is compressed, the option `compressed` of `apply` decides: the edit is refused ("keep"),
        or the numbers are stored plainly ("decode"), or in the form of the weight ("reencode").

        Args:
            weight: the one that the numbers were computed from.
            numbers: computes them, called for a new key only.
            key: all that they depend on.
            name: the wish for a name.
            edit: the edit of the weight's axes, if the numbers have others.
            reason: why the weight cannot stay as it is stored.
            exact: allow encoding under "keep" too, if the form of the weight holds the numbers exactly.

        Raises:
            Refused: compressed weights stay as they are, or its form cannot hold the numbers.
        """
        kind, how = mil.np_dtype(weight), self._session.compressed
        if not is_compressed(weight):
            return self.shared(key, lambda: numbers().astype(kind, copy=False), name)
        words = reason or f"%{weight.name} is compressed, and its values would change"
        refused = Refused(f'{words}; compressed="reencode", or "decode", allows it')
        if how == KEEP and not exact:
            raise refused

        def make(maker: Builder) -> Var:
            computed = numbers()
            part = computed.astype(kind) if how == DECODE else encoded(weight, computed, edit)
            if how == KEEP and not np.array_equal(numbers_of(part), computed):
                raise refused
            stored = build(maker, part, name)
            self._session.recoded[stored] = Recoded.of(weight, stored, computed, numbers_of(part))
            return stored

        return self.shared_value(key, [weight], make)

    def rounded(self) -> bool:
        """Is a compressed weight among what was made, with other numbers than were computed?"""
        recoded = self._session.recoded
        return any(recoded[v].psnr < math.inf for op in self.made for v in op.outputs if v in recoded)

    def input(self, name: str) -> Var | None:
        """Return the function's input of that name."""
        return self._function.inputs.get(name)

    def add_input(self, shape: Sequence[int], dtype: Any, change: InterfaceChange) -> Var:
        """Add an input to the function, once per name, declared by `change`, whose first name is the input's.

        Raises:
            PassError: the function has another input of that name.
        """
        name = change.names[0]
        if name in self._function.inputs:
            if not any(name in declared.names for declared in self._session.contract):
                raise PassError(f"pass {self._pass_name}: there is an input named {name} already")
            return self._function.inputs[name]
        self.declare(change)
        self._session.fresh_name(self._function, name)
        return mil.add_input(self._function, name, shape, dtype)

    def input_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return what an input must hold that is read as `dtype`: inputs can be fp16 from iOS 16 on."""
        old = self._function.opset_version < mil.ct.target.iOS16
        return np.dtype(np.float32) if old and dtype == np.float16 else dtype

    def add_float_input(self, shape: Sequence[int], dtype: np.dtype[Any], change: InterfaceChange) -> Var:
        """Add a float input, and return it as `dtype` (through a cast where inputs cannot be fp16)."""
        stored = self.input_dtype(dtype)
        var = self.add_input(shape, mil.types.numpy_type_to_builtin_type(stored.type), change)
        return var if stored == dtype else self.cast(x=var, dtype="fp16")

    def leave_beside(self, wish: str, array: Array) -> str:
        """Have an array written beside the package when it is saved; its name, in `<package>.<name>.npy`."""
        left, name, n = self._session.artifacts, wish, 0
        while name in left and not (left[name] is array or np.array_equal(left[name], array)):
            n += 1
            name = f"{wish}_{n}"
        left[name] = array
        return name

    def rows_as_input(
        self,
        table: Array,
        ids: Var,
        like: Var,
        words: tuple[str, str],
        dropped: bool,
        shaped: Callable[[Array], Array] = np.asarray,
    ) -> Var:
        """Add an input for rows of a table, in place of the ids of the rows; save the table beside the model.

        Args:
            table: [rows, ...].
            ids: an input of the function.
            like: what the input is as large as.
            words: the end of the name of the input, and what the ids are called.
            dropped: are the ids no input any more?
            shaped: brings the rows of all ids into the shape of the input.
        """
        old = ids.name
        name = self.leave_beside(f"{old}_{words[0]}", table)
        held = self.input_dtype(table.dtype)

        def look_up(values: Values) -> Values:
            if old not in values:  # another function of the model has said the same
                return values
            rest = {k: v for k, v in values.items() if k != old or not dropped}
            return {**rest, name: shaped(table[np.asarray(values[old]).astype(np.int64)]).astype(held)}

        instead = f" in place of {old}" if dropped else ""
        said = f"give {name}{instead}: the rows of <package>.{name}.npy at the {words[1]} ({held})"
        change = InterfaceChange(said, (name, old) if dropped else (name,), inputs=look_up)
        rows = self.add_float_input(like.shape, table.dtype, change)
        if dropped:
            self.drop_input(old)
        return rows

    def drop_input(self, name: str) -> None:
        """Take an input away after the edit, when nothing reads it any more; declare the change as well."""
        self._session.dropped_inputs.append((self._function, name))

    def declare(self, change: InterfaceChange) -> None:
        """Declare a change of the model's interface that this rewrite makes on purpose."""
        self._session.contract.append(change)

    def note(self, words: str) -> None:
        """Tell the caller something about the edits, once."""
        if words not in self._session.notes:
            self._session.notes.append(words)

    def _record(self, var: Var) -> None:
        """Note the new op and the constants that coremltools made for its literals."""
        op = var.op
        assert op is not None
        literals = [
            v.op
            for _, v in operands(op)
            if v.op is not None and v.op.op_type == "const" and v.op.name.startswith(f"{op.name}_")
        ]
        for new in (*literals, op):
            self._note_made(new)

    def _note_made(self, op: Operation) -> None:
        """Note a new op, once, and give it the scope of the root."""
        if op not in self.made:
            mil.stamp(op, self._root)
            self.made[op] = None


def _check_names(op_type: str, inputs: Mapping[str, Any]) -> None:
    """Has the op a parameter of each name?

    Raises:
        TypeError: one that it has not.
    """
    parameters = mil.op_parameters(op_type)
    for name in inputs.keys() - parameters:
        words = ", ".join(sorted(parameters))
        raise TypeError(f"{op_type} has no parameter {name!r}; it has {words}")

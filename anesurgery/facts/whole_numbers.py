"""Integers and conditions as floats: where they lie, and the ops that make the same numbers in fp16.

fp16 holds every integer up to 2048. What is computed of integers that stay within it is the same in floats, op
by op; a condition is 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from anesurgery.mil import (
    Array,
    Maker,
    Operation,
    Var,
    any_symbolic,
    constant,
    np_dtype,
    operands,
    static_shape,
)
from anesurgery.ops import JOINING, LOGICAL, LOOKUPS, names
from anesurgery.semantics.intervals import Intervals
from anesurgery.semantics.reading import number

Range = tuple[float, float]

EXACT = 2048
"""Every integer up to here is a number of fp16."""
MOVES = (
    names("reshape expand_dims squeeze transpose slice_by_index slice_by_size tile reverse identity")
    | JOINING
    | LOOKUPS
)
"""Ops that hand numbers on, whatever their type."""
SUMS = names(
    "add sub mul maximum minimum abs sign reduce_sum reduce_max reduce_min cumsum floor_div mod select"
)
"""Ops that make integers of integers, and the same in floats."""
ROUNDING = names("ceil floor round sign floor_div")
"""Ops that make whole numbers of any floats."""
WHOLE_SUMS = names("add sub mul maximum minimum abs reduce_sum reduce_max reduce_min cumsum select relu")
"""Ops that make whole numbers of whole floats."""
TRUTHS = LOGICAL | {"logical_not"}

NUMBERS = {"select": ("a", "b"), **dict.fromkeys(JOINING, ("values",))}
"""The operands that hold numbers, where they are not `x` and `y`."""


def operands_of(op: Operation) -> Iterator[tuple[str, Var]]:
    """The operands of an op that hold numbers, with their parameter."""
    for name in NUMBERS.get(op.op_type, ("x", "y")):
        given = op.inputs.get(name)
        for var in given if isinstance(given, (list, tuple)) else [given]:
            if isinstance(var, Var):
                yield name, var


def makes_whole(var: Var) -> Operation | None:
    """The op that makes an integer or a condition out of others, if floats can do it too."""
    op = var.op
    if op is None or np_dtype(var).kind not in "iub":
        return None
    if op.op_type in LOOKUPS and constant(op.indices) is None:
        return None
    if op.op_type in MOVES:
        return op
    if op.op_type in (TRUTHS if np_dtype(var).kind == "b" else SUMS):
        return op
    return op if op.op_type == "cast" and np_dtype(op.x).kind in "iubf" else None


def source(var: Var) -> Var:
    """Where an integer comes from, before it was moved or made wider."""
    while (op := makes_whole(var)) is not None and (op.op_type in MOVES or _widens(op)):
        given = list(operands_of(op))
        if len(given) != 1:
            break
        var = given[0][1]
    return var


def from_inputs(var: Var) -> bool:
    """Is an integer or a condition made of integers that the caller gives?"""
    seen, todo = set[Var](), [var]
    while todo:
        at = todo.pop()
        if at in seen or np_dtype(at).kind == "f" or constant(at) is not None:
            continue
        if at.op is None:
            return True
        seen.add(at)
        todo += [v for _, v in operands(at.op)]
    return False


def _widens(op: Operation) -> bool:
    """A cast of integers to a type that holds all of them."""
    given, made = np_dtype(op.x) if op.op_type == "cast" else None, np_dtype(op.outputs[0])
    return given is not None and given.kind in "iu" and made.kind == "i" and np.can_cast(given, made)


class WholeNumbers:
    """What is known of integers, given what the caller promises of inputs."""

    def __init__(self, assume: Mapping[str, Range]) -> None:
        self.intervals = Intervals(assume=assume)

    def known(self, var: Var) -> Range:
        """Where an integer lies: as assumed, or by what makes it; anywhere, if its type may not hold that."""
        return self.intervals.of(var)

    def reach(self, var: Var) -> float:
        """The largest magnitude."""
        return max(map(abs, self.known(var)))

    def leaves(self, var: Var, most: int) -> str:
        """Why the floats of an integer may be others; "" when they are the same."""
        for value in _upstream(var, lambda v: _whole_operands(source(v)) if np_dtype(v).kind != "f" else []):
            if np_dtype(value).kind != "f" and (why := self._leaves_at(source(value), most)):
                return why
        return ""

    def _leaves_at(self, at: Var, most: int) -> str:
        if not self.reach(at) <= most:
            return f"%{at.name} {in_words(self.reach(at))}, above {most}"
        op = makes_whole(at)
        if op is not None and op.op_type in ("floor_div", "mod") and not (number(op.y) or 0) > 0:
            return f"%{at.name} is divided by %{op.y.name}, which is not a positive constant"
        return ""


def _whole_operands(var: Var) -> list[Var]:
    """What an integer is computed from."""
    op = makes_whole(var)
    return [] if op is None else [v for _, v in operands_of(op)]


def _upstream(var: Var, sources: Callable[[Var], Iterable[Var]]) -> Iterator[Var]:
    """A value, then what it comes from, the first sources first; each once, however often it is read."""
    seen, pending = set[Var](), [var]
    while pending:
        value = pending.pop()
        if value not in seen:
            seen.add(value)
            yield value
            pending += [*sources(value)][::-1]


def in_words(reach: float) -> str:
    """How far an integer is known to reach."""
    return "has an unknown range" if reach == math.inf else f"reaches {reach:g}"


def symbolic(var: Var) -> str:
    """A symbolic shape among what is done to an integer, which another op would name otherwise; "" if none."""
    for value in _upstream(var, lambda v: [s for s in _whole_operands(v) if np_dtype(s).kind != "f"]):
        if static_shape(value) is None:
            return f"%{value.name} has the symbolic shape {tuple(value.shape)}"
        if value.sym_val is not None and any_symbolic(np.ravel(np.asarray(value.sym_val, dtype=object))):
            return f"%{value.name} is counted from a symbolic shape"
    return ""


def _literal(given: Any) -> Any:
    """A parameter as it can be given before the constant that holds it."""
    value = constant(given) if isinstance(given, Var) else None
    return given if value is None else value


def _is_view(op: Operation) -> bool:
    """Does a cast or an identity keep the number?"""
    kinds = np_dtype(op.x).kind, np_dtype(op.outputs[0]).kind
    return kinds[0] in "iub" and (kinds[1] in "iu" or kinds[0] == "b")


class Floats:
    """The floats of integers and conditions, each made once for all edits."""

    def __init__(self, maker: Any, dtype: np.dtype[Any]) -> None:
        self.maker, self.dtype = maker, dtype
        self.name = {np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32"}[dtype]
        self.made: dict[Var, Any] = {}

    def of(self, var: Var) -> Any:
        """The same numbers as floats."""
        if var not in self.made:
            self.made[var] = self._of(var)
        return self.made[var]

    def _of(self, var: Var) -> Any:
        if (value := constant(var)) is not None:
            stored: Array = np.asarray(value).astype(self.dtype)
            return stored if stored.ndim else stored[()]
        op = makes_whole(var)
        if op is not None and op.op_type in ("cast", "identity") and _is_view(op):
            return self.of(op.x)
        if op is None or (op.op_type == "cast" and np_dtype(op.x).kind == "f"):
            reads, build = [var], lambda maker: self.cast(maker, var, op)
        else:
            found = [(name, self.of(v)) for name, v in operands_of(op)]
            others = [v for name, v in operands(op) if name not in dict(found)]
            given = [*others, *(v for _, v in found)]
            reads = [v for v in given if isinstance(v, Var) and constant(v) is None]
            build = lambda maker: self.build(maker, op, found)  # noqa: E731
        return self.maker.shared_value((var, "as", self.name), reads or [var], build)

    def cast(self, maker: Maker, var: Var, op: Operation | None) -> Var:
        """A value that has to be cast; what cuts a fraction off becomes a rounding towards zero."""
        if op is None:
            made: Var = maker.cast(x=var, dtype=self.name)
            return made
        if np_dtype(var).kind == "b":
            made = maker.cast(x=maker.not_equal(x=op.x, y=np_dtype(op.x).type(0)), dtype=self.name)
            return made
        whole = maker.mul(x=maker.sign(x=op.x), y=maker.floor(x=maker.abs(x=op.x)))
        return whole if np_dtype(whole) == self.dtype else maker.cast(x=whole, dtype=self.name)

    def build(self, maker: Maker, op: Operation, found: Sequence[tuple[str, Any]]) -> Var:
        """The op that stands for one of integers or conditions."""
        given = [v for _, v in found]
        one = self.dtype.type(1)
        made: Var
        if op.op_type == "cast":
            made = maker.cast(x=maker.not_equal(x=given[0], y=self.dtype.type(0)), dtype=self.name)
        elif op.op_type == "mod":
            whole = maker.floor_div(x=given[0], y=given[1])
            made = maker.sub(x=given[0], y=maker.mul(x=whole, y=given[1]))
        elif op.op_type == "logical_not":
            made = maker.sub(x=one, y=given[0])
        elif op.op_type == "logical_xor":
            made = maker.abs(x=maker.sub(x=given[0], y=given[1]))
        elif op.op_type in LOGICAL:
            made = getattr(maker, {"logical_and": "minimum", "logical_or": "maximum"}[op.op_type])(
                x=given[0], y=given[1]
            )
        else:
            inputs = {k: _literal(v) for k, v in op.inputs.items() if v is not None and k[0] != "_"}
            inputs |= dict(found)
            if op.op_type in JOINING:
                inputs["values"] = tuple(given)
            made = getattr(maker, op.op_type)(**inputs)
        return made


def is_whole(var: Var) -> bool:
    """Is a float known to hold whole numbers only?"""
    return all(_whole_itself(v) is not False for v in _upstream(var, _whole_through))


def _whole_itself(var: Var) -> bool | None:
    """Is a value whole by itself? None where that is so if its sources are."""
    if (value := constant(var)) is not None:
        return bool(np.all(np.asarray(value) == np.floor(value)))
    op = var.op
    if op is None or np_dtype(var).kind in "ib":
        return np_dtype(var).kind in "ib"
    if op.op_type in ROUNDING:
        return True
    return None if op.op_type == "cast" or op.op_type in MOVES | WHOLE_SUMS else False


def _whole_through(var: Var) -> list[Var]:
    return [v for _, v in operands_of(cast(Operation, var.op))] if _whole_itself(var) is None else []

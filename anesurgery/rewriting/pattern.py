"""Say what a rewrite looks for, and match it backward from the last op.

A pattern is built from `op`, `var` and `any_of`::

    op.mul(x=op.reduce_sum(x=var("x"), as_="sum"), y=var("factor"), commutes=True)

In MIL every value has exactly one producer, so matching backward needs no search; only `any_of` and
`commutes` (an op whose `x` and `y` may be exchanged) branch. A pattern that no program can match is an error
as soon as it is written: an op type or a parameter that does not exist, or a name that a match uses itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from anesurgery.errors import NO_MATCH, PatternError, Refusal, near_matches
from anesurgery.mil import Block, Operation, Var, op_parameters, op_types


@dataclass(frozen=True)
class Match:
    """The ops and values that a pattern matched; the names given in the pattern are attributes.

    So are the operands of the root, where no name hides them. An attribute is a `Var`, an `Operation` (of
    `as_=`) or whatever `check` bound, so its type is open.
    """

    root: Operation
    """The op that makes the value that the pattern matched."""
    ops: tuple[Operation, ...]
    """Every matched op, the root first. A check that finds more of them binds a longer `ops`."""
    bindings: Mapping[str, object] = field(default_factory=dict)
    """Name in the pattern, or bound by `check` -> what it stands for."""
    within: Mapping[Var, tuple[float, float]] = field(default_factory=dict)
    """Inputs of the comparison -> the least and the largest number that they are drawn from."""
    limits: Mapping[Var, float] = field(default_factory=dict)
    """Values that the edit reads -> the largest magnitude up to which it holds, in place of `magnitude`."""

    @property
    def block(self) -> Block:
        """The block of the root op."""
        block = self.root.enclosing_block
        assert block is not None
        return block

    def bind(
        self,
        *,
        ops: tuple[Operation, ...] | None = None,
        within: Mapping[Var, tuple[float, float]] | None = None,
        limits: Mapping[Var, float] | None = None,
        **extra: object,
    ) -> Match:
        """Return the match with more names: what `check` found and `rewrite` needs.

        Args:
            ops: all that the edit replaces, the root first, where that is more than the pattern matched.
            within: inputs of the comparison, with the least and the largest number that they are drawn from.
            limits: values that the edit reads, with the largest magnitude up to which it holds: the intervals
                or a run on inputs must show that they are no larger.
            extra: names, each with what it stands for.

        Raises:
            PatternError: a name that the match uses itself.
        """
        for name in extra:
            _free_name(name)
        bindings = {**self.bindings, **extra}
        return replace(
            self,
            ops=ops or self.ops,
            bindings=bindings,
            within={**self.within, **(within or {})},
            limits={**self.limits, **(limits or {})},
        )

    def __getattr__(self, name: str) -> Any:
        for values in (self.bindings, self.root.inputs):
            if name in values:
                return values[name]
        has = sorted({*self.bindings, *self.root.inputs})
        raise AttributeError(f"the match has no {name!r}; it has {has}")


RESERVED = frozenset(
    {f.name for f in fields(Match)} | {name for name in vars(Match) if not name.startswith("_")}
)
"""Names that a match uses itself, so that no value or op can bear them."""


def _free_name(name: str) -> str:
    """Return a name for a value or op.

    Raises:
        PatternError: the match uses the name itself.
    """
    if name in RESERVED:
        raise PatternError(f"no value or op can be named {name!r}: a match uses {', '.join(sorted(RESERVED))}")
    return name


@dataclass(frozen=True)
class AnyVar:
    """Matches every value and gives it a name; the same name twice must be the same value."""

    name: str


@dataclass(frozen=True)
class OpPattern:
    """Matches a value made by an op of one of the given types."""

    op_types: tuple[str, ...]
    """Names of ops, as "mul"."""
    inputs: Mapping[str, Pattern]
    """Parameter of the op -> what its value must match; others may be anything."""
    as_: str | None = None
    """Name of the op itself in the match."""
    commutes: bool = False
    """May `x` and `y` stand for each other?"""


@dataclass(frozen=True)
class AnyOf:
    """Matches when one of the alternatives does; the first that does wins."""

    alternatives: tuple[Pattern, ...]


Pattern: TypeAlias = "AnyVar | OpPattern | AnyOf"


def var(name: str) -> AnyVar:
    """Match any value, and call it `name`.

    Args:
        name: of the attribute of the match that holds it.

    Returns:
        A pattern that matches any value. The same name twice must be the same value.

    Raises:
        PatternError: a name that the match uses itself.
    """
    return AnyVar(_free_name(name))


def any_of(*alternatives: Pattern) -> AnyOf:
    """Return one of several patterns, tried in order.

    Args:
        alternatives: patterns of a value.

    Returns:
        A pattern that matches the first alternative that fits.

    Raises:
        PatternError: of a pattern among them, where it is made.
    """
    return AnyOf(alternatives)


class Ops:
    """`op.matmul(x=..., y=..., as_="product", commutes=False)` makes a pattern; `op.any("a", "b")(...)` too.

    Raises:
        PatternError: an op type or a parameter that does not exist in any opset, or a reserved name.
    """

    def __getattr__(self, op_type: str) -> Callable[..., OpPattern]:
        if op_type.startswith("__"):  # Python asks for these by itself
            raise AttributeError(op_type)
        return self.any(op_type)

    def any(self, *wanted: str) -> Callable[..., OpPattern]:
        """Return a pattern maker for several op types at once.

        Raises:
            PatternError: there is no such op type; or, when it is called, no such parameter.
        """
        for op_type in wanted:
            if op_type not in op_types():
                raise PatternError(f"there is no op {op_type!r}; {near_matches(op_type, op_types())}")

        def make(as_: str | None = None, commutes: bool = False, **inputs: Pattern) -> OpPattern:
            _check_inputs(wanted, inputs)
            if commutes and set(inputs) != {"x", "y"}:
                raise PatternError(f"{wanted[0]}: commutes=True exchanges x and y, so both must be given")
            return OpPattern(wanted, inputs, as_ if as_ is None else _free_name(as_), commutes)

        return make


def _check_inputs(wanted: Iterable[str], inputs: Mapping[str, Pattern]) -> None:
    """Each input is a pattern, for a parameter that every one of the op types has."""
    for op_type in wanted:
        for name, value in inputs.items():
            if name not in (parameters := op_parameters(op_type)):
                raise PatternError(f"{op_type} has no parameter {name!r}; {near_matches(name, parameters)}")
            if not isinstance(value, (AnyVar, OpPattern, AnyOf)):
                raise PatternError(
                    f"{op_type}({name}=...) needs a pattern, got {value!r}; check constants in `check`"
                )


op = Ops()


def matches(pattern: OpPattern, root: Operation) -> tuple[list[Match], Refusal]:
    """Match at `root`.

    Returns:
        Every way in which the pattern fits, those with `x` and `y` as they are written first; and the reason of
        a near miss, or `NO_MATCH`, where there is none.
    """
    if root.op_type not in pattern.op_types:
        return [], NO_MATCH
    trail: list[tuple[int, str]] = []
    ways = [Match(root, ops, bindings) for bindings, ops in _match_op(pattern, root, {}, (), trail)]
    depth, reason = max(trail, default=(0, "the inputs differ"))
    return ways, Refusal(reason, root) if depth > 1 and not ways else NO_MATCH


Bindings: TypeAlias = "dict[str, Var | Operation]"
_State: TypeAlias = "tuple[Bindings, tuple[Operation, ...]]"


def _match_op(
    pattern: OpPattern,
    op: Operation,
    bindings: Bindings,
    ops: tuple[Operation, ...],
    trail: list[tuple[int, str]],
) -> Iterator[_State]:
    """Yield every way in which an op and what stands before it fit; near misses go to `trail`, deepest wins."""
    ops = (*ops, op)
    if pattern.as_ is not None:
        bindings = {**bindings, pattern.as_: op}
    orders = [dict(pattern.inputs)]
    if pattern.commutes and op.inputs.get("x") is not op.inputs.get("y"):
        orders.append({"x": pattern.inputs["y"], "y": pattern.inputs["x"]})
    for order in orders:
        yield from _match_inputs(list(order.items()), op, bindings, ops, trail)


def _match_inputs(
    wanted: list[tuple[str, Pattern]],
    op: Operation,
    bindings: Bindings,
    ops: tuple[Operation, ...],
    trail: list[tuple[int, str]],
) -> Iterator[_State]:
    if not wanted:
        yield bindings, ops
        return
    (name, pattern), rest = wanted[0], wanted[1:]
    value = op.inputs.get(name)
    if not isinstance(value, Var):
        trail.append((len(ops), f"{op.op_type} has no single {name}"))
        return
    for inner_bindings, inner_ops in _match_value(pattern, value, bindings, ops, trail):
        yield from _match_inputs(rest, op, inner_bindings, inner_ops, trail)


def _match_value(
    pattern: Pattern, value: Var, bindings: Bindings, ops: tuple[Operation, ...], trail: list[tuple[int, str]]
) -> Iterator[_State]:
    if isinstance(pattern, AnyVar):
        if bindings.get(pattern.name, value) is value:
            yield {**bindings, pattern.name: value}, ops
        else:
            trail.append((len(ops), f"{pattern.name} is %{bindings[pattern.name].name} and %{value.name}"))
    elif isinstance(pattern, AnyOf):
        for alternative in pattern.alternatives:
            yield from _match_value(alternative, value, bindings, ops, trail)
    elif value.op is not None and value.op.op_type in pattern.op_types:
        yield from _match_op(pattern, value.op, bindings, ops, trail)
    else:
        made_by = "an input" if value.op is None else value.op.op_type
        trail.append((len(ops), f"%{value.name} comes from {made_by}, not {' or '.join(pattern.op_types)}"))

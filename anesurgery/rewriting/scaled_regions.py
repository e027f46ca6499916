"""Scale regions of a function by powers of two, so that values fit fp16, and undo the scale downstream.

A *region* is a value and all values that sums and moves tie to it, such as a residual stream. All its values
get one *exponent* e: each is computed times 2^e. Example: a stream reaches 100,000 on the calibration, so with
a margin of 2 it must hold 200,000, and fp16 ends at 65,504. It gets the exponent -2: 25,000, or 50,000 with the
margin.

`choose` finds the regions and their exponents from observed magnitudes. `apply` then edits op by op. An op may
hand the scale of its operands on: a product of a scaled value has the same scale, and a norm has none, if its
epsilon is scaled too. Its results then get the exponent that they shall have (`goals`): by a constant of the
op, by an operand, or by a multiplication after it (`bring`). Any other op, such as `exp`, reads its operands
multiplied back (`restore_operands`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from anesurgery import fp16, mil
from anesurgery.checking.ranges import OpRange
from anesurgery.errors import Refusal
from anesurgery.mil import (
    Array,
    Function,
    Operation,
    Var,
    constant,
    consumers,
    is_symbolic,
    nested_ops,
    np_dtype,
    operands,
    producer,
)
from anesurgery.numeric.squares import norm_of
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.session import Session
from anesurgery.semantics import degrees
from anesurgery.semantics.bounds import squared_operand
from anesurgery.semantics.degrees import SUMS_OF_PRODUCTS, TIED, Scaled
from anesurgery.semantics.reading import ints, is_float

WITHIN_NORMS = frozenset({"square", "pow", "mul", "reduce_mean", "reduce_sum", "add"})
"""Ops between a value and the mean of its squares."""
MARGIN = 2.0
"""What other inputs may give beyond the calibration: twice the largest number that was seen. A choice."""
FACTORS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("mul", "matmul"), ("y", "x")),
    **dict.fromkeys(("linear", "conv"), ("weight",)),
    "real_div": ("y", "x"),
}
"""Op type -> the parameters that a result is proportional to, or to their inverse."""
MOST_STEPS = 5000
"""Times that a region is widened or scaled. A choice: each mends one excess, and models have hundreds."""
MOST_WITHIN_NORM = 4
"""The most ops from a mean of squares back to the square: powers, sums, means, and an epsilon."""
SLACK = 3
"""A copy for a norm may be smaller than its region by this power of two: its squares then lose no digit."""
TAILS = frozenset({"elu", "gelu", "silu", "softplus"})
"""Ops that give x itself where x is large, and a constant where it is very negative."""
FLAT = frozenset({"erf", "sigmoid", "tanh"})
"""Ops that give a constant at both ends."""
BENT = TAILS | FLAT
"""Ops that hand on no scale, but need to see a large operand only up to `TAIL`."""
TAIL = 32.0
"""Beyond this magnitude these ops give the same in fp16 as in fp32."""
LEAST_EPSILON = 1e-7
"""Epsilons below vanish in fp16."""


@dataclass(frozen=True)
class Region:
    """Values that are scaled alike."""

    seed: Operation
    """The first op that exceeds its limit."""
    exponent: int
    largest: float
    """The largest magnitude before."""


@dataclass
class ScaledRegions:
    """One function and what was observed of it."""

    session: Session
    function: Function
    observed: Mapping[str, OpRange]
    wanted: dict[Var, int] = field(default_factory=dict)
    """Exponent of each value of a region."""
    exponents: dict[Var, int] = field(default_factory=dict)
    """Exponent of each value, once its op was edited."""
    copies: dict[Var, Var] = field(default_factory=dict)
    """Copy of a value for a norm (`copy_before_norms`) -> the value."""
    restored: dict[Var, Var] = field(default_factory=dict)
    """Scaled value -> the same value multiplied back."""
    refusals: list[Refusal] = field(default_factory=list)
    """Values that exceed their limits although something was scaled."""

    def excess(self, var: Var) -> float:
        """Return the power of two by which a value, unscaled, exceeds its limit; below 0 where it does not."""
        row = self.observed.get(self.copies.get(var, var).name)
        if row is None or not math.isfinite(row.largest) or not row.largest:
            return -math.inf
        over = math.log2(row.largest * MARGIN / fp16.LARGEST)
        if row.partial_sum:
            over = max(over, math.log2(row.partial_sum * MARGIN / fp16.CEILING))
        if row.op_type == "reduce_mean" and var.op is not None:  # the engine sums before it divides
            sizes = [var.op.x.shape[a] for a in ints(var.op, "axes")]
            count = math.prod(int(size) for size in sizes if not is_symbolic(size))
            over = max(over, math.log2(row.largest * count * MARGIN / fp16.LARGEST))
        return over

    def beyond(self) -> int:
        """Return how many values exceed their limits."""
        values = (v for op in self.function.operations if op.op_type != "const" for v in op.outputs)
        return sum(self.excess(v) > 0 for v in values)

    def choose(self) -> list[Region]:
        """Return the regions, and note the exponents of their values in `wanted`.

        Each round takes the first value that still exceeds its limit, and lowers the exponent of its region.
        Squares are too large by twice the power of what is squared, which is scaled in their place.
        """
        regions: dict[Var, Region] = {}
        for _ in range(MOST_STEPS):
            over, amount = self.first_excess()
            if over is None:
                break
            source = source_of(over)
            values = tied_to(source)
            step = amount if source is over else amount / 2
            exponent = self.wanted.get(source, 0) - max(1, math.floor(step))
            self.wanted |= dict.fromkeys(values, exponent)
            first = next((r.seed for v, r in regions.items() if v in values), over.op)
            assert first is not None
            regions = {v: r for v, r in regions.items() if v not in values}
            regions[source] = Region(first, exponent, self.largest(values))
        return list(regions.values())

    def largest(self, values: Iterable[Var]) -> float:
        """Return the largest magnitude that was observed of some values."""
        names = [self.copies.get(v, v).name for v in values]
        return max((self.observed[n].largest for n in names if n in self.observed), default=0.0)

    def first_excess(self) -> tuple[Var | None, float]:
        """Return the first value that exceeds its limit with the exponents wanted so far, and by how much."""
        planned: dict[Var, int] = {}
        for op in self.function.operations:
            if op.op_type == "const":
                continue
            planned |= self.goals(op, planned)[1]
            for var in op.outputs:
                amount = self.excess(var) + planned.get(var, 0)
                if amount > 0:
                    return var, amount
        return None, 0.0

    def goals(self, op: Operation, exponents: Mapping[Var, int]) -> tuple[Scaled | None, dict[Var, int]]:
        """Return what an op does with the scales of its operands.

        Args:
            op: the op.
            exponents: of the values that it reads.

        Returns:
            The scale that it hands on by itself, None if it cannot; and result -> the exponent that it shall
            have: that of its region, else the one handed on. A factor that is a constant is free to undo it.
        """
        reads_scaled = any(exponents.get(v) for _, v in operands(op))
        handed_on = scaled(op, lambda v: exponents.get(v, 0)) if reads_scaled else Scaled(0)
        if reads_scaled and op.op_type in TAILS and self.overflows(op):
            handed_on = Scaled(exponents.get(op.x, 0))
        result = 0 if handed_on is None else int(handed_on.result)
        wanted = {}
        for out in op.outputs:
            free = 0 if self.factor_of(op) and self.excess(out) <= 0 else result
            goal = self.wanted.get(out, free)
            wanted[out] = result if out in self.copies and 0 <= goal - result <= SLACK else goal
        return handed_on, wanted

    def copy_before_norms(self) -> None:
        """Let each norm read a copy of its operand, times 1, so that it can have a scale of its own."""
        with self.function:
            for op in [op for op in self.function.operations if squared_operand(op) is not None]:
                source = squared_operand(op)
                assert source is not None
                norms = {r: norm_of(r) for r in consumers(source)}
                readers = [r for r, norm in norms.items() if r is op or (norm and source in norm.rows)]
                if len(readers) < 2 or not is_float(source):
                    continue
                name = self.session.fresh_name(self.function, f"{source.name}_scaled")
                copy = mil.mb.mul(x=source, y=np_dtype(source).type(1), before_op=op, name=name)
                self.copies[copy] = source
                self.replace(source, copy, readers)

    def drop_copies(self) -> None:
        """Remove the copies that were not scaled."""
        for copy, source in self.copies.items():
            if copy.op is not None and constant(copy.op.y) == 1:
                self.replace(copy, source, consumers(copy))

    def apply(self) -> None:
        """Edit the function, op by op."""
        with self.function:
            for var in self.function.inputs.values():
                if var in self.wanted:
                    self.enter(var, self.wanted[var])
            for op in list(self.function.operations):
                self.restore_in_blocks(op)
                read = [v for _, v in operands(op) if self.exponents.get(v)]
                if read or any(v in self.wanted for v in op.outputs):
                    self.edit(op)
            self.function.set_outputs([self.as_output(v) for v in self.function.outputs])

    def enter(self, var: Var, exponent: int) -> None:
        """Let the region of an input read a copy of it that has the exponent of the region."""
        if self.excess(var) > 0:
            self.refusals.append(Refusal(f"the input %{var.name} exceeds the limit before it can be scaled"))
        readers = consumers(var)
        copy = self.times(var, exponent, None, "scaled")
        self.exponents[copy] = exponent
        self.replace(var, copy, readers)

    def edit(self, op: Operation) -> None:
        """Scale the constants of an op, and bring its results to their exponents."""
        handed_on, goals = self.goals(op, self.exponents)
        if op.op_type in BENT and self.exponents.get(op.x) and self.overflows(op):
            self.saturate(op, goals[op.outputs[0]])
            return
        if handed_on is None or not self.scale_constants(op, handed_on):
            self.restore_operands(op)
            handed_on = Scaled(0)
        for out, goal in goals.items():
            self.exponents[out] = goal
            if change := goal - int(handed_on.result):
                self.bring(op, out, change)

    def overflows(self, op: Operation) -> bool:
        """Is the operand of an op too large to be multiplied back, and its result no output?"""
        return self.excess(op.x) > 0 and op.outputs[0] not in self.function.outputs

    def saturate(self, op: Operation, goal: int) -> None:
        """Let an op read its operand clipped to -TAIL ... TAIL; of `TAILS`, add what the clip cut off, scaled.

        silu(x) becomes silu(clip(x)) + relu(x - TAIL): beyond TAIL it is x itself.
        """
        x, exponent, last, readers = op.x, self.exponents[op.x], mil.next_op(op), consumers(op.outputs[0])
        mb = Builder(self.session, self.function, "scale_ranges", op)
        end = np_dtype(x).type(2.0**exponent * TAIL)
        clipped = mb.clip(x=x, alpha=-end, beta=end, name=f"{op.name}_bend")
        near = mb.mul(x=clipped, y=np_dtype(x).type(2.0**-exponent), name=f"{op.name}_near")
        op.set_inputs(x=near, no_check_var_types=True)
        self.exponents[op.outputs[0]] = 0
        mb = mb.before(last)
        bent = op.outputs[0]
        if goal:
            bent = mb.mul(x=bent, y=np_dtype(x).type(2.0**goal), name=f"{op.name}_scaled")
        if op.op_type in TAILS:
            tail = mb.relu(x=mb.sub(x=x, y=end, name=f"{op.name}_beyond"), name=f"{op.name}_tail")
            if goal != exponent:
                tail = mb.mul(
                    x=tail, y=np_dtype(x).type(2.0 ** (goal - exponent)), name=f"{op.name}_tail_scaled"
                )
            bent = mb.add(x=bent, y=tail, name=f"{op.name}_whole")
        if bent is not op.outputs[0]:
            self.exponents[bent] = goal
            self.replace(op.outputs[0], bent, readers)

    def restore_operands(self, op: Operation) -> None:
        """Let an op that hands on no scale read its operands multiplied back."""
        changed: dict[str, object] = {}
        for name, value in op.inputs.items():
            if isinstance(value, (list, tuple)):
                changed[name] = tuple(self.unscaled(v, op) for v in value)
            elif isinstance(value, Var) and self.exponents.get(value):
                changed[name] = self.unscaled(value, op)
        op.set_inputs(no_check_var_types=True, **changed)

    def restore_in_blocks(self, op: Operation) -> None:
        """Let the blocks of an op, such as branches, read and return values multiplied back."""
        for inner in nested_ops(op):
            self.restore_operands(inner)
        for block in (block for inner in (op, *nested_ops(op)) for block in inner.blocks):
            block.set_outputs([self.unscaled(v, op) for v in block.outputs])

    def unscaled(self, var: Var, reader: Operation | None) -> Var:
        """Return a value multiplied back; of one that overflows then, note a refusal."""
        exponent = self.exponents.get(var, 0)
        if not exponent:
            return var
        if self.excess(var) > 0:
            who = f"read by {reader.name} ({reader.op_type})" if reader is not None else "an output"
            most = self.largest([var])
            self.refusals.append(
                Refusal(
                    f"%{var.name} is {who}, so it is scaled back beyond the limit (largest: {most:.3g})", reader
                )
            )
        if var not in self.restored:
            self.restored[var] = self.times(var, -exponent, var.op)
        return self.restored[var]

    def as_output(self, var: Var) -> Var:
        """Return an output multiplied back, under the name of the output."""
        plain = self.unscaled(var, None)
        if plain is not var and plain.op is not None and var.op is not None:
            name, var.name = var.name, plain.name
            plain.name = plain.op.name = name
            var.op.name = var.name if len(var.op.outputs) == 1 else var.op.name
        return plain

    def times(self, var: Var, exponent: int, maker: Operation | None, name: str = "restored") -> Var:
        """Multiply a value by a power of two, right after the op that makes it; of an input, before all ops."""
        factor = np_dtype(var).type(2.0**exponent)
        fresh = self.session.fresh_name(self.function, f"{var.name}_{name}")
        ops = self.function.operations
        place: Operation | None = ops[0]
        if maker is not None:
            place = None if maker is ops[-1] else mil.next_op(maker)
        return mil.mb.mul(x=var, y=factor, before_op=place, name=fresh)

    def factor_of(self, op: Operation) -> str:
        """Return the name of the constant that the result of an op is proportional to; "" for none."""
        names = FACTORS.get(op.op_type, ())
        return next((n for n in names if producer(op.inputs.get(n), "const") is not None), "")

    def bring(self, op: Operation, out: Var, change: int) -> None:
        """Change the exponent of a result: by a constant, by an operand, or by a product after the op."""
        name = self.factor_of(op)
        of_factor = -change if (op.op_type, name) == ("real_div", "y") else change
        by_factor = bool(name) and self.scale_constant(op, name, of_factor)
        multiplies = op.op_type in SUMS_OF_PRODUCTS | {"mul", "real_div"} and producer(op.x, "const") is None
        if by_factor or multiplies:
            if not by_factor:
                op.set_inputs(x=self.times(op.x, change, op.x.op, "scaled"), no_check_var_types=True)
            if op.inputs.get("bias") is not None:
                self.scale_constant(op, "bias", change)
            return
        if self.excess(out) > 0:
            self.refusals.append(Refusal(f"%{out.name} exceeds the limit before it can be scaled", op))
        readers = consumers(out)
        product = self.times(out, change, op, "scaled")
        self.exponents[product] = self.exponents[out]
        self.exponents[out] = self.exponents[out] - change
        self.replace(out, product, readers)

    def replace(self, old: Var, new: Var, readers: list[Operation]) -> None:
        """Let some ops read another value."""
        for op in readers:
            changed = {
                k: tuple(new if x is old else x for x in v) if isinstance(v, (list, tuple)) else new
                for k, v in op.inputs.items()
                if v is old or (isinstance(v, (list, tuple)) and any(x is old for x in v))
            }
            op.set_inputs(no_check_var_types=True, **changed)
        outputs = [new if v is old else v for v in self.function.outputs]
        if new in outputs:
            self.function.set_outputs(outputs)

    def scale_constants(self, op: Operation, handed_on: Scaled) -> bool:
        """Scale the constants that must be scaled with the operands; False if one would lose bits.

        An op has one constant at most that may lose bits, so nothing is changed then: biases and epsilons are
        rounded.
        """
        return all(self.scale_constant(op, name, int(e)) for name, e in handed_on.constants.items())

    def scale_constant(self, op: Operation, name: str, exponent: int) -> bool:
        """Scale a constant; False if a weight would lose bits. An epsilon is kept from vanishing."""
        var = op.inputs.get(name)
        if not exponent or var is None:
            return True
        value: Array = np.asarray(constant(var))
        with np.errstate(over="ignore", under="ignore"):
            numbers = np.ldexp(value, exponent).astype(value.dtype)
            if name == "epsilon" or self.guards(op, name):
                least = LEAST_EPSILON if value.dtype == np.float16 else 0
                numbers = np.maximum(numbers, value.dtype.type(least) * (value > 0))
            elif name != "bias" and not np.array_equal(np.ldexp(numbers, -exponent).astype(value.dtype), value):
                return False
        mb = Builder(self.session, self.function, "scale_ranges", op)
        new = mb.const(val=numbers, name=f"{var.name}_scaled")
        op.set_inputs(no_check_var_types=True, **{name: new})
        return True

    def guards(self, op: Operation, name: str) -> bool:
        """Is a constant added to keep a root away from 0?"""
        rooted = any(r.op_type in ("rsqrt", "sqrt") for r in consumers(op.outputs[0]))
        return op.op_type == "add" and rooted and bool(np.all(np.asarray(constant(op.inputs[name])) > 0))


def source_of(var: Var) -> Var:
    """Return the value to scale where one is too large: for squares, their sums and means, what was squared."""
    op = var.op
    for _ in range(MOST_WITHIN_NORM):
        if op is None or op.op_type not in WITHIN_NORMS:
            break
        if (source := squared_operand(op)) is not None:
            return source
        op = op.x.op
    return var


def scaled(op: Operation, of: Callable[[Var], int]) -> Scaled | None:
    """Return the scale that an op hands on; None unless all its exponents are integers."""
    found = degrees.scaled(op, of)
    powers = [] if found is None else [found.result, *found.constants.values()]
    return found if all(power % 1 == 0 for power in powers) else None


def tied_to(start: Var) -> set[Var]:
    """Return the values that sums and moves tie to one, so that they must have the same scale."""
    found, queue = {start}, deque([start])
    while queue:
        var = queue.popleft()
        near = [op for op in (var.op, *consumers(var)) if op is not None and op.op_type in TIED]
        for op in near:
            fresh = [v for v in _floats(op) if v not in found and producer(v, "const") is None]
            found.update(fresh)
            queue.extend(fresh)
    return found


def _floats(op: Operation) -> Iterable[Var]:
    return [v for v in (*(v for _, v in operands(op)), *op.outputs) if is_float(v)]

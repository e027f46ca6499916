"""Compute values that depend on no input once, when the pass runs, and store them as constants.

Before::

    main(%x: 1x4xfp16) {
      %places: 4xint32 = range_1d(end=4, start=0, step=1)
      %ahead: 4xbool = greater(x=%places, y=1)
      %shut: 4xfp16 = cast(x=%ahead, dtype="fp16")
      %fill: 4xfp16 = mul(x=%shut, y=-10000)
      %y: 1x4xfp16 = add(x=%x, y=%fill)
      return %y
    }

After::

    main(%x: 1x4xfp16) {
      %y: 1x4xfp16 = add(x=%x, y=[-0, -0, -10000, -10000])
      return %y
    }

Each value is computed in fp32 and rounded to fp16 once, when it is stored. If it were rounded after each op, a
running count would stop at 2,048, and the cosine of a large angle would be wrong. A static shape is a known
value, and so is a row read from a table whose rows are all equal. Two integers whose ranges do not overlap are
known to differ: `assume={"input_ids": (2, 50264)}` says that no id is the padding 1, so positions that count
such ids are constant. Such a fold is compared with the test that it replaces, also at the ends of the input
ranges. Equal values are stored once. A value stays computed if it would take more than `most_growth` bytes
beyond the constants that it is made from, or if it is an output of the model; the values that such an op reads
are still folded.

Compressed weights are transposed, reshaped and sliced in their form, and stay compressed. Sums and products of
them are folded only with `compressed="reencode"` in `apply`. Random numbers and states are not constants.

Refuses when the interpreter does not know an op, when a value would grow the weights beyond the limit, when an
output depends on no input, and when coremltools infers another value and the interpreter, rounding after each
op, does not confirm it.

Why it helps: masks and positions of today's transformers are written as gather_nd, cast and comparisons of
integers, which stay on the CPU (measured: M4, macOS 27.0.1). What folding gains in time was not measured.

Grade: exhaustive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from anesurgery import authoring as an
from anesurgery import interpret
from anesurgery.authoring import (
    Builder,
    Match,
    OpPattern,
    Ops,
    Pass,
    Program,
    Refusal,
    Rewrite,
    Session,
    Var,
    mb,
)
from anesurgery.checking.grades import Grade, SiteCheck
from anesurgery.checking.lengths import drawn_shape
from anesurgery.display import byte_words
from anesurgery.errors import InterpretError
from anesurgery.facts import dependence, whole_numbers
from anesurgery.mil import Block, is_compressed, is_constexpr, reads, stamp, walk_ops
from anesurgery.regions import reencoding, weight_edits
from anesurgery.semantics.inference import widen_choice
from anesurgery.semantics.reading import size_of

KEY_ELEMENTS = 1 << 10
"""A constant is looked up by its first elements, so many of them: keys stay short."""
ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "real_div": np.divide}
"""Op type -> the function of a compressed weight and another constant, if `compressed="reencode"` allows it."""
COMPUTED_ONCE = "computed by the interpreter; coremltools infers no value to compare it with"
ROUNDED_ONCE = "rounded once; after each op, as coremltools has it, it would be another value"
ENDS = 0.6
"""The share of samples that are drawn at the ends of an assumed range, to check a folded equality test."""


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Values that depend on no input become constants."""

    name = "fold_constants"
    # masks and positions that depend on no input are constants for these
    precedes = ("gather_to_moves", "select_last_token", "causal_mask_tensor", "embedding_matmul")
    most_growth: int = 16 << 20
    """Bytes that a value may take beyond the constants it was made from."""

    def run(self, program: Program, session: Session) -> None:
        """Fold what each function, and each block nested in it, reads of fixed values."""
        _NeverEqual(session.assume).run(program, session)
        for function in program.functions.values():
            nested = [b for op in walk_ops(function) for b in op.blocks]
            with an.GraphEdits(self, session, function) as edits:
                folding = _Folding(self, session, edits)
                for block in (function, *nested):
                    folding.visit(block)


@dataclass(frozen=True)
class _NeverEqual(Rewrite):
    """Fold an equality test of two integers whose ranges do not overlap.

    The test depends on inputs, so the constant is compared with it, also at the ends of the assumed ranges.
    """

    name: ClassVar[str] = "fold_constants"
    assume: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def pattern(self, op: Ops) -> OpPattern:
        return op.any("equal", "not_equal")()

    def check(self, m: Match) -> Match | None:
        apart = dependence.never_equal(m.root, whole_numbers.WholeNumbers(self.assume))
        return m if apart and not an.is_output(m.root.outputs[0]) else None

    def rewrite(self, mb: Builder, m: Match) -> Var:
        mb.note(f"by their ranges %{m.root.x.name} never equals %{m.root.y.name}")
        return mb.const(val=np.full(m.root.outputs[0].shape, m.root.op_type == "not_equal"))

    def sample(self, m: Match, var: Var, rng: np.random.Generator) -> an.Array | None:
        """Draw integers that the caller promises, the ends of their range among them."""
        if var.op is not None or var.name not in self.assume or an.np_dtype(var).kind not in "iu":
            return None
        low, high = self.assume[var.name]
        drawn = rng.integers(low, high, drawn_shape(var), endpoint=True)
        ends = rng.choice([low, high], drawn.shape)
        return np.where(rng.random(drawn.shape) < ENDS, ends, drawn).astype(an.np_dtype(var))


@dataclass
class _Folding:
    """Fold one function.

    `stored` holds the constants made so far, under their dtype, shape and first elements.
    """

    step: FoldConstants
    session: Session
    edits: an.GraphEdits
    stored: dict[tuple[object, ...], list[tuple[an.Array, Var]]] = field(default_factory=dict)

    def visit(self, block: Block) -> None:
        """Fold from the last fixed op backwards: if an op is refused, the values that it reads are folded."""
        for op in list(block.operations):
            self.edit_compressed(op)
        fixed = dependence.fixed_ops(block)
        refused = set[an.Operation]()
        for op in reversed(fixed):
            outputs = [v for v in op.outputs if an.is_output(v)]
            read = [v for v in op.outputs if any(o not in fixed or o in refused for o in v.child_ops)]
            if not (used := [v for v in op.outputs if v in outputs or v in read]):
                continue
            values = self.values_of(op, used, fixed)
            if isinstance(values, Refusal):
                self.session.refuse(self.step.name, values)
                refused.add(op)
            else:
                self.fold(op, used, values)

    def edit_compressed(self, op: an.Operation) -> None:
        """Apply an op to a compressed weight: a move or slice in its form; arithmetic only where allowed."""
        weight = next((v for v in reads(op) if is_compressed(v)), None)
        if weight is None or is_constexpr(op) or any(map(an.is_output, op.outputs)):
            return
        edit = weight_edits.edit_of(op)
        if edit is None and not (op.op_type in ARITHMETIC and _is_stored_arithmetic(op, weight)):
            return
        grown = reencoding.stored_bytes(weight) * size_of(op.outputs[0]) // max(1, size_of(weight))
        if grown > self.step.most_growth and len(weight.child_ops) > 1:
            words = f"%{weight.name} is read elsewhere too, and would be stored twice ({byte_words(grown)})"
            self.session.refuse(self.step.name, words, op)
            return
        mb, name = self.edits.before(op), f"{op.outputs[0].name}_folded"
        try:
            if edit is not None:
                edited = an.edit_weight(mb, weight, edit, name)
            else:
                numbers = {k: an.decoded(op.inputs[k]) for k in ("x", "y")}
                edited = mb.stored_like(weight, lambda: ARITHMETIC[op.op_type](*numbers.values()), (op,), name)
        except an.Refused as reason:
            self.session.refuse(self.step.name, str(reason), op)
        else:
            self.edits.compare(op.name, (op.outputs[0], edited))
            self.replace(op, op.outputs, [edited], (f"compressed weight {edited.name}",))

    def values_of(
        self, op: an.Operation, used: list[Var], fixed: dict[an.Operation, None]
    ) -> list[an.Array] | Refusal:
        """Return the values of an op's outputs that are used, or why the op stays."""
        if outputs := [v.name for v in used if an.is_output(v)]:
            return Refusal(f"the output %{outputs[0]} depends on no input", op)
        outside = {v for o in fixed if (v := dependence.shape_only(o)) is not None and v.op not in fixed}
        ops = dependence.slice_back(used, outside)
        growth = sum(map(size_of, used)) - sum(
            size_of(v) for o in ops if o.op_type == "const" for v in o.outputs
        )
        if growth > self.step.most_growth:
            grown = f"{byte_words(growth)}, the limit is {byte_words(self.step.most_growth)}"
            return Refusal(f"as a constant %{used[0].name} would grow the weights by {grown}", op)
        try:
            running = [o for o in ops if o.op_type != "const"]
            values = compute(running, used, outside)
        except InterpretError as error:
            return Refusal(f"not computed: {str(error).splitlines()[0]}", op)
        evidence = self.evidence(running, used, values, outside)
        if isinstance(evidence, Refusal):
            return evidence
        if self.session.prove_sites:
            self.edits.shown = evidence
        return values

    def evidence(
        self, ops: Sequence[an.Operation], used: list[Var], values: list[an.Array], outside: set[Var]
    ) -> Mapping[str, object] | Refusal:
        """Return how values were checked, as the report shows it; a refusal if coremltools infers others."""
        if not all(map(_is_inferred, used)):
            return {"unchecked": COMPUTED_ONCE}
        agreement = compare_with_host(used, values, self.session.seed)
        if not isinstance(agreement, Refusal):
            return {"proof": agreement}
        rounded = compute(ops, used, outside, "fp16")  # coremltools rounds after each op
        second = compare_with_host(used, rounded, self.session.seed)
        return second if isinstance(second, Refusal) else {"unchecked": f"{ROUNDED_ONCE}: {agreement.reason}"}

    def fold(self, op: an.Operation, used: list[Var], values: list[an.Array]) -> None:
        """Replace the results of an op by constants, and remove the ops that only it needed."""
        widen_choice(op)
        constants = [self.constant(value, var, op) for value, var in zip(values, used, strict=True)]
        self.replace(op, used, constants, tuple(f"const {v.name}" for v in constants))

    def replace(
        self, op: an.Operation, used: Sequence[Var], constants: Sequence[Var], after: tuple[str, ...]
    ) -> None:
        """Let the readers of an op read the constants, and record the edit."""
        for old, new in zip(used, constants, strict=True):
            self.edits.replace(old, new)
        self.edits.remove([op])
        self.edits.record(op.name, after=after)

    def constant(self, value: an.Array, var: Var, op: an.Operation) -> Var:
        """Return a constant at the head of the function; equal values share one."""
        key = (value.dtype.str, value.shape, value.ravel()[:KEY_ELEMENTS].tobytes())
        candidates = self.stored.setdefault(key, [])
        constant = next((var for content, var in candidates if _same_bits(content, value)), None)
        if constant is None:
            constant = self.edits.first().const(val=np.asarray(value, order="C"), name=f"{var.name}_folded")
            stamp(constant.op, op)
            candidates.append((value, constant))
        return constant


def _is_stored_arithmetic(op: an.Operation, weight: Var) -> bool:
    """Are both operands stored, and has the result the shape of the weight?"""
    return an.is_stored(op.x) and an.is_stored(op.y) and op.outputs[0].shape == weight.shape


def compute(
    ops: Sequence[an.Operation], wanted: Sequence[Var], outside: Iterable[Var] = (), precision: str = "fp32"
) -> list[an.Array]:
    """Return values that depend on no input, each in its dtype.

    Args:
        ops: the ops that make them, in an order in which they can run.
        wanted: the values to return.
        outside: values of which the ops read only the shape.
        precision: "fp32", or "fp16" to round after each op, as coremltools does where it infers values.

    Raises:
        InterpretError: an op that the interpreter does not know.
    """
    import torch

    dtypes = {v: torch.int32 if an.np_dtype(v).kind in "iu" else torch.float32 for v in outside}
    zeros = {  # only their shapes are read
        v: torch.zeros((), dtype=dtype).expand(shape)
        for v, dtype in dtypes.items()
        if (shape := an.static_shape(v)) is not None
    }
    tensors = interpret.evaluate(ops, zeros, wanted, precision=precision)
    with np.errstate(over="ignore"):  # a mask of -1e9 is -inf in fp16
        return [_to_array(t, an.np_dtype(v)) for t, v in zip(tensors, wanted, strict=True)]


def _to_array(tensor: Any, dtype: np.dtype[Any]) -> an.Array:
    """Return a tensor as an array; torch rounds to fp16 many times as fast as numpy."""
    halves = dtype == np.float16 and tensor.is_floating_point()
    return np.asarray((tensor.half() if halves else tensor).numpy()).astype(dtype, copy=False)


# coremltools infers many of these values too, which makes it a second, independent computation.


ROUNDING = 1e-2
"""An element that differs by more than this share of itself is no rounding, even of long sums in fp16."""


def _is_inferred(var: Var) -> bool:
    """Does coremltools infer the numbers of a value?"""
    return var.val is not None and np.asarray(var.val).dtype.kind in "biuf"


def compare_with_host(vars_: Sequence[Var], values: Sequence[an.Array], seed: int = 0) -> SiteCheck | Refusal:
    """Compare values that the interpreter computed with those that coremltools inferred.

    Args:
        vars_: the values, all of them inferred.
        values: the same values as the interpreter computed them.
        seed: of the session, for the report.

    Returns:
        The check, exhaustive if all bits are equal, since no input can vary. A refusal with both numbers if
        they differ by more than rounding.
    """
    worst, relative, count = 0.0, 0.0, 0
    for var, value in zip(vars_, values, strict=True):
        other = np.asarray(var.val)
        if other.shape != value.shape:
            return Refusal(f"%{var.name} has the shape {value.shape}, and {other.shape} by coremltools", var.op)
        count += value.size
        if _same_bits(value, other):
            continue
        differences, relative_ones = _differences(value, other)
        if np.any(relative_ones > (ROUNDING if value.dtype.kind == "f" else 0)):
            at = np.unravel_index(int(np.argmax(relative_ones)), value.shape)
            return Refusal(f"%{var.name} holds {value[at]}, and {other[at]} by coremltools", var.op)
        worst = max(worst, np.max(differences, initial=0))
        relative = max(relative, np.max(relative_ones, initial=0))
    grade = Grade.NUMBERS if worst else Grade.EXHAUSTIVE
    return SiteCheck(float(worst), float(relative), count, grade, None, seed)


def _same_bits(value: an.Array, other: an.Array) -> bool:
    """Are two arrays of one shape of the same type, and equal bit for bit?"""
    words = f"u{value.dtype.itemsize}"
    if value.dtype != other.dtype:
        return False
    one, two = (np.asarray(x, order="C").view(words) for x in (value, other))
    return np.array_equal(one, two)


def _differences(value: an.Array, other: an.Array) -> tuple[an.Array, an.Array]:
    """Return the absolute and relative difference of each element; infinite if only one is NaN or infinite."""
    wide, others = value.astype(np.float64), other.astype(np.float64)
    same = (wide == others) | (np.isnan(wide) & np.isnan(others))
    with np.errstate(all="ignore"):
        absolute = np.where(same, 0.0, np.abs(wide - others))
        relative = np.where(same, 0.0, absolute / np.abs(others))
    return absolute, np.nan_to_num(relative, nan=np.inf, posinf=np.inf)


@an.example((1, 4), dtype="fp16", opset="iOS17")
def example(x: Var) -> Var:
    """A causal mask of one row, counted out in integers."""
    places = mb.range_1d(start=np.int32(0), end=np.int32(4), step=np.int32(1), name="places")
    ahead = mb.greater(x=places, y=np.int32(1), name="ahead")
    fill = mb.mul(x=mb.cast(x=ahead, dtype="fp16", name="shut"), y=np.float16(-1e4), name="fill")
    return mb.add(x=x, y=fill, name="y")

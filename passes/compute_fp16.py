"""Convert fp32 computation to fp16, except for the ops that would break in fp16.

Inputs and outputs keep their types, with casts at both ends; constants are stored as fp16. Each op is judged by
its constants, by intervals that hold for every input, and by `ranges`: known ranges of values by name, either
promised (`{"mask": (0, 1)}`) or observed (`{r.name: (r.minimum, r.maximum) for r in ane.ranges(m).rows}`).
Epsilons of norms below 1e-7 become 1e-7; a limit such as that of `x < 1e-10` becomes 6e-8, and not 0. A
variance that fp16 cannot hold becomes 1, and gamma takes its root. Finite mask fills beyond fp16 become -3e4:
the softmax still gives zeros, because scores stay above -2e4. The pass assumes that an input that only masks
scores holds 0 and 1, and that a row masked by sums keeps some score; the notes of the surgery state these
assumptions. Nested blocks stay as they are.

Refuses when an op has a constant or a result above 65504 (which includes a constant mask that masks a whole row
by sums), when a guard such as x + 1e-12 becomes zero (then the squares that it guards, the division, and all
sums whose logarithm is taken stay too), when it may hold integers above 2048, and when the op takes no fp16.
The report gives the value for each op that stays. A value of unknown range is assumed to fit, so compare the
whole models (60 dB).

Why it helps: the ANE computes in fp16 and int8; fp32 ops stay on the CPU or GPU (documented by Apple for all
chips; "Unsupported tensor format: fp32" was measured through Core ML on M4, macOS 27, and on M1, macOS 14.6).
Epsilons below the least fp16 number vanish (Apple's own port uses 1e-7). Intervals and promises hold for all
inputs; observed ranges are checked on the samples that they come from.

Grade: none: fp16 rounds each value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Pass, Program, Refusal, Session, Var, mb
from anesurgery.facts import half as half_facts
from anesurgery.mil import any_symbolic, types, walk_ops
from anesurgery.ops import COMPARISONS
from anesurgery.rewriting.graph_edits import op_words
from anesurgery.rewriting.passes import check_named
from anesurgery.semantics.inference import set_type

EPSILON = 1e-7
"""The least epsilon of a norm (`num-eps`: Apple's own port)."""
ROUNDED = "operands are rounded too, and drawn numbers may leave fp16 where its own do not; compare models"


@dataclass(frozen=True)
class ComputeFp16(Pass):
    """fp32 ops become fp16 where the range analysis allows it."""

    name = "compute_fp16"
    tolerance = an.Tolerance(5e-3)
    rounds = True
    follows = ("unroll_recurrent", "fold_batch_norm")
    caveat = "values are rounded to fp16; compare the outputs on your own inputs"
    ranges: Mapping[str, tuple[float, float]] | None = None
    """Name of a value -> its known range (least, largest), promised or observed."""
    keep: Sequence[str] = ()
    """Names of results whose ops stay fp32 even if fp16 could hold them."""

    def run(self, program: Program, session: Session) -> None:
        """Convert each function, op by op."""
        if self.keep:
            check_named(self.keep, program)
        ranges = {**session.assume, **(self.ranges or {})}
        for function in program.functions.values():
            verdicts = half_facts.judge(walk_ops(function), ranges, frozenset(self.keep))
            session.refusals += [(self.name, Refusal(why, op)) for op, why in verdicts.stays.items()]
            session.notes += [words for words in verdicts.assumed.values() if words not in session.notes]
            with an.GraphEdits(self, session, function) as edits:
                _Conversion(edits, verdicts).convert()


@dataclass
class _Conversion:
    """Convert one function: first all fp16 ops are made beside the old ones, then the old ones are removed."""

    edits: an.GraphEdits
    verdicts: half_facts.Verdicts
    half: dict[Var, Var] = field(default_factory=dict)
    """fp32 value -> the same value in fp16."""
    replaced: list[tuple[an.Operation, list[Var]]] = field(default_factory=list)
    """Old ops, each with its new results (none for a cast that is only removed)."""

    def convert(self) -> None:
        """Make the fp16 ops beside the old ones, then give readers of fp32 a cast and remove the old ops."""
        for op in list(self.edits.function.operations):
            if op.op_type == "cast":
                self.convert_cast(op)
            elif op.op_type != "const" and not op.blocks and op not in self.verdicts.stays:
                self.make_fp16_op(op)
        for op, news in reversed(self.replaced):
            self.remove(op, news)

    def convert_cast(self, op: an.Operation) -> None:
        """Remove a cast between fp16 and fp32, or cast to fp16 directly where fp16 ops read the result."""
        (out,) = op.outputs
        if an.dtype_name(out) == "fp32" and an.dtype_name(op.x) == "fp16":
            self.half[out] = op.x
            self.replaced.append((op, []))
        elif an.dtype_name(out) == "fp16" and op.x in self.half and not an.is_output(out):
            self.edits.replace(out, self.half[op.x])
            self.replaced.append((op, []))
        elif an.dtype_name(out) == "fp32" and op not in self.verdicts.stays and self.has_fp16_reader(out):
            self.record(op, [self.edits.before(op).cast(x=op.x, dtype="fp16", name=f"{op.name}_fp16")])

    def has_fp16_reader(self, var: Var) -> bool:
        """Does an op that becomes fp16 read the value?"""
        readers = [r for r in var.child_ops if r.op_type != "cast" and not r.blocks]
        return any(r not in self.verdicts.stays for r in readers)

    def make_fp16_op(self, op: an.Operation) -> None:
        """Build the op again with fp16 in place of every fp32 operand.

        An op with nothing but options in fp32 (alpha, epsilon) computes in fp16 already.
        """
        single = [v for n, v in an.operands(op) if an.dtype_name(v) == "fp32" and half_facts.takes_half(op, n)]
        options = [v for v in single if v.rank == 0 and an.constant(v) is not None]
        gives_single = any(an.dtype_name(v) == "fp32" for v in op.outputs)
        if not single or (len(options) == len(single) and not gives_single):
            return
        inputs = {k: self.operand(op, k, v) for k, v in an.op_inputs(op).items()}
        if (scale := half_facts.unit_scale(op)) is not None:  # gamma / sqrt(variance + epsilon)
            ones, gamma = np.ones_like(scale, np.float16), scale.astype(np.float16)
            inputs |= {"variance": ones, "gamma": gamma, "epsilon": np.float16(EPSILON)}
        results = getattr(self.edits.before(op), op.op_type)(**inputs, name=f"{op.name}_fp16")
        news = list(results) if isinstance(results, (tuple, list)) else [results]
        for old, new in zip(op.outputs, news, strict=True):
            if types.is_tensor(new.sym_type) and any_symbolic(new.shape):
                set_type(new, types.tensor(new.dtype, old.shape))  # the same op has the same dynamic sizes
        self.record(op, news)

    def record(self, op: an.Operation, news: list[Var]) -> None:
        """Record the edit of an op, and the fp16 values of its results."""
        new = news[0].op
        assert new is not None
        for old, var in zip(op.outputs, news, strict=True):
            if an.dtype_name(old) == an.dtype_name(var):
                self.edits.replace(old, var)
            else:
                self.half[old] = var
        self.replaced.append((op, news))
        fills = [self.verdicts.fills[v] for _, v in an.operands(op) if v in self.verdicts.fills]
        self.edits.removed.append(op)  # `remove` does so when all its readers have their fp16 form
        self.edits.record(op.name, "; ".join(fills), unchecked=ROUNDED, after=op_words([new]))

    def operand(self, op: an.Operation, name: str, value: Any) -> Any:
        """Return what the fp16 op reads in place of an operand of the fp32 op."""
        if isinstance(value, (list, tuple)):
            return tuple(self.operand(op, name, v) for v in value)
        if an.dtype_name(value) != "fp32" or not half_facts.takes_half(op, name):
            return value
        if op.op_type in half_facts.NORMS and name == "epsilon":
            return np.float16(max(an.number(value) or 0.0, EPSILON))
        if op.op_type in COMPARISONS and an.producer(value, "const") is not None:
            return _kept_from_0(an.constant(value))
        if value not in self.half:
            const = an.producer(value, "const")
            self.half[value] = (
                self.cast_after(value, value, "fp16") if const is None else self.constant(value, const)
            )
        return self.half[value]

    def constant(self, var: Var, maker: an.Operation) -> Var:
        """Make the fp16 version of a constant, right before it."""
        value: an.Array = np.asarray(an.constant(var), np.float32)
        if var in self.verdicts.fills:
            value = np.where(np.isfinite(value), np.clip(value, -half_facts.FILL, half_facts.FILL), value)
        with np.errstate(over="ignore"):  # a limit that never cuts becomes infinite
            half: Var = self.edits.before(maker).const(val=value.astype(np.float16), name=f"{var.name}_fp16")
        return half

    def cast_after(self, var: Var, like: Var, dtype: str) -> Var:
        """Make a cast of a value, right after the op that makes `like`."""
        return self.edits.after(like).cast(x=var, dtype=dtype, name=f"{like.name}_{dtype}")

    def remove(self, op: an.Operation, news: list[Var]) -> None:
        """Remove an old op; readers that still need its fp32 results get casts."""
        takes_over: list[tuple[Var, Var]] = []
        for old, new in zip(op.outputs, news, strict=False):  # `news` is empty for a cast that is only removed
            output = an.is_output(old)
            if old is not new and (old.child_ops or output):
                self.edits.replace(old, self.cast_after(new, old, "fp32"))
            if not output and not an.is_output(new):  # an output of the same type has taken the name already
                takes_over.append((old, new))
        self.edits.remove([op])
        for old, new in takes_over if op.enclosing_block is None else ():
            self.edits.take_name(old, new)


def _kept_from_0(limits: Any) -> an.Array:
    """Return fp32 limits in fp16; `x < 1e-10` would never hold if the limit became 0."""
    limits = np.asarray(limits, np.float32)
    with np.errstate(over="ignore"):
        half = limits.astype(np.float16)
    least = np.copysign(an.fp16.LEAST, limits).astype(np.float16)
    return np.where((half == 0) & (limits != 0), least, half)


@an.example((1, 4))
def example(x: Var) -> Var:
    """A product, a division by a guarded sum, and an activation."""
    weight = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    bias = np.arange(3, dtype=np.float32)
    h = mb.linear(x=x, weight=weight, bias=bias, name="h")
    q = mb.reduce_sum(x=mb.abs(x=h, name="s"), axes=[1], keep_dims=True, name="q")
    n = mb.real_div(x=h, y=mb.add(x=q, y=np.float32(1e-12), name="g"), name="n")
    return mb.tanh(x=n, name="y")

"""Python numbers among operands: what a stranger writes runs on fp16 and fp32 models, and in `ct.convert`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conversion import Function, convert

import anesurgery as ane
from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, OpPattern, Ops, Program, Refusal, Rewrite, Var, mb, var
from anesurgery.mil import is_constant, op_types, parameters
from anesurgery.rewriting.builder import typed
from anesurgery.rewriting.host import pass_pipeline

HALVES = [an.types.fp16, an.types.fp32]


@dataclass(frozen=True)
class MeanOfSum(Rewrite):
    """A sum times 1/n is a mean."""

    name: ClassVar[str] = "mean_of_sum"
    tolerance: ClassVar[an.Tolerance] = an.Tolerance(1e-3)

    def pattern(self, op: Ops) -> OpPattern:
        return op.mul(x=op.reduce_sum(x=var("x"), as_="sum"), y=var("factor"), commutes=True)

    def check(self, m: Match) -> Match | Refusal:
        count = int(np.prod([m.x.shape[axis] for axis in an.constant(m.sum.axes)]))
        if not is_constant(m.factor, 1 / count, rtol=2**-11):
            return Refusal(f"the factor is not 1/{count}", m.root)
        return m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.reduce_mean(x=m.x, axes=an.constant(m.sum.axes), keep_dims=an.constant(m.sum.keep_dims))


@dataclass(frozen=True)
class MergeClips(Rewrite):
    """Two clips in a row are one."""

    name: ClassVar[str] = "merge_clips"

    def pattern(self, op: Ops) -> OpPattern:
        return op.clip(x=op.clip(x=var("x"), as_="inner"), as_="outer")

    def check(self, m: Match) -> Match | Refusal:
        low = max(float(an.constant(m.inner.alpha)), float(an.constant(m.outer.alpha)))
        high = min(float(an.constant(m.inner.beta)), float(an.constant(m.outer.beta)))
        if low > high:
            return Refusal(f"the ranges do not meet: {low:g} is above {high:g}", m.root)
        return m.bind(low=low, high=high)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.clip(x=m.x, alpha=m.low, beta=m.high)


@dataclass(frozen=True)
class DropTimesOne(Rewrite):
    """A multiplication by 1 changes nothing."""

    name: ClassVar[str] = "drop_times_one"

    def pattern(self, op: Ops) -> OpPattern:
        return op.mul(x=var("x"), y=var("one"), commutes=True)

    def check(self, m: Match) -> Match | Refusal:
        if not is_constant(m.one, 1, rtol=0):
            return Refusal(f"%{m.one.name} is not 1", m.root)
        return m

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return m.x


@dataclass(frozen=True)
class LeakyReluAsMaximum(Rewrite):
    """With a slope from 0 to 1, a leaky rectifier is the larger of the value and the value times the slope."""

    name: ClassVar[str] = "leaky_relu_as_maximum"

    def pattern(self, op: Ops) -> OpPattern:
        return op.leaky_relu(x=var("x"), alpha=var("slope"))

    def check(self, m: Match) -> Match | Refusal:
        slope = float(an.constant(m.slope))
        if not 0 <= slope <= 1:
            return Refusal(f"the slope is {slope:g}, not in [0, 1]", m.root)
        return m.bind(slope=slope)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.maximum(x=m.x, y=mb.mul(x=m.x, y=m.slope))


@dataclass(frozen=True)
class Relu6AsClip(Rewrite):
    """A rectifier with an upper end of 6 is a clip."""

    name: ClassVar[str] = "relu6_as_clip"
    kinds: ClassVar[frozenset[str]] = frozenset({"relu6"})

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.clip(x=m.root.x, alpha=np.zeros(1)[0], beta=np.sqrt(36))  # as numpy computes numbers


@dataclass(frozen=True)
class SiluOfParts(Rewrite):
    """A value times its sigmoid is one op."""

    name: ClassVar[str] = "silu_of_parts"
    tolerance: ClassVar[an.Tolerance] = an.Tolerance(1e-3)

    def pattern(self, op: Ops) -> OpPattern:
        return op.mul(x=var("x"), y=op.sigmoid(x=var("x")), commutes=True)

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.silu(x=m.x)


@dataclass(frozen=True)
class FoldTransposes(Rewrite):
    """Two transpositions in a row are one, or none."""

    name: ClassVar[str] = "fold_transposes"

    def pattern(self, op: Ops) -> OpPattern:
        return op.transpose(x=op.transpose(x=var("x"), as_="first"), as_="second")

    def check(self, m: Match) -> Match:
        first, second = an.constant(m.first.perm), an.constant(m.second.perm)
        return m.bind(perm=[first[axis] for axis in second])

    def rewrite(self, mb: Builder, m: Match) -> Var:
        back = m.perm == sorted(m.perm)
        return m.x if back else mb.transpose(x=m.x, perm=m.perm)


def mean(x: Var, kind: Any) -> Var:
    return mb.mul(x=mb.reduce_sum(x=x, axes=[-1], keep_dims=True), y=kind(1 / 3), name="y")


def clips(x: Var, kind: Any) -> Var:
    return mb.clip(x=mb.clip(x=x, alpha=kind(-1), beta=kind(6)), alpha=kind(0.1), beta=kind(9), name="y")


def times_one(x: Var, kind: Any) -> Var:
    return mb.relu(x=mb.mul(x=x, y=kind(1)), name="y")


def one_times(x: Var, kind: Any) -> Var:
    return mb.relu(x=mb.mul(x=kind(1), y=x), name="y")


def relu6(x: Var, kind: Any) -> Var:
    return mb.relu6(x=x, name="y")


def silu(x: Var, kind: Any) -> Var:
    return mb.mul(x=mb.sigmoid(x=x), y=x, name="y")


def transposed(x: Var, kind: Any) -> Var:
    return mb.relu(x=mb.transpose(x=mb.transpose(x=x, perm=[1, 0]), perm=[1, 0]), name="y")


def leaky(x: Var, kind: Any) -> Var:
    return mb.leaky_relu(x=x, alpha=kind(0.3), name="y")


STRANGERS: dict[str, tuple[Rewrite, Callable[[Var, Any], Var], Callable[[torch.Tensor], torch.Tensor]]] = {
    "mean": (MeanOfSum(), mean, lambda x: x.sum(-1, keepdim=True) * (1 / 3)),
    "clips": (MergeClips(), clips, lambda x: x.clamp(-1, 6).clamp(0.1, 9)),
    "times one": (DropTimesOne(), times_one, lambda x: torch.relu(x * torch.tensor([1.0]))),
    "one times": (DropTimesOne(), one_times, lambda x: torch.relu(torch.tensor([1.0]) * x)),
    "relu6": (Relu6AsClip(), relu6, lambda x: torch.nn.functional.relu6(x)),
    "silu": (SiluOfParts(), silu, lambda x: x * torch.sigmoid(x)),
    "transposes": (FoldTransposes(), transposed, lambda x: torch.relu(x.permute(1, 0).permute(1, 0))),
    "leaky": (LeakyReluAsMaximum(), leaky, lambda x: torch.nn.functional.leaky_relu(x, 0.3)),
}
"""A pass, a program in MIL on which it acts, and the same in torch."""


DOES_THE_SAME = ("fuse_reduce_mean", "noop_elimination", "reduce_transposes", "merge_consecutive_transposes")
"""Passes of coremltools that leave nothing to do."""


def built(make: Callable[[Var, Any], Var], dtype: Any) -> Program:
    """The program with operands of one type."""

    return mb.program(input_specs=[mb.TensorSpec((2, 3), dtype)], opset_version=an.ct.target.iOS17)(
        lambda x: make(x, an.types.nptype_from_builtin(dtype))
    )


@pytest.mark.one_of(3)
@pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "fp32"])
@pytest.mark.parametrize("name", STRANGERS)
def test_a_strangers_pass_runs_on_both_types(name: str, dtype: Any) -> None:
    step, make, _ = STRANGERS[name]
    surgery = ane.apply(built(make, dtype), [step], prove="both")
    assert [change.pass_name for change in surgery.changes] == [step.name]
    assert surgery.proof is not None
    assert surgery.proof.ok


@pytest.mark.one_of(3)
@pytest.mark.parametrize("precision", ["FLOAT16", "FLOAT32"])
@pytest.mark.parametrize("name", STRANGERS)
def test_a_strangers_pass_runs_in_a_conversion(name: str, precision: str) -> None:
    step, _, module = STRANGERS[name]
    base = an.ct.PassPipeline.DEFAULT
    base.remove_passes({f"common::{name}" for name in DOES_THE_SAME})
    pipeline, x = pass_pipeline([step], base), torch.linspace(-4, 12, 6).reshape(2, 3)
    made = convert(Function(module), {"x": x}, "trace", "iOS17", precision, pass_pipeline=pipeline)
    assert {change.pass_name for change in pipeline.report.changes} == {step.name}
    (y,) = ane.run(made, {"x": x.numpy()}).values()
    np.testing.assert_allclose(y, module(x).numpy(), rtol=2e-3, atol=2e-3)


@pytest.fixture(params=["iOS15", "iOS18"])
def function(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ops are looked up in the opset of the function that is being built."""
    with an.Function({}, getattr(an.ct.target, request.param)):
        yield


@pytest.mark.usefixtures("function")
def test_a_number_agrees_with_the_operands_of_every_op() -> None:
    """Whatever an op wants to have the type of its operands, it has: for each parameter of each op."""
    tried = 0
    for op_type in sorted(op_types()):
        try:
            rows = parameters(op_type)
        except ValueError:
            continue  # the opset has no such op
        for name, row in rows.items():
            for other in (n for n, r in rows.items() if n != name and r.group and r.group == row.group):
                for dtype in row.dtypes & {np.dtype(np.float16), np.dtype(np.float32)}:
                    with_number = typed(op_type, {name: 0.5, other: np.ones(3, dtype)})
                    assert with_number[name].dtype == dtype, (op_type, name)
                    assert typed(op_type, {name: [2, 0.5], other: np.ones(3, dtype)})[name].dtype == dtype
                    tried += 1
    assert tried > 200


@pytest.mark.usefixtures("function")
def test_what_numpy_computes_is_a_number_too() -> None:
    x, i = np.ones((2, 3), np.float16), np.ones((2, 3), np.int32)
    for number in (np.float64(0.5), np.sqrt(2), np.int64(2), np.ones(3), np.arange(3)):
        assert typed("add", {"x": x, "y": number})["y"].dtype == np.float16
    assert typed("add", {"x": i, "y": np.arange(3)})["y"].dtype == np.int32
    assert typed("gather", {"x": x, "indices": np.arange(2), "axis": np.int64(0)})["indices"].dtype == np.int64
    assert typed("mul", {"x": x, "y": np.float32(0.5)})["y"].dtype == np.float32  # which somebody chose
    tiny = np.full(100, 1e-12)
    assert not typed("mul", {"x": np.ones(100, np.float16), "y": tiny})["y"].any()  # a table
    with pytest.raises(an.Refused, match="y=1e-12 is 0 in float16"):
        typed("mul", {"x": x, "y": tiny[:3]})


@pytest.mark.usefixtures("function")
def test_integers_stay_integers() -> None:
    x, i = np.ones((2, 3), np.float16), np.ones((2, 3), np.int32)
    assert typed("reduce_sum", {"x": x, "axes": [1], "keep_dims": True}) == {
        "x": x,
        "axes": [1],
        "keep_dims": True,
    }
    assert typed("add", {"x": i, "y": 2})["y"].dtype == np.int32
    assert typed("add", {"x": i, "y": 2.5})["y"] == 2.5  # coremltools says that the types differ
    assert typed("add", {"x": x, "y": 2})["y"].dtype == np.float16
    assert typed("add", {"x": i, "y": 1 << 40})["y"] == 1 << 40
    assert typed("add", {"x": x, "y": float("-inf")})["y"] == -np.inf  # as it was given


@pytest.mark.parametrize(
    ("number", "held"), [(1e5, "inf"), (-1e9, "-inf"), (1e-9, "0")], ids=["large", "mask", "small"]
)
def test_a_number_that_the_type_does_not_hold_is_refused(number: float, held: str) -> None:
    @dataclass(frozen=True)
    class Shift(Rewrite):
        name: ClassVar[str] = "shift"

        def pattern(self, op: Ops) -> OpPattern:
            return op.relu(x=var("x"))

        def rewrite(self, mb: Builder, m: Match) -> Var:
            return mb.relu(x=mb.add(x=m.x, y=number))

    surgery = ane.apply(built(lambda x, kind: mb.relu(x=x), an.types.fp16), [Shift()])
    assert not surgery.changes
    assert [refusal.reason for _, refusal in surgery.refusals] == [
        f"y={number:g} is {held} in float16, which the other operands have"
    ]

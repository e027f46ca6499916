"""Writes at the places of a mask: as the host converts them, of rows and of single numbers, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pass_cases import refuses, rewrites, table
from torch import nn

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, producer
from anesurgery.passes.mask_to_select import MaskToSelect

Rows = Callable[[Var], Var]


def positive(x: Var, of: Rows, rows: bool) -> Var:
    """Write `of` of what stands at the positive numbers, or in the rows that begin with one."""
    first = mb.slice_by_index(x=x, begin=[0, 0], end=[4, 1], squeeze_mask=[False, True]) if rows else x
    places = mb.non_zero(x=mb.greater(x=first, y=np.float32(0), name="mask"), name="places")
    lengths = np.array([4] if rows else [4, 3], np.int32)
    guarded = mb.select(cond=mb.greater_equal(x=places, y=0), a=places, b=mb.add(x=places, y=lengths))
    taken = mb.gather_nd(x=x, indices=guarded, name="taken")
    return mb.scatter_nd(data=x, indices=guarded, updates=of(taken), mode="update", name="y")


def program(of: Rows, rows: bool = False) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((4, 3))])(lambda x: positive(x, of, rows))


def linear(rows: Var) -> Var:
    return mb.linear(x=rows, weight=np.eye(3, dtype=np.float32) * 2, name="linear")


def less_the_sum(numbers: Var) -> Var:
    return mb.cumsum(x=numbers, axis=0, name="sums")


def of_another_mask(numbers: Var) -> Var:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    gather = producer(numbers)
    assert gather is not None
    places = mb.non_zero(x=mb.less(x=gather.x, y=table))
    return mb.add(x=numbers, y=mb.gather_nd(x=table, indices=places, name="others"), name="sum")


def in_longer(rows: int, as_integers: bool = False) -> Program:
    """Write at the true places of a mask of four, or of truncated numbers, into more rows."""

    def build(x: Var, data: Var) -> Var:
        mask = mb.cast(x=x, dtype="int32", name="whole") if as_integers else mb.greater(x=x, y=np.float32(0))
        places = mb.non_zero(x=mask)
        taken = mb.gather_nd(x=x, indices=places, name="taken")
        return mb.scatter_nd(data=data, indices=places, updates=mb.exp(x=taken), mode="update", name="y")

    return mb.program(input_specs=[mb.TensorSpec((4,)), mb.TensorSpec((rows,))])(build)


def in_a_branch() -> Program:
    """What is written is computed outside of the branch that writes it; the mask is read there too."""

    @mb.program(input_specs=[mb.TensorSpec((4, 3)), mb.TensorSpec((1,))])
    def program(x: Var, p: Var) -> Var:
        mask = mb.greater(x=x, y=np.float32(0))
        places = mb.non_zero(x=mask)
        outer = mb.exp(x=mb.gather_nd(x=x, indices=places), name="outer")

        def write() -> Var:
            here = mb.non_zero(x=mask)
            return mb.scatter_nd(data=x, indices=here, updates=mb.relu(x=outer), mode="update")

        chosen = mb.squeeze(x=mb.greater(x=p, y=np.float32(0)), axes=[0])
        return mb.cond(pred=chosen, _true_fn=write, _false_fn=lambda: mb.relu(x=x), name="y")

    return program


test_cases, test_surroundings = table(
    MaskToSelect(),
    rewrites(program, lambda rows: mb.softmax(x=linear(rows), axis=-1), rows=True),
    rewrites(program, lambda numbers: mb.exp(x=mb.mul(x=numbers, y=np.float32(0.5)))),
    rewrites(program, lambda rows: mb.add(x=rows, y=np.ones((1, 3), np.float32)), rows=True),
    rewrites(in_longer, 4, as_integers=True),
    refuses("outer is in another block", in_a_branch),
    refuses("%data has the shape (6,), and the mask (4,)", in_longer, 6),
    refuses("sums (cumsum) mixes places", program, less_the_sum),
    refuses("others gathers at other places", program, of_another_mask),
)


class Doubled(nn.Module):
    """Twice the positive numbers, in a tensor of zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Write through a mask of elements."""
        y, mask = torch.zeros_like(x), x > 0
        y[mask] = x[mask] * 2
        return y


class Layer(nn.Module):
    """A layer for the rows that begin with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Write through a mask of rows."""
        y, mask = x.clone(), x[:, 0] > 0
        y[mask] = self.layer(x[mask]).softmax(-1)
        return y


class OneRow(nn.Module):
    """One stored row for the rows that begin with a negative number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Write the same at each place."""
        y = x.clone()
        y[x[:, 0] < 0] = torch.arange(8.0)
        return y


class TwoMasks(nn.Module):
    """A mask and its opposite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Write through both."""
        y, mask = x.clone(), x < 0
        y[mask] = y[mask].exp() - 1
        y[~mask] += 1
        return y


class LessTheMean(nn.Module):
    """What is written needs the mean of what is read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Write through a mask, less a mean."""
        y, mask = x.clone(), x < 0
        y[mask] = y[mask] - y[mask].mean()
        return y


@pytest.mark.parametrize(
    ("kind", "writes"), [(Doubled, 1), (Layer, 1), (OneRow, 1), (TwoMasks, 2), (LessTheMean, 1)]
)
def test_what_pytorch_writes_through_a_mask(kind: type[nn.Module], writes: int) -> None:
    torch.manual_seed(0)
    module, x = kind().eval(), torch.randn(2, 4, 8) if kind is Doubled else torch.randn(4, 8)
    x[..., 0] = torch.tensor([1.0, -1, 2, -2])  # a trace of one place alone would hold its shape
    traced: Any = torch.jit.trace(module, x)  # type: ignore[no-untyped-call]
    target = ct.target.iOS17
    model = ct.convert(
        traced, inputs=[ct.TensorType("x", x.shape)], minimum_deployment_target=target, skip_model_load=True
    )
    surgery = ane.apply(model, "mask_to_select", quiet=True)
    assert len(surgery.changes) == writes
    assert ("non_zero" in surgery.after) is (kind is LessTheMean)
    for given in (x, -x.abs(), x.abs()) if kind is not LessTheMean else (x,):
        (made,) = ane.run(surgery.program, {"x": given.numpy()}).values()
        assert np.abs(made - module(given).detach().numpy()).max() < 3e-3


def test_auto_finds_it_and_the_time_counts_all_places() -> None:
    traced: Any = torch.jit.trace(Doubled(), torch.randn(64, 512))  # type: ignore[no-untyped-call]
    model = ct.convert(traced, inputs=[ct.TensorType("x", (64, 512))], skip_model_load=True)
    found = ane.inspect(model, target="iPhone 13")
    assert "judged as if every mask were true everywhere" in " ".join(found.notes)
    assert {f.remedy for f in found.all_findings if f.op == "non_zero_0"} == {"mask_to_select"}
    surgery = ane.apply(model, "auto", target="iPhone 13", quiet=True)
    assert "non_zero" not in surgery.after
    assert surgery.placed is not None
    before, after = (one.time.ms for one in surgery.placed if one.time is not None)
    assert after < before


class Ones(nn.Module):
    def forward(self, x: Any) -> Any:
        """Voiced frames as 1 and 0."""
        voiced = torch.zeros_like(x)
        voiced[x > 0.5] = 1.0
        return voiced * x


@pytest.mark.usefixtures("hosts_own_converters")
@pytest.mark.parametrize("kind", [Ones, Doubled, Layer, OneRow])
def test_integers_of_listed_places_name_the_pass_that_removes_them(kind: type[nn.Module]) -> None:
    """The wrong version: the largest group is repaired by integers_as_floats, which refuses symbolic shapes."""
    x = torch.arange(32.0).reshape(4, 8) - 4
    traced: Any = torch.jit.trace(kind().eval(), x)  # type: ignore[no-untyped-call]
    model = ct.convert(traced, inputs=[ct.TensorType("x", x.shape)], skip_model_load=True)
    found = [f for f in ane.inspect(model, target="M4").all_findings if f.rule == "int32"]
    assert {f.remedy for f in found if "cast" not in f.op} == {"mask_to_select"}  # a cast makes the mask
    repaired = ane.apply(model, "mask_to_select", quiet=True)
    assert not [f for f in ane.inspect(repaired.program, target="M4").all_findings if f.rule == "int32"]

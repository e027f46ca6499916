"""Models converted at each size are one model where they are the same op by op, and only there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from torch import Tensor, nn

import anesurgery as ane
from anesurgery.mil import Function, Var, mb, types
from anesurgery.shipping.several_sizes import first_difference

TABLE = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
CHANGED = TABLE.copy()
CHANGED[3, 5] = np.nextafter(CHANGED[3, 5], np.float32(9))


def function(build: Callable[[Var], Any]) -> Function:
    program = mb.program(input_specs=[mb.TensorSpec((4, 6), dtype=types.fp32)])(lambda x: build(x))

    return program.functions["main"]


def plain(x: Var) -> Var:
    y = mb.reshape(x=mb.add(x=x, y=TABLE), shape=(2, 12))
    return mb.tanh(x=mb.slice_by_index(x=y, begin=[0, 2], end=[2, 9]), name="y")


def said_in_other_ways(x: Var) -> Var:
    y = mb.reshape(x=mb.add(x=x, y=TABLE), shape=(2, -1), name="other")
    return mb.tanh(x=mb.slice_by_index(x=y, begin=[0, 2], end=[0, -3], end_mask=[True, False]), name="z")


def one_bit(x: Var) -> Var:
    y = mb.reshape(x=mb.add(x=x, y=CHANGED), shape=(2, 12))
    return mb.tanh(x=mb.slice_by_index(x=y, begin=[0, 2], end=[2, 9]), name="y")


def other_places(x: Var) -> Var:
    y = mb.reshape(x=mb.add(x=x, y=TABLE), shape=(2, 12))
    return mb.tanh(x=mb.slice_by_index(x=y, begin=[0, 3], end=[2, 10]), name="y")


def other_value(x: Var) -> Var:
    y = mb.reshape(x=mb.add(x=x, y=TABLE), shape=(2, 12))
    again = mb.reshape(x=x, shape=(2, 12))
    return mb.tanh(x=mb.slice_by_index(x=again, begin=[0, 2], end=[2, 9]), name="y") if y else y


def other_op(x: Var) -> Var:
    y = mb.reshape(x=mb.add(x=x, y=TABLE), shape=(2, 12))
    return mb.sigmoid(x=mb.slice_by_index(x=y, begin=[0, 2], end=[2, 9]), name="y")


def one_more(x: Var) -> Var:
    return mb.tanh(x=plain(x), name="z")


def axis(number: int) -> Callable[[Var], Var]:
    return lambda x: mb.reduce_sum(x=mb.matmul(x=x, y=x, transpose_y=True), axes=[number], name="y")


CASES: dict[str, tuple[Callable[[Var], Any], Callable[[Var], Any], bool]] = {
    "itself": (plain, plain, True),
    "said in other ways": (plain, said_in_other_ways, True),
    "one bit of a table": (plain, one_bit, False),
    "other places": (plain, other_places, False),
    "another value": (plain, other_value, False),
    "another op": (plain, other_op, False),
    "one op more": (plain, one_more, False),
    "another parameter": (axis(0), axis(1), False),
    "a default": (axis(0), lambda x: mb.reduce_sum(x=mb.matmul(x=x, y=x, transpose_y=True), axes=[0]), True),
    "inner outputs": (
        lambda x: (mb.exp(x=x), mb.tanh(x=x)),
        lambda x: (mb.exp(x=x), mb.tanh(x=x))[::-1],
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_two_functions(case: str) -> None:
    one, other, same = CASES[case]
    assert (first_difference(function(one), function(other)) == "") == same
    assert (first_difference(function(other), function(one)) == "") == same


class Causal(nn.Module):
    """A convolution that reads what was, positions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.places = nn.Conv1d(4, 4, 3), nn.Parameter(torch.randn(4, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places[:, : x.shape[2]]
        return torch.relu(self.conv(nn.functional.pad(x, (2, 0))))


class ByLength(Causal):
    """Longer inputs are scaled, which no graph shows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if x.shape[2] > 4 else 1.0)


class Shifted(Causal):
    """The last positions, not the first: each size has others."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.places[:, -x.shape[2] :])


def test_a_module_is_padded_as_a_range_is(tmp_path: Path) -> None:
    module = Causal().eval()
    sized = ane.sizes(module, {"x": [(1, 4, 4), (1, 4, 12)]})
    assert (sized.padding.why_not, sized.padding.inputs) == ("", {"x": 2})
    assert len(sized.assumed) == 1
    folder = sized.save(tmp_path / "sized")
    for length in (1, 3, 5, 8, 11):
        x = np.random.default_rng(length).standard_normal((1, 4, length)).astype(np.float32)
        alone = next(iter(ane.sizes(module, {"x": [x.shape]}).models.values()))
        assert_close(*(next(iter(ane.run(model, {"x": x}).values())) for model in (folder, alone)))


@pytest.mark.parametrize("module", [ByLength, Shifted])
def test_a_module_that_is_another_at_each_size_is_not(module: type[nn.Module]) -> None:
    sized = ane.sizes(module().eval(), {"x": [(1, 4, 4), (1, 4, 12)]})
    assert "cannot be proved to be one model: at size_4, " in sized.padding.why_not

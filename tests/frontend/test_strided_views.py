"""Windows, as `unfold` and `as_strided` name them: each against torch, on another input too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conversion import Function, assert_each_agrees, convert

from anesurgery import frontend
from anesurgery.loading import load
from anesurgery.mil import ct, walk_ops

X = torch.arange(24.0).reshape(2, 3, 4).sin()


def long(x: torch.Tensor) -> torch.Tensor:
    """More windows than are sliced one by one."""
    return torch.cat([x.flatten()] * 4).unfold(0, 5, 1)


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "unfold_shared": lambda x: x.unfold(2, 2, 1),
    "unfold_apart": lambda x: x.unfold(-1, 1, 2),
    "unfold_uneven": lambda x: x.flatten().unfold(0, 7, 3),
    "unfold_middle": lambda x: x.unfold(1, 2, 1),
    "unfold_twice": lambda x: x.unfold(1, 2, 1).unfold(2, 3, 1),
    "unfold_many": long,
    "strided_windows": lambda x: (x + 0).as_strided((2, 5, 4), (12, 2, 1)),
    "strided_turned": lambda x: (x + 0).transpose(0, 2).as_strided((2, 3, 3), (2, 4, 1)),
    "strided_diagonal": lambda x: (x + 0).as_strided((3, 2), (5, 1)),
    "strided_one": lambda x: (x + 0).as_strided((1, 1), (1, 5)),
    "strided_every_third": lambda x: (x + 0).as_strided((2, 1, 4), (12, 7, 3)),
}


@pytest.mark.one_of(2)
@pytest.mark.parametrize("how", ["trace", "export"])
def test_each_window_agrees_with_torch(how: str) -> None:
    assert_each_agrees(CASES, (X, X.flip(0, 1, 2) * 2), how)


def test_windows_side_by_side_are_one_reshape() -> None:
    frontend.register()
    made = convert(
        Function(lambda x: x.unfold(2, 2, 2)),
        {"x": X},
        "trace",
        "iOS17",
        "FLOAT32",
        pass_pipeline=ct.PassPipeline.EMPTY,
    )
    assert not [op for op in walk_ops(load(made).program) if op.op_type == "slice_by_index"]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("how", ["trace", "export"])
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (
            lambda x: x[:, 1:].as_strided((2, 2), (12, 1)),
            "a view of a part|lies in memory in a way that is not known",
        ),
        (
            lambda x: (x + 0).as_strided((2, 2), (1, 1), 3),
            "as_strided with storage_offset 3 of what lies in memory in a way that is not known",
        ),
        (lambda x: (x + 0).as_strided((3, 2), (0, 1)), r"as_strided to size \[3, 2\] with strides \[0, 1\]"),
    ],
)
def test_what_is_not_covered_is_refused(function: Callable[..., Any], said: str, how: str) -> None:
    frontend.register()
    with pytest.raises(NotImplementedError, match=said):
        convert(Function(function), {"x": X}, how, "iOS17", "FLOAT32")

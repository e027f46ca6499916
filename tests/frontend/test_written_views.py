"""What is written in place through a view counts, by trace as by export."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conversion import Function, assert_each_agrees, convert
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

X = torch.tensor([[3.0, -1.0, 4.0, 1.5], [0.25, -9.0, 2.0, 6.0], [1.0, 2.0, -3.0, 5.0]])


def after(write: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a tensor is after a write."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        write(y)
        return y + 0

    return function


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Channels moved along time, into zeros, as temporal shift modules do."""
    out = torch.zeros_like(x)
    out[1:, :2] = x[:-1, :2]
    out[:-1, 2:] = x[1:, 2:]
    return out


def accumulated(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(3, 4)
    for step in range(4):
        out[:, step] = x[:, step] + (out[:, step - 1] if step else 0)
    return out


def both_halves(x: torch.Tensor) -> torch.Tensor:
    """Sines and cosines in turn, in one part of a table, as relative positions have them."""
    table = torch.zeros(2, 3, 4)
    past, future = table[0], table[1]
    past[:, 0::2], past[:, 1::2] = x[:, :2].sin(), x[:, 2:].cos()
    future[:, 0::2] = x[:, 2:]
    return torch.cat([past.flip(0), future, table[0] + table[1]])


def views_that_are_read_later(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    below, flat, turned = y[1:], y.view(2, 6), y.t()
    inner = below[:, 1:]
    y[:, 2].add_(5)
    inner.mul_(2).sub_(1)
    flat[0, :5] = 1
    turned[2].mul_(3)
    return torch.cat([y, below * 1, turned.t() + 1, F.pad(inner, (1, 0)), flat.reshape(3, 4)])


def parts_that_are_read_later(x: torch.Tensor) -> torch.Tensor:
    left, right = (y := x * 2).chunk(2, 1)
    y[0].mul_(7)
    return left + right


def in_integers(x: torch.Tensor) -> torch.Tensor:
    """Fractions written into whole numbers, into a part as coremltools fills it, and into all of a tensor."""
    part, whole = (x * 3).int(), torch.zeros_like(x, dtype=torch.int32)
    part[:, 1] = x[:, 0] * 1.5
    whole.copy_(x * 1.5)
    return part + whole / 2


def in_booleans(x: torch.Tensor) -> torch.Tensor:
    mask = x > 0
    mask[:, 1] = x[:, 0] * 1.5
    return mask.float()


@torch.jit.script
def doubled_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(2):
        y = y + x
    return y


@torch.jit.script
def added_in_a_branch(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    if by.sum() > 0:  # noqa: SIM108 - torch reads this
        y = x + by
    else:
        y = x - by
    return y


SCRIPTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "added": lambda x: ((y := x * 2)[:, 1].add_(1), doubled_in_a_loop(y))[1],
    "copied": lambda x: ((y := x * 2)[1:, 1].copy_(x[1:, 0]), doubled_in_a_loop(y))[1],
    "filled": lambda x: ((y := x * 2)[0].fill_(1), added_in_a_branch(y, x))[1],
    "a view": lambda x: ((y := x * 2)[0], y.fill_(1), added_in_a_branch(y, y[0]))[2],
}
"""Writes that only a scripted function reads."""


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flattened": after(lambda y: y.view(-1)[3:5].add_(7)),
    "flattened by reshape": after(lambda y: y.reshape(-1)[3:5].mul_(-1)),
    "turned": after(lambda y: y.t()[1].mul_(3)),
    "turned by axes": after(lambda y: y.transpose(0, 1)[2:].neg_()),
    "with one more axis": after(lambda y: y.unsqueeze(0)[0, 1].neg_()),
    "narrowed": after(lambda y: y.narrow(1, 1, 2).copy_(torch.ones(3, 2))),
    "narrowed at the start": after(lambda y: y.narrow(0, 0, 2).mul_(5)),
    "twice": after(lambda y: (y[:, 1].mul_(3), y[1].add_(1))),
    "a view and a part of it": after(lambda y: (y.view(2, 6)[1].mul_(3), y[1].add_(1))),
    "a copy of a view": after(lambda y: y.t().reshape(-1)[:2].mul_(100)),
    "parts that are used alone": lambda x: F.relu_((x * 2).chunk(2, 1)[1]),
    "shifted": shifted,
    "both halves": both_halves,
    "views that are read later": views_that_are_read_later,
    "parts that are read later": parts_that_are_read_later,
    "a view twice": lambda x: (p := (y := x * 2)[0], p.mul_(2), p.add_(x[1]))[0] + y,
    "after a view was taken": lambda x: ((y := x * 2)[:, 2:], y.mul_(3))[0] + 1,
    "accumulated": accumulated,
    "detached": after(lambda y: y.detach()[:, 1].fill_(3)),
    "in integers": in_integers,
    "in booleans": in_booleans,
}


@pytest.mark.parametrize("how", ["trace", "export"])
def test_each_write_counts(how: str) -> None:
    assert_each_agrees(CASES, (X, -X / 3), how)


def test_a_scripted_function_reads_what_was_written() -> None:
    assert_each_agrees(SCRIPTED, (X, -X / 3), "trace")


@torch.jit.script
def written_in_a_loop(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    for i in range(3):
        y[:, i] = y[:, i] * 2
    return y


@torch.jit.script
def written_in_a_branch(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    if x.sum() > 0:
        y[:, 1] += 5
    return y


@pytest.mark.parametrize("function", [written_in_a_loop, written_in_a_branch])
def test_a_write_in_a_scripted_branch_or_loop_is_refused(function: Callable[..., torch.Tensor]) -> None:
    from anesurgery import frontend

    frontend.register()
    with pytest.raises(NotImplementedError, match="in a scripted branch or loop"):
        convert(Function(lambda x: function(x)), {"x": X}, "trace", "iOS17", "FLOAT32")


def parts(y: torch.Tensor) -> object:
    return y.chunk(2, 1)[1].sigmoid_()


def diagonal(y: torch.Tensor) -> object:
    return y.diagonal().fill_(1.0)


@pytest.mark.parametrize("write", [parts, diagonal])
def test_a_write_that_would_be_lost_is_refused(write: Callable[[torch.Tensor], object]) -> None:
    from anesurgery import frontend

    frontend.register()
    with pytest.raises(NotImplementedError, match=r"writes in place through \w+, and the tensor behind it"):
        convert(Function(after(write)), {"x": X}, "trace", "iOS17", "FLOAT32")

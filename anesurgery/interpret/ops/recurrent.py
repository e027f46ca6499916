"""Recurrent ops: `_run` walks the sequence, and each op gives the step from one element to the next.

A sequence run in direction "reverse" comes out in the order in which it was computed, its last row first; only
the backward half of "bidirectional" is put back into the order of time.

`coreai` calls these functions with tensors that record torch's functions as ops of a file, `walk` as one op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch.overrides import handle_torch_function, has_torch_function_unary

from anesurgery.interpret.table import Unsupported, impl

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
States = Tensors

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "scaled_tanh": torch.tanh,  # alpha = beta = 1, the defaults of the op of that name
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "sigmoid_hard": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "relu": torch.relu,
    "linear": lambda x: x,
}
"""The activations that recurrent ops may name, with their default parameters."""

BACKWARD = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
"""Direction -> for each walk through the sequence, does it start at the end?"""


@dataclass(frozen=True)
class Direction:
    """One walk through a sequence."""

    weight: Tensor
    """[gates * H, I]: multiplied with all elements in one product."""
    bias: Tensor | None
    """[gates * H]."""
    step: Callable[[Tensor, States], States]
    """(a projected element [b, gates * H], states [b, H] each) -> new states; the first one is the output."""


def _activation(name: Any) -> Callable[[Tensor], Tensor]:
    """Return the activation of a name."""
    if str(name).lower() not in ACTIVATIONS:
        raise Unsupported(f"recurrent activation {name!r} is not known")
    return ACTIVATIONS[str(name).lower()]


def walk(rows: Tensor, states: States, step: Callable[[Tensor, States], States]) -> tuple[Tensor, States]:
    """Return the outputs [s, b, H] in the order of the projected steps [s, b, gates * H], and last states."""
    if has_torch_function_unary(rows):  # `coreai` writes a loop instead
        return handle_torch_function(walk, (rows,), rows, states, step)
    outputs = []
    for row in rows:
        states = step(row, states)
        outputs.append(states[0])
    return (torch.stack(outputs) if outputs else states[0].new_empty(0, *states[0].shape)), states


def _run(
    x: Tensor, initial: States, ways: Sequence[Direction], direction: str, output_sequence: bool
) -> Tensors:
    """Return the sequence [s, b, ways * H] or last output [1, b, ways * H], then last states [b, ways * H]."""
    if direction not in BACKWARD:
        raise Unsupported(f"recurrent direction {direction!r} is not known")
    split = zip(*(state.chunk(len(ways), dim=-1) for state in initial), strict=True)
    outputs, lasts = [], []
    for way, states, back in zip(ways, split, BACKWARD[direction], strict=True):
        rows = F.linear(x.flip(0) if back else x, way.weight, way.bias)
        y, last = walk(rows, states, way.step)
        outputs.append(y.flip(0) if back and direction == "bidirectional" else y)
        lasts.append(last)
    ends = tuple(torch.cat(each, dim=-1) for each in zip(*lasts, strict=True))
    return (torch.cat(outputs, dim=-1) if output_sequence else ends[0].unsqueeze(0)), *ends


@impl("rnn")
def rnn(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
) -> Tensors:
    """H = activation(W_ih x + W_hh h + bias) over x [s, b, I]: (y [s or 1, b, H], h [b, H])."""
    act, recurrent = _activation(activation), weight_hh.mT

    def step(row: Tensor, states: States) -> States:
        return (act(torch.addmm(row, states[0], recurrent)),)

    ways = [Direction(weight_ih, bias, step)]
    return _run(x, (initial_h,), ways, direction, output_sequence)


@impl("gru")
def gru(
    x: Tensor,
    initial_h: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
    input_bias: Tensor | None = None,
) -> Tensors:
    """Compute a GRU over x [s, b, I], gates in the order reset, output, update; return y and h.

    The reset gate multiplies h before the output gate's product; with `reset_after`, the product and its bias.
    `input_bias` is added outside of both.
    """
    gate, act = _activation(recurrent_activation), _activation(activation)
    r_w, o_w, z_w = weight_hh.mT.chunk(3, dim=1)
    gates_w = torch.cat([r_w, z_w], 1)
    output_product, outer_bias = torch.matmul, bias
    if reset_after and bias is not None:
        b_r, b_o, b_z = bias.chunk(3)
        output_product = partial(torch.addmm, b_o)
        outer_bias = torch.cat([b_r, torch.zeros_like(b_o), b_z])

    def step(row: Tensor, states: States) -> States:
        (h,) = states
        x_r, x_o, x_z = row.chunk(3, dim=-1)
        r, z = gate(torch.addmm(torch.cat([x_r, x_z], -1), h, gates_w)).chunk(2, dim=-1)
        o = act(x_o + r * output_product(h, o_w) if reset_after else torch.addmm(x_o, r * h, o_w))
        return ((1 - z) * o + z * h,)

    if outer_bias is None or input_bias is None:
        total = input_bias if outer_bias is None else outer_bias
    else:
        total = outer_bias + input_bias
    return _run(x, (initial_h,), [Direction(weight_ih, total, step)], direction, output_sequence)


def _lstm_step(
    weight_hh: Tensor, peephole: Tensor | None, gates: Sequence[Callable[[Tensor], Tensor]], clip: float | None
) -> Callable[[Tensor, States], States]:
    """Return the step of an LSTM, gates in the order input, forget, output, cell; `clip` limits the cell."""
    gate, cell_in, cell_out = gates
    recurrent = weight_hh.mT
    peepholes = () if peephole is None else peephole.chunk(3)  # of the gates input, forget, output

    def step(row: Tensor, states: States) -> States:
        h, c = states
        i, f, o, z = torch.addmm(row, h, recurrent).chunk(4, dim=-1)
        if peepholes:
            i, f = i + peepholes[0] * c, f + peepholes[1] * c
        c = gate(f) * c + gate(i) * cell_in(z)
        c = c if clip is None else c.clamp(-clip, clip)
        o = o + peepholes[2] * c if peepholes else o
        return gate(o) * cell_out(c), c

    return step


@impl("lstm")
def lstm(
    x: Tensor,
    initial_h: Tensor,
    initial_c: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor | None = None,
    peephole: Tensor | None = None,
    weight_ih_back: Tensor | None = None,
    weight_hh_back: Tensor | None = None,
    bias_back: Tensor | None = None,
    peephole_back: Tensor | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: float | None = None,
) -> Tensors:
    """Compute an LSTM over x [s, b, I]; return y [s or 1, b, ways * H], h and c [b, ways * H]."""
    gates = [_activation(a) for a in (recurrent_activation, cell_activation, activation)]
    ways = [Direction(weight_ih, bias, _lstm_step(weight_hh, peephole, gates, clip))]
    if direction == "bidirectional":
        assert weight_ih_back is not None
        assert weight_hh_back is not None
        back = _lstm_step(weight_hh_back, peephole_back, gates, clip)
        ways.append(Direction(weight_ih_back, bias_back, back))
    return _run(x, (initial_h, initial_c), ways, direction, output_sequence)

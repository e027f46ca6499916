"""Recurrent ops: one product for all steps of the input, then the steps, written out or as a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anesurgery.coreai.lowerings.control import Values, loop
from anesurgery.coreai.lowerings.indexing import replace_slice, take
from anesurgery.coreai.lowerings.products import linear
from anesurgery.coreai.table import lowers
from anesurgery.coreai.values import Value, array, call, concat, indices
from anesurgery.errors import NotExpressible
from anesurgery.interpret.ops.recurrent import BACKWARD

WRITTEN_OUT = 32
"""Steps that are written out at most. A choice: a loop runs on no engine, and a step is about 12 ops."""

ACTIVATIONS: dict[str, Callable[[Value], Value]] = {
    **{name: partial(call, name) for name in ("tanh", "sigmoid", "relu")},
    "scaled_tanh": partial(call, "tanh"),
    "linear": lambda x: x,
    **dict.fromkeys(("hard_sigmoid", "sigmoid_hard"), lambda x: (x * 0.2 + 0.5).maximum(0.0).minimum(1.0)),
}
"""The activations that recurrent ops may name, with their default parameters."""


@dataclass(frozen=True)
class Way:
    """One walk through a sequence."""

    weight: Value
    bias: Value | None
    step: Callable[[Value, Values], Values]
    """(a projected step [b, gates * H], states) -> states; the first is the output."""


def _activation(name: str) -> Callable[[Value], Value]:
    if name.lower() not in ACTIVATIONS:
        raise NotExpressible(f"the recurrent activation {name!r}")
    return ACTIVATIONS[name.lower()]


def _parts(x: Value, count: int, axis: int) -> Values:
    size = x.length(axis) // count
    return [x.along(axis, i * size, (i + 1) * size) for i in range(count)]


def _walk(rows: Value, states: Values, step: Callable[[Value, Values], Values]) -> tuple[Value, Values]:
    """The outputs in the order of the steps, and the last states."""
    count = rows.shape[0]
    if 0 <= count <= WRITTEN_OUT:
        outputs = []
        for i in range(count):
            states = step(rows.along(0, i, i + 1).squeeze([0]), states)
            outputs.append(states[0].expand([0]))
        return concat(outputs, 0), states
    length = rows.lengths().along(0, 0, 1)
    shape = concat([length, indices(states[0].fixed())], 0)
    buffer = array(0, states[0].dtype).broadcast(shape if count < 0 else [count, *states[0].shape])

    def advance(values: Values) -> Values:
        at, written, *inner = values
        inner = step(take(rows, at, 0), inner)
        return [at + 1, replace_slice(written, at, inner[0].expand([0])), *inner]

    _, outputs_of_all, *last = loop(
        [array(0, "int32"), buffer, *states], lambda v: length.squeeze([0]) > v[0], advance
    )
    return outputs_of_all, last


def _run(x: Value, initial: Values, ways: Sequence[Way], direction: str, output_sequence: bool) -> Values:
    """The sequence or the last output, and the last states; all ways side by side."""
    halves = zip(*(_parts(state, len(ways), state.rank - 1) for state in initial), strict=True)
    outputs, lasts = [], []
    for way, states, back in zip(ways, halves, BACKWARD[direction], strict=True):
        rows = linear(call("reverse", x, indices([0])) if back else x, way.weight, way.bias)
        y, last = _walk(rows, list(states), way.step)
        outputs.append(call("reverse", y, indices([0])) if back and direction == "bidirectional" else y)
        lasts.append(last)
    ends = [concat(each, 1) for each in zip(*lasts, strict=True)]
    return [concat(outputs, 2) if output_sequence else ends[0].expand([0]), *ends]


@lowers("rnn")
def rnn(
    x: Value,
    initial_h: Value,
    weight_ih: Value,
    weight_hh: Value,
    bias: Value | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    activation: str = "tanh",
) -> Values:
    """H = activation(W_ih x + W_hh h + bias)."""
    act = _activation(activation)
    way = Way(weight_ih, bias, lambda row, states: [act(row + linear(states[0], weight_hh))])
    return _run(x, [initial_h], [way], direction, output_sequence)


@lowers("gru")
def gru(
    x: Value,
    initial_h: Value,
    weight_ih: Value,
    weight_hh: Value,
    bias: Value | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
    input_bias: Value | None = None,
) -> Values:
    """Gates in the order reset, output, update, as the interpreter has them."""
    gate, act = _activation(recurrent_activation), _activation(activation)
    reset_w, out_w, update_w = _parts(weight_hh, 3, 0)
    inner = [None] * 3 if bias is None else _parts(bias, 3, 0)

    def step(row: Value, states: Values) -> Values:
        (h,) = states
        x_r, x_o, x_z = _parts(row, 3, row.rank - 1)
        r = gate(x_r + linear(h, reset_w, inner[0]))
        z = gate(x_z + linear(h, update_w, inner[2]))
        inside = r * linear(h, out_w, inner[1]) if reset_after else linear(r * h, out_w, inner[1])
        return [(1 - z) * act(x_o + inside) + z * h]

    return _run(x, [initial_h], [Way(weight_ih, input_bias, step)], direction, output_sequence)


def _lstm_step(
    weight: Value, peephole: Value | None, gates: Sequence[Callable[[Value], Value]], clip: Any
) -> Callable[[Value, Values], Values]:
    """Gates in the order input, forget, output, cell; the cell state clipped."""
    gate, cell_in, cell_out = gates
    peeks = None if peephole is None else _parts(peephole, 3, 0)

    def step(row: Value, states: Values) -> Values:
        h, c = states
        i, f, o, z = _parts(row + linear(h, weight), 4, row.rank - 1)
        if peeks:
            i, f = i + peeks[0] * c, f + peeks[1] * c
        c = gate(f) * c + gate(i) * cell_in(z)
        c = c if clip is None else c.maximum(-float(clip)).minimum(float(clip))
        o = o + peeks[2] * c if peeks else o
        return [gate(o) * cell_out(c), c]

    return step


@lowers("lstm")
def lstm(
    x: Value,
    initial_h: Value,
    initial_c: Value,
    weight_ih: Value,
    weight_hh: Value,
    bias: Value | None = None,
    peephole: Value | None = None,
    weight_ih_back: Value | None = None,
    weight_hh_back: Value | None = None,
    bias_back: Value | None = None,
    peephole_back: Value | None = None,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
    clip: Any = None,
) -> Values:
    """Both ways of a bidirectional one have weights of their own."""
    gates = [_activation(a) for a in (recurrent_activation, cell_activation, activation)]
    ways = [Way(weight_ih, bias, _lstm_step(weight_hh, peephole, gates, clip))]
    if weight_ih_back is not None and weight_hh_back is not None and direction == "bidirectional":
        back = _lstm_step(weight_hh_back, peephole_back, gates, clip)
        ways.append(Way(weight_ih_back, bias_back, back))
    return _run(x, [initial_h, initial_c], ways, direction, output_sequence)

"""Unroll a recurrent op over a short sequence into products, sums and activations.

Before::

    main(%x: 1x1x5, %h: 1x4) {
      %y_0: 1x1x4, %y_1: 1x4 = rnn(x=%x, initial_h=%h, weight_ih=const<4x5>, weight_hh=const<4x4>)
      return %y_1
    }

After::

    main(%x: 1x1x5, %h: 1x4) {
      %y_unroll_recurrent_linear: 1x1x4 = linear(x=%x, weight=const<4x5>)
      %y_unroll_recurrent_squeeze: 1x4 = squeeze(x=%y_unroll_recurrent_linear, axes=[0])
      %y_unroll_recurrent_linear_1: 1x4 = linear(x=%h, weight=const<4x4>)
      %y_unroll_recurrent_add: 1x4 = add(x=%y_unroll_recurrent_squeeze, y=%y_unroll_recurrent_linear_1)
      %y_1: 1x4 = tanh(x=%y_unroll_recurrent_add)
      return %y_1
    }

The contribution of the input to the gates is one product for all steps; each step adds one product of the
state. The pass covers LSTM (peepholes, clipped cells), GRU (the reset gate before or after its product) and
simple RNN, with every direction, activation and initial state. A reverse sequence keeps the order of the op:
its first row is the step computed first.

Refuses when the sequence is symbolic or longer than `max_steps` (the program grows by about 12 ops for each
step and direction), and when constants are compressed.

Why it helps: lstm, gru and rnn stay on the CPU (measured through Core ML on M4, macOS 27; the tables of the
compiler have no such op on any chip). Products and activations run on the ANE.

Grade: proved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb
from anesurgery.regions.small_builds import joined, parted

SUFFIXES = {"forward": ("",), "reverse": ("",), "bidirectional": ("", "_back")}
"""Direction -> the endings of the names of the weights, one for each way through the sequence."""
READ_IN_PARTS = ("bias", "peephole", "weight_hh", "input_bias")
"""Constants of which a step reads parts (`weight_hh` only in a gru)."""

States = tuple[Var, ...]
"""The states of a step, the output first: (h,) or, in an LSTM, (h, c)."""
Step = Callable[[Var, States], States]
"""(what the input adds to the gates, the states before) -> the states after."""


@dataclass(frozen=True)
class UnrollRecurrent(Rewrite):
    """lstm, gru and rnn become one product for the inputs and one for each step."""

    name = "unroll_recurrent"
    kinds = an.ops.RECURRENT
    tolerance = an.REASSOCIATED
    tolerates_nonfinite = False  # a state of zeros is left out: 0 times NaN
    max_steps: int = an.option(64, least=1)
    """Longest sequence that is unrolled."""

    def check(self, m: Match) -> Match | Refusal:
        """Match a known, short sequence, and constants that can be read."""
        op, shape = m.root, an.static_shape(m.root.x)
        if shape is None:
            return Refusal(f"%{op.x.name} has the symbolic shape {tuple(op.x.shape)}", op)
        if shape[0] > self.max_steps or shape[0] < 1:
            return Refusal(f"the sequence has {shape[0]} steps; max_steps is {self.max_steps}", op)
        for name in (f"{part}{suffix}" for part in READ_IN_PARTS for suffix in ("", "_back")):
            var = op.inputs.get(name)
            needed = var is not None and (op.op_type == "gru" or not name.startswith("weight"))
            if needed and not (an.is_stored(var) if "weight" in name else an.producer(var, "const")):
                made_by = var.op.op_type if var is not None and var.op is not None else "an input"
                return Refusal(f"{name} is taken apart, but it is made by {made_by}", op)
        for name in ("recurrent_activation", "cell_activation", "activation"):
            kind = an.constant(op.inputs.get(name))
            if kind is not None and str(kind).lower() not in ACTIVATIONS:
                return Refusal(f"{name} {kind!r} is not known", op)
        return m

    def rewrite(self, mb: Builder, m: Match) -> tuple[Var, ...]:
        """Build each way through the sequence, and join them."""
        op, suffixes = m.root, SUFFIXES[str(an.constant(m.root.direction) or "forward")]
        initial = [op.initial_h, *([op.initial_c] if op.op_type == "lstm" else [])]
        halves = [parted(mb, state, -1, len(suffixes)) for state in initial]
        ways = [_walk(mb, op, suffix, tuple(half[i] for half in halves)) for i, suffix in enumerate(suffixes)]
        lasts = [joined(mb, [way.states[i] for way in ways], -1) for i in range(len(initial))]
        if an.flag(op, "output_sequence"):
            return joined(mb, [_sequence(mb, way.outputs) for way in ways], -1), *lasts
        return mb.expand_dims(x=lasts[0], axes=[0]), *lasts


class _Way(NamedTuple):
    """One way through the sequence."""

    outputs: list[Var]
    """The output of each step, in the order in which the op returns them."""
    states: States
    """The states after the last step."""


def _walk(mb: Builder, op: an.Operation, suffix: str, states: States) -> _Way:
    """Build one way through the sequence."""
    steps, backwards = int(op.x.shape[0]), suffix or an.constant(op.direction) == "reverse"
    bias = _bias_of_input(mb, op, suffix)
    biased = {} if bias is None else {"bias": bias}
    rows = parted(mb, mb.linear(x=op.x, weight=op.inputs[f"weight_ih{suffix}"], **biased), 0, steps)
    step = STEPS[op.op_type](mb, op, suffix)
    outputs = []
    for row in reversed(rows) if backwards else rows:
        states = step(mb.squeeze(x=row, axes=[0]), states)
        outputs.append(states[0])
    return _Way(outputs[::-1] if suffix else outputs, states)


def _sequence(mb: Builder, rows: list[Var]) -> Var:
    return mb.expand_dims(x=rows[0], axes=[0]) if len(rows) == 1 else mb.stack(values=tuple(rows), axis=0)


def _plus(mb: Any, row: Var, state: Var, weight: Var) -> Var:
    """Add a state's product to what the input adds to the gates; a state of zeros adds nothing."""
    return row if an.is_constant(state, 0) else mb.add(x=row, y=mb.linear(x=state, weight=weight))


def _rnn(mb: Any, op: an.Operation, suffix: str) -> Step:
    """Return the step of a simple RNN: act(W x + b + V h)."""

    def step(row: Var, states: States) -> States:
        return (_activate(mb, op, "activation", _plus(mb, row, states[0], op.weight_hh)),)

    return step


def _gru(mb: Any, op: an.Operation, suffix: str) -> Step:
    """Return the step of a GRU, whose gates stand in the order reset, output, update.

    The reset gate multiplies the state before the product of the output gate; with `reset_after`, that product
    and its part of the bias.
    """
    width = int(op.weight_hh.shape[1])
    rows = np.arange(3 * width).reshape(3, width)  # reset, output, update
    whole = an.Edit.of(op.weight_hh.shape)
    gates, output = (whole.taken(0, r.ravel()) for r in (rows[[0, 2]], rows[1]))
    after, inner_bias = an.flag(op, "reset_after"), _bias_before_reset(op)

    def step(row: Var, states: States) -> States:
        (h,) = states
        x_r, x_o, x_z = mb.split(x=row, num_splits=3, axis=-1)
        weight = an.edit_weight(mb, op.weight_hh, gates, f"{op.name}_gates")
        both = _plus(mb, mb.concat(values=(x_r, x_z), axis=-1), h, weight)
        r, z = mb.split(x=_activate(mb, op, "recurrent_activation", both), num_splits=2, axis=-1)
        weight = an.edit_weight(mb, op.weight_hh, output, f"{op.name}_output")
        if after:
            inner = inner_bias if an.is_constant(h, 0) else mb.linear(x=h, weight=weight, bias=inner_bias)
            new = mb.add(x=x_o, y=mb.mul(x=r, y=inner))
        else:
            new = x_o if an.is_constant(h, 0) else _plus(mb, x_o, mb.mul(x=r, y=h), weight)
        new = _activate(mb, op, "activation", new)
        return (mb.add(x=new, y=mb.mul(x=z, y=mb.sub(x=h, y=new))),)

    return step


def _bias_before_reset(op: an.Operation) -> an.Array:
    """Return the bias that a GRU adds to the product of the state before the reset gate multiplies it."""
    width, bias = int(op.weight_hh.shape[1]), an.constant(op.inputs.get("bias"))
    zeros = np.zeros(width, an.np_dtype(op.x))
    return zeros if bias is None else np.asarray(bias)[width : 2 * width]


def _bias_of_input(mb: Any, op: an.Operation, suffix: str) -> Var | None:
    """Return the bias of the product of the input: all but the bias before the reset gate; None for no bias."""
    bias: Var | None = op.inputs.get(f"bias{suffix}")
    more, after = an.constant(op.inputs.get("input_bias")), an.flag(op, "reset_after")
    if more is None and not (after and bias is not None):
        return bias
    width = int(op.weight_hh.shape[1])
    total = np.zeros(3 * width, an.np_dtype(op.x)) if bias is None else np.array(an.constant(bias))
    if after:
        total[width : 2 * width] = 0
    total = total if more is None else total + np.asarray(more)
    return mb.shared((op, "bias of input"), lambda: total, f"{op.name}_bias")


def _lstm(mb: Any, op: an.Operation, suffix: str) -> Step:
    """Return the step of an LSTM, whose gates stand in the order input, forget, output, cell."""
    weight, clip = op.inputs[f"weight_hh{suffix}"], an.constant(op.inputs.get("clip"))
    peephole = an.constant(op.inputs.get(f"peephole{suffix}"))
    peeps: list[an.Array] = [] if peephole is None else np.split(np.asarray(peephole), 3)

    def with_peephole(gate: Var, index: int, cell: Var) -> Var:
        if not peeps or an.is_constant(cell, 0):
            return gate
        return mb.add(x=gate, y=mb.mul(x=cell, y=peeps[index]))

    def step(row: Var, states: States) -> States:
        h, c = states
        i, f, o, z = mb.split(x=_plus(mb, row, h, weight), num_splits=4, axis=-1)
        i = _activate(mb, op, "recurrent_activation", with_peephole(i, 0, c))
        f = _activate(mb, op, "recurrent_activation", with_peephole(f, 1, c))
        z = _activate(mb, op, "cell_activation", z)
        new = mb.mul(x=i, y=z)
        c = new if an.is_constant(c, 0) else mb.add(x=mb.mul(x=f, y=c), y=new)
        if clip is not None:
            limit = an.np_dtype(c).type(clip)
            c = mb.clip(x=c, alpha=-limit, beta=limit)
        o = _activate(mb, op, "recurrent_activation", with_peephole(o, 2, c))
        return mb.mul(x=o, y=_activate(mb, op, "activation", c)), c

    return step


STEPS: dict[str, Callable[[Any, an.Operation, str], Step]] = {"rnn": _rnn, "gru": _gru, "lstm": _lstm}

ACTIVATIONS: dict[str, tuple[str, dict[str, float]]] = {
    "tanh": ("tanh", {}),
    "scaled_tanh": ("tanh", {}),  # both factors are 1 where a recurrent op names it
    "sigmoid": ("sigmoid", {}),
    **dict.fromkeys(("hard_sigmoid", "sigmoid_hard"), ("sigmoid_hard", {"alpha": 0.2, "beta": 0.5})),
    "relu": ("relu", {}),
    "linear": ("", {}),
}
"""The activations that a recurrent op may name: op type ("" for none) and its parameters."""
DEFAULT = {"recurrent_activation": "sigmoid"}


def _activate(mb: Any, op: an.Operation, which: str, x: Var) -> Var:
    """Build one of the activations of a recurrent op."""
    kind = an.constant(op.inputs.get(which))
    op_type, values = ACTIVATIONS[str(kind or DEFAULT.get(which, "tanh")).lower()]
    if not op_type:
        return x
    parameters: dict[str, Any] = {k: an.np_dtype(x).type(v) for k, v in values.items()}
    return getattr(mb, op_type)(x=x, **parameters)


@an.example((1, 1, 5), (1, 4))
def example(x: Var, h: Var) -> Var:
    """One step of a simple RNN, with its state as input."""
    rng = np.random.default_rng(0)
    weight_ih, weight_hh = (rng.standard_normal((4, n)).astype(np.float32) for n in (5, 4))
    return mb.rnn(x=x, initial_h=h, weight_ih=weight_ih, weight_hh=weight_hh, name="y")[1]

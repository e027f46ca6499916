"""A recurrent op over a short sequence becomes its steps: products, sums and activations.

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

What the input adds to the gates is one product for all steps; each step adds one product of the state. LSTM
(peepholes, clipped cells), GRU and simple RNN; every direction, activation and initial state. A reverse
sequence keeps the order of the op: its first row is the step computed first.

Refuses when the sequence is symbolic or longer than `max_steps` (the program grows by about 12 ops for each
step and direction), when constants are compressed, and for `reset_after` and `input_bias` of a gru.

Why it helps: lstm, gru and rnn stay on the CPU (measured through Core ML on M4, macOS 27; the tables of the
compiler have no such op on any chip). Products and activations run on the ANE.

Grade: checked: recurrent ops are not taken apart in the field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from anesurgery.checking.grades import REASSOCIATED, Tolerance
from anesurgery.errors import PassError, Refusal
from anesurgery.mil import (
    Array,
    Operation,
    Program,
    Var,
    constant,
    is_constant,
    mb,
    np_dtype,
    producer,
    static_shape,
)
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
BACK = {"forward": ("",), "reverse": ("",), "bidirectional": ("", "_back")}
"""Direction -> the suffixes of the weights of each way through the sequence."""
TAKEN_APART = ("bias", "peephole", "weight_hh")
"""Constants of which a step reads parts (`weight_hh` of a gru)."""

AFTER = ("reset_after", "input_bias")  # of the gru of iOS 18

States = tuple[Var, ...]
Step = Callable[[Var, States], States]
"""(what the input adds to the gates, the states) -> the states, the output first."""


@dataclass(frozen=True)
class UnrollRecurrent(Rewrite):
    """lstm, gru and rnn become one product for the inputs and one for each step."""

    name: ClassVar[str] = "unroll_recurrent"
    tolerance: ClassVar[Tolerance] = REASSOCIATED
    max_steps: int = 64
    """Longest sequence that is unrolled."""

    def __post_init__(self) -> None:
        if type(self.max_steps) is not int or self.max_steps < 1:
            raise PassError(f"{self.name}: max_steps={self.max_steps!r}; it must be a positive integer")

    def pattern(self, op: Ops) -> OpPattern:
        """Every recurrent op."""
        return op.any(*GATES)()

    def check(self, m: Match) -> Match | Refusal:
        """A known, short sequence, and constants that can be read."""
        op = m.root
        shape = static_shape(op.x)
        if shape is None:
            return Refusal(f"%{op.x.name} has the symbolic shape {tuple(op.x.shape)}", op)
        if shape[0] > self.max_steps or shape[0] < 1:
            return Refusal(f"the sequence has {shape[0]} steps; max_steps is {self.max_steps}", op)
        for name in (f"{part}{suffix}" for part in TAKEN_APART for suffix in ("", "_back")):
            var = op.inputs.get(name)
            needed = op.op_type == "gru" or not name.startswith("weight")
            if var is not None and needed and producer(var, "const") is None:
                made_by = "an input" if var.op is None else var.op.op_type
                return Refusal(f"{name} is taken apart, but it is made by {made_by}", op)
        for name in AFTER:
            if (value := constant(op.inputs.get(name))) is not None and np.any(value):
                return Refusal(f"{name} of a gru is not unrolled", op)
        for name in ("recurrent_activation", "cell_activation", "activation"):
            kind = constant(op.inputs.get(name))
            if kind is not None and str(kind).lower() not in ACTIVATIONS:
                return Refusal(f"{name} {kind!r} is not known", op)
        return m

    def rewrite(self, mb: Builder, m: Match) -> tuple[Var, ...]:
        """Each way through the sequence, side by side."""
        op, ways = m.root, BACK[str(constant(m.root.direction) or "forward")]
        initial = [op.initial_h, *([op.initial_c] if op.op_type == "lstm" else [])]
        halves = [_parts(mb, state, len(ways)) for state in initial]
        walks = [_walk(mb, op, suffix, tuple(half[i] for half in halves)) for i, suffix in enumerate(ways)]
        lasts = [_joined(mb, [states[i] for _, states in walks]) for i in range(len(initial))]
        if bool(constant(op.output_sequence)):
            return _joined(mb, [_sequence(mb, made) for made, _ in walks]), *lasts
        return mb.expand_dims(x=lasts[0], axes=[0]), *lasts


def _walk(mb: Builder, op: Operation, suffix: str, states: States) -> tuple[list[Var], States]:
    """One way: the output of each step, in the order in which it is returned, and the last states."""
    steps, back = int(op.x.shape[0]), suffix or constant(op.direction) == "reverse"
    weight, bias = op.inputs[f"weight_ih{suffix}"], op.inputs.get(f"bias{suffix}")
    added = {} if bias is None else {"bias": bias}
    inputs = _parts(mb, mb.linear(x=op.x, weight=weight, **added), steps, axis=0)
    step = STEPS[op.op_type](mb, op, suffix)
    made = []
    for row in reversed(inputs) if back else inputs:
        states = step(mb.squeeze(x=row, axes=[0]), states)
        made.append(states[0])
    return (made[::-1] if suffix else made), states


def _parts(mb: Builder, var: Var, count: int, axis: int = -1) -> list[Var]:
    return [var] if count == 1 else list(mb.split(x=var, num_splits=count, axis=axis))


def _joined(mb: Builder, parts: list[Var]) -> Var:
    made: Var = parts[0] if len(parts) == 1 else mb.concat(values=tuple(parts), axis=-1)
    return made


def _sequence(mb: Builder, made: list[Var]) -> Var:
    found: Var = mb.expand_dims(x=made[0], axes=[0]) if len(made) == 1 else mb.stack(values=tuple(made), axis=0)
    return found


def _plus(mb: Builder, row: Var, state: Var, weight: Var) -> Var:
    """What the input and a state add to the gates; a state of zeros adds nothing."""
    total: Var = row if is_constant(state, 0) else mb.add(x=row, y=mb.linear(x=state, weight=weight))
    return total


def _rnn(mb: Builder, op: Operation, suffix: str) -> Step:
    """act(W x + b + V h)."""

    def step(row: Var, states: States) -> States:
        return (_activate(mb, op, "activation", _plus(mb, row, states[0], op.weight_hh)),)

    return step


def _gru(mb: Builder, op: Operation, suffix: str) -> Step:
    """Gates in the order reset, output, update; the reset gate multiplies the state before its product."""
    reset, output, update = np.split(np.asarray(constant(op.weight_hh)), 3)
    gates = np.concatenate([reset, update])

    def step(row: Var, states: States) -> States:
        (h,) = states
        x_r, x_o, x_z = mb.split(x=row, num_splits=3, axis=-1)
        weight = mb.shared((op.weight_hh, "reset, update"), lambda: gates, f"{op.name}_gates")
        both = _plus(mb, mb.concat(values=(x_r, x_z), axis=-1), h, weight)
        r, z = mb.split(x=_activate(mb, op, "recurrent_activation", both), num_splits=2, axis=-1)
        weight = mb.shared((op.weight_hh, "output"), lambda: output, f"{op.name}_output")
        new = x_o if is_constant(h, 0) else _plus(mb, x_o, mb.mul(x=r, y=h), weight)
        new = _activate(mb, op, "activation", new)
        return (mb.add(x=new, y=mb.mul(x=z, y=mb.sub(x=h, y=new))),)

    return step


def _lstm(mb: Builder, op: Operation, suffix: str) -> Step:
    """Gates in the order input, forget, output, cell."""
    weight, clip = op.inputs[f"weight_hh{suffix}"], constant(op.inputs.get("clip"))
    peephole = constant(op.inputs.get(f"peephole{suffix}"))
    peeps: list[Array] = [] if peephole is None else np.split(np.asarray(peephole), 3)

    def peeped(gate: Var, which: int, cell: Var) -> Var:
        if not peeps or is_constant(cell, 0):
            return gate
        made: Var = mb.add(x=gate, y=mb.mul(x=cell, y=peeps[which]))
        return made

    def step(row: Var, states: States) -> States:
        h, c = states
        i, f, o, z = mb.split(x=_plus(mb, row, h, weight), num_splits=4, axis=-1)
        i = _activate(mb, op, "recurrent_activation", peeped(i, 0, c))
        f = _activate(mb, op, "recurrent_activation", peeped(f, 1, c))
        z = _activate(mb, op, "cell_activation", z)
        new = mb.mul(x=i, y=z)
        c = new if is_constant(c, 0) else mb.add(x=mb.mul(x=f, y=c), y=new)
        if clip is not None:
            limit = np_dtype(c).type(clip)
            c = mb.clip(x=c, alpha=-limit, beta=limit)
        o = _activate(mb, op, "recurrent_activation", peeped(o, 2, c))
        return mb.mul(x=o, y=_activate(mb, op, "activation", c)), c

    return step


STEPS: dict[str, Callable[[Builder, Operation, str], Step]] = {"rnn": _rnn, "gru": _gru, "lstm": _lstm}

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


def _activate(mb: Builder, op: Operation, which: str, x: Var) -> Var:
    """One of the activations of a recurrent op."""
    kind = constant(op.inputs.get(which))
    op_type, values = ACTIVATIONS[str(kind or DEFAULT.get(which, "tanh")).lower()]
    if not op_type:
        return x
    parameters: dict[str, Any] = {k: np_dtype(x).type(v) for k, v in values.items()}
    made: Var = getattr(mb, op_type)(x=x, **parameters)
    return made


def example() -> Program:
    """One step of a simple RNN, with its state as input."""
    rng = np.random.default_rng(0)
    weight_ih, weight_hh = (rng.standard_normal((4, n)).astype(np.float32) for n in (5, 4))

    @mb.program(input_specs=[mb.TensorSpec((1, 1, 5)), mb.TensorSpec((1, 4))])
    def program(x: Var, h: Var) -> Var:
        return mb.rnn(x=x, initial_h=h, weight_ih=weight_ih, weight_hh=weight_hh, name="y")[1]

    return program

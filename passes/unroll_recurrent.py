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
(peepholes, clipped cells), GRU (the reset gate before or after its product) and simple RNN; every direction,
activation and initial state. A reverse sequence keeps the order of the op: its first row is the step computed
first.

Refuses when the sequence is symbolic or longer than `max_steps` (the program grows by about 12 ops for each
step and direction), and when constants are compressed.

Why it helps: lstm, gru and rnn stay on the CPU (measured through Core ML on M4, macOS 27; the tables of the
compiler have no such op on any chip). Products and activations run on the ANE.

Grade: proved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from anesurgery import authoring as an
from anesurgery.authoring import Builder, Match, Refusal, Rewrite, Var, mb

States = an.recurrent_steps.States
BACK = {"forward": ("",), "reverse": ("",), "bidirectional": ("", "_back")}
"""Direction -> the suffixes of the weights of each way through the sequence."""
TAKEN_APART = ("bias", "peephole", "weight_hh", "input_bias")
"""Constants of which a step reads parts (`weight_hh` of a gru)."""


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
        """A known, short sequence, and constants that can be read."""
        op, shape = m.root, an.static_shape(m.root.x)
        if shape is None:
            return Refusal(f"%{op.x.name} has the symbolic shape {tuple(op.x.shape)}", op)
        if shape[0] > self.max_steps or shape[0] < 1:
            return Refusal(f"the sequence has {shape[0]} steps; max_steps is {self.max_steps}", op)
        for name in (f"{part}{suffix}" for part in TAKEN_APART for suffix in ("", "_back")):
            var = op.inputs.get(name)
            needed = var is not None and (op.op_type == "gru" or not name.startswith("weight"))
            if needed and not (an.is_stored(var) if "weight" in name else an.producer(var, "const")):
                made_by = var.op.op_type if var is not None and var.op is not None else "an input"
                return Refusal(f"{name} is taken apart, but it is made by {made_by}", op)
        for name in ("recurrent_activation", "cell_activation", "activation"):
            kind = an.constant(op.inputs.get(name))
            if kind is not None and str(kind).lower() not in an.recurrent_steps.ACTIVATIONS:
                return Refusal(f"{name} {kind!r} is not known", op)
        return m

    def rewrite(self, mb: Builder, m: Match) -> tuple[Var, ...]:
        """Each way through the sequence, side by side."""
        op, ways = m.root, BACK[str(an.constant(m.root.direction) or "forward")]
        initial = [op.initial_h, *([op.initial_c] if op.op_type == "lstm" else [])]
        halves = [an.parted(mb, state, -1, len(ways)) for state in initial]
        walks = [_walk(mb, op, suffix, tuple(half[i] for half in halves)) for i, suffix in enumerate(ways)]
        lasts = [an.joined(mb, [states[i] for _, states in walks], -1) for i in range(len(initial))]
        if an.flag(op, "output_sequence"):
            return an.joined(mb, [_sequence(mb, outputs) for outputs, _ in walks], -1), *lasts
        return mb.expand_dims(x=lasts[0], axes=[0]), *lasts


def _walk(mb: Builder, op: an.Operation, suffix: str, states: States) -> tuple[list[Var], States]:
    """One way: the output of each step, in the order in which it is returned, and the last states."""
    steps, back = int(op.x.shape[0]), suffix or an.constant(op.direction) == "reverse"
    bias = an.recurrent_steps.bias_outside(mb, op, suffix)
    added = {} if bias is None else {"bias": bias}
    inputs = an.parted(mb, mb.linear(x=op.x, weight=op.inputs[f"weight_ih{suffix}"], **added), 0, steps)
    step = an.recurrent_steps.STEPS[op.op_type](mb, op, suffix)
    outputs = []
    for row in reversed(inputs) if back else inputs:
        states = step(mb.squeeze(x=row, axes=[0]), states)
        outputs.append(states[0])
    return (outputs[::-1] if suffix else outputs), states


def _sequence(mb: Builder, rows: list[Var]) -> Var:
    return mb.expand_dims(x=rows[0], axes=[0]) if len(rows) == 1 else mb.stack(values=tuple(rows), axis=0)


@an.example((1, 1, 5), (1, 4))
def example(x: Var, h: Var) -> Var:
    """One step of a simple RNN, with its state as input."""
    rng = np.random.default_rng(0)
    weight_ih, weight_hh = (rng.standard_normal((4, n)).astype(np.float32) for n in (5, 4))
    return mb.rnn(x=x, initial_h=h, weight_ih=weight_ih, weight_hh=weight_hh, name="y")[1]

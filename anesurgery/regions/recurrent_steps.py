"""What one step of a recurrent op computes, in products, sums and activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from anesurgery.mil import Array, Operation, Var, constant, is_constant, np_dtype
from anesurgery.regions.compressed_weights import edit_weight
from anesurgery.regions.weight_edits import Edit
from anesurgery.semantics.reading import flag

States = tuple[Var, ...]
Step = Callable[[Var, States], States]
"""(what the input adds to the gates, the states) -> the states, the output first."""


def _plus(mb: Any, row: Var, state: Var, weight: Var) -> Var:
    """What the input and a state add to the gates; a state of zeros adds nothing."""
    return row if is_constant(state, 0) else mb.add(x=row, y=mb.linear(x=state, weight=weight))


def _rnn(mb: Any, op: Operation, suffix: str) -> Step:
    """act(W x + b + V h)."""

    def step(row: Var, states: States) -> States:
        return (_activate(mb, op, "activation", _plus(mb, row, states[0], op.weight_hh)),)

    return step


def _gru(mb: Any, op: Operation, suffix: str) -> Step:
    """Gates in the order reset, output, update.

    The reset gate multiplies the state before the product of the output gate; with `reset_after`, that product
    and its part of the bias.
    """
    width = int(op.weight_hh.shape[1])
    rows = np.arange(3 * width).reshape(3, width)  # reset, output, update
    whole = Edit.of(op.weight_hh.shape)
    gates, output = (whole.taken(0, r.ravel()) for r in (rows[[0, 2]], rows[1]))
    after, inside = flag(op, "reset_after"), _inside(op)

    def step(row: Var, states: States) -> States:
        (h,) = states
        x_r, x_o, x_z = mb.split(x=row, num_splits=3, axis=-1)
        weight = edit_weight(mb, op.weight_hh, gates, f"{op.name}_gates")
        both = _plus(mb, mb.concat(values=(x_r, x_z), axis=-1), h, weight)
        r, z = mb.split(x=_activate(mb, op, "recurrent_activation", both), num_splits=2, axis=-1)
        weight = edit_weight(mb, op.weight_hh, output, f"{op.name}_output")
        if after:
            still = is_constant(h, 0)
            kept = inside if still else mb.linear(x=h, weight=weight, bias=inside)
            new = mb.add(x=x_o, y=mb.mul(x=r, y=kept))
        else:
            new = x_o if is_constant(h, 0) else _plus(mb, x_o, mb.mul(x=r, y=h), weight)
        new = _activate(mb, op, "activation", new)
        return (mb.add(x=new, y=mb.mul(x=z, y=mb.sub(x=h, y=new))),)

    return step


def _inside(op: Operation) -> Array:
    """What is added to the product of the state before the reset gate multiplies it."""
    width, bias = int(op.weight_hh.shape[1]), constant(op.inputs.get("bias"))
    zeros = np.zeros(width, np_dtype(op.x))
    return zeros if bias is None else np.asarray(bias)[width : 2 * width]


def bias_outside(mb: Any, op: Operation, suffix: str) -> Var | None:
    """What the input adds to the gates, beside its product; None for nothing."""
    bias: Var | None = op.inputs.get(f"bias{suffix}")
    more, after = constant(op.inputs.get("input_bias")), flag(op, "reset_after")
    if more is None and not (after and bias is not None):
        return bias
    width = int(op.weight_hh.shape[1])
    total = np.zeros(3 * width, np_dtype(op.x)) if bias is None else np.array(constant(bias))
    if after:
        total[width : 2 * width] = 0
    total = total if more is None else total + np.asarray(more)
    return mb.shared((op, "bias outside"), lambda: total, f"{op.name}_bias")


def _lstm(mb: Any, op: Operation, suffix: str) -> Step:
    """Gates in the order input, forget, output, cell."""
    weight, clip = op.inputs[f"weight_hh{suffix}"], constant(op.inputs.get("clip"))
    peephole = constant(op.inputs.get(f"peephole{suffix}"))
    peeps: list[Array] = [] if peephole is None else np.split(np.asarray(peephole), 3)

    def peeped(gate: Var, which: int, cell: Var) -> Var:
        if not peeps or is_constant(cell, 0):
            return gate
        return mb.add(x=gate, y=mb.mul(x=cell, y=peeps[which]))

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


STEPS: dict[str, Callable[[Any, Operation, str], Step]] = {"rnn": _rnn, "gru": _gru, "lstm": _lstm}

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


def _activate(mb: Any, op: Operation, which: str, x: Var) -> Var:
    """One of the activations of a recurrent op."""
    kind = constant(op.inputs.get(which))
    op_type, values = ACTIVATIONS[str(kind or DEFAULT.get(which, "tanh")).lower()]
    if not op_type:
        return x
    parameters: dict[str, Any] = {k: np_dtype(x).type(v) for k, v in values.items()}
    return getattr(mb, op_type)(x=x, **parameters)

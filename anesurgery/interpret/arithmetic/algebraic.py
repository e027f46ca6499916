"""The arithmetic that proves identities: values are residues at a random point of prime fields, not floats.

If both sides of an edit are polynomials or quotients of them, and give the same residues at a random point,
they are equal but for a tiny probability (Schwartz, Zippel). Sums, products, quotients and constants, which are
m * 2^e, are exact. relu, clip, max and the like are written with the absolute value, so that their identities
hold. Every other function is a random one: equal arguments give equal results, and nothing else is known of it.

`element_rules`, `sum_rules` and `list_rules` have the rules of most ops. Here are those of recurrent ops, which
are computed step by step; then all are joined in `Algebraic.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anesurgery.interpret.arithmetic import element_rules, list_rules, sum_rules
from anesurgery.interpret.arithmetic.element_rules import Algebraic
from anesurgery.interpret.arithmetic.field import Image, add, multiply, product, together
from anesurgery.interpret.arithmetic.symbolic import Rule
from anesurgery.interpret.ops.recurrent import BACKWARD
from anesurgery.interpret.table import Unsupported
from anesurgery.mil import Operation, np_dtype

LONGEST = 64
"""The longest sequence that is computed step by step; a longer one is a random function of all that the op
reads."""

States = tuple[Image, ...]
Step = Callable[[Image, States], States]
"""(what the input adds to the gates, the states) -> the new states, of which the first is the output."""


class _Op:
    """A recurrent op, with its operands as residues."""

    def __init__(self, a: Algebraic, op: Operation, arguments: dict[str, Any]) -> None:
        self.a, self.op, self.given = a, op, arguments

    def image(self, name: str) -> Image | None:
        """Return an operand; None where it is absent."""
        value = self.given.get(name)
        return None if value is None else self.a.image(value)

    def transposed(self, name: str) -> Image:
        """Return a matrix with its axes swapped."""
        matrix = self.image(name)
        assert matrix is not None
        return matrix.map(lambda v: v.transpose(-1, -2))

    def activate(self, parameter: str, default: str, x: Image) -> Image:
        """Apply the activation that an attribute of the op names."""
        kind = str(self.given.get(parameter) or default).lower()
        if kind in ("tanh", "scaled_tanh"):
            return self.a.odd("tanh", x)
        if kind == "sigmoid":
            return self.a.function("sigmoid", x)
        if kind in ("hard_sigmoid", "sigmoid_hard"):
            alpha, beta = (float(np_dtype(self.op.outputs[0]).type(n)) for n in (0.2, 0.5))
            return self.a.smaller(self.a.larger(self.a.plus(self.a.times(x, alpha), beta), 0), 1)
        if kind == "relu":
            return self.a.larger(x, 0)
        if kind == "linear":
            return x
        raise Unsupported(f"recurrent activation {kind!r} is not known")


def _chunks(x: Image, count: int) -> list[Image]:
    """Return equal parts along the last axis."""
    width = x.shape[-1] // count
    return [x.map(lambda v, i=i: v.narrow(-1, i * width, width)) for i in range(count)]  # type: ignore[misc]


def _rnn(of: _Op, suffix: str) -> Step:
    recurrent = of.transposed("weight_hh")

    def step(row: Image, states: States) -> States:
        return (of.activate("activation", "tanh", add(row, product(states[0], recurrent))),)

    return step


def _gru(of: _Op, suffix: str) -> Step:
    reset, output, update = _chunks(of.transposed("weight_hh"), 3)
    after, bias = bool(of.given.get("reset_after")), of.image("bias")
    inside = None if bias is None or not after else _chunks(bias, 3)[1]

    def step(row: Image, states: States) -> States:
        (h,) = states
        x_r, x_o, x_z = _chunks(row, 3)
        r = of.activate("recurrent_activation", "sigmoid", add(x_r, product(h, reset)))
        z = of.activate("recurrent_activation", "sigmoid", add(x_z, product(h, update)))
        if after:
            kept = product(h, output)
            new = add(x_o, multiply(r, kept if inside is None else add(kept, inside)))
        else:
            new = add(x_o, product(multiply(r, h), output))
        new = of.activate("activation", "tanh", new)
        return (add(new, multiply(z, of.a.minus(h, new))),)

    return step


def _lstm(of: _Op, suffix: str) -> Step:
    recurrent, peephole = of.transposed(f"weight_hh{suffix}"), of.image(f"peephole{suffix}")
    peeps = None if peephole is None else _chunks(peephole, 3)
    limit = of.given.get("clip")

    def gate(x: Image, cell: Image, which: int) -> Image:
        x = x if peeps is None else add(x, multiply(cell, peeps[which]))
        return of.activate("recurrent_activation", "sigmoid", x)

    def step(row: Image, states: States) -> States:
        h, c = states
        i, f, o, z = _chunks(add(row, product(h, recurrent)), 4)
        z = of.activate("cell_activation", "tanh", z)
        new = add(multiply(gate(f, c, 1), c), multiply(gate(i, c, 0), z))
        if limit is not None:
            new = of.a.smaller(of.a.larger(new, -float(limit)), float(limit))
        return multiply(gate(o, new, 2), of.activate("activation", "tanh", new)), new

    return step


STEPS: dict[str, Callable[[_Op, str], Step]] = {"rnn": _rnn, "gru": _gru, "lstm": _lstm}
"""Op type -> builds its step from the op, and "" or "_back", the ending of the weights of a direction."""


def _input_bias(of: _Op, suffix: str) -> Image | None:
    """Return what is added to the gates besides the products; without what `reset_after` adds inside."""
    bias, more = of.image(f"bias{suffix}"), of.image("input_bias")
    if bias is not None and of.given.get("reset_after"):
        parts = _chunks(bias, 3)
        parts[1] = parts[1].map(torch.zeros_like)
        bias = _concat(parts)
    if bias is None or more is None:
        return more if bias is None else bias
    return add(bias, more)


def _concat(parts: Sequence[Image], axis: int = -1) -> Image:
    """Return tensors joined along an axis."""
    return together(parts, lambda each: torch.cat(each, axis))


def _walk(of: _Op, x: Image, suffix: str, states: States, back: bool) -> tuple[list[Image], States]:
    """Run one direction; return the outputs in the order in which they are computed, and the last states."""
    rows, bias = product(x, of.transposed(f"weight_ih{suffix}")), _input_bias(of, suffix)
    rows = rows if bias is None else add(rows, bias)
    order = range(x.shape[0])
    step, outputs = STEPS[of.op.op_type](of, suffix), []
    for at in reversed(order) if back else order:
        states = step(rows.map(lambda v, at=at: v[at]), states)  # type: ignore[misc]
        outputs.append(states[0])
    return outputs, states


def _recurrent(a: Algebraic, op: Operation, **arguments: Any) -> Any:
    """Compute a recurrent op: the sequence or its last output, and the last states."""
    x, direction = a.image(arguments["x"]), str(arguments.get("direction") or "forward")
    if x.shape[0] > LONGEST or x.shape[0] < 1 or direction not in BACKWARD:
        return a.uninterpreted(op, arguments)
    of, ways = _Op(a, op, arguments), BACKWARD[direction]
    initial = [of.image(name) for name in ("initial_h", "initial_c")]
    split = [_chunks(state, len(ways)) for state in initial if state is not None]
    outputs, lasts = [], []
    for i, back in enumerate(ways):
        steps, last = _walk(of, x, "_back" if i else "", tuple(half[i] for half in split), back)
        outputs.append(steps[::-1] if i else steps)
        lasts.append(last)
    ends = [_concat(each) for each in zip(*lasts, strict=True)]
    one = ends[0].map(lambda v: v[None])
    if arguments.get("output_sequence"):
        rows = [_concat(each).map(lambda v: v[None]) for each in zip(*outputs, strict=True)]
        one = _concat(rows, 0)
    return (one, *ends)


RULES: dict[str, Rule] = dict.fromkeys(STEPS, _recurrent)

Algebraic.rules = element_rules.RULES | sum_rules.RULES | list_rules.RULES | RULES

__all__ = ["Algebraic"]

"""The arithmetic of a prime field: both sides of an edit are evaluated at random points (Schwartz, Zippel).

Sums, products, quotients and what is made of them are exact, and so are constants, which are m * 2^e. The
absolute value stands for all that is made of it (relu, clip, max), so that its identities hold. Every other
function is a random one.
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
"""Steps up to which a sequence is taken apart; a longer one is a function of all that it reads, since each step
is taken by itself."""

States = tuple[Image, ...]
Step = Callable[[Image, States], States]
"""(what the input adds to the gates, the states) -> the states, the output first."""


class _Op:
    """A recurrent op and the arithmetic in which it is computed."""

    def __init__(self, a: Algebraic, op: Operation, arguments: dict[str, Any]) -> None:
        self.a, self.op, self.given = a, op, arguments

    def image(self, name: str) -> Image | None:
        """An operand; None where it is absent."""
        value = self.given.get(name)
        return None if value is None else self.a.image(value)

    def turned(self, name: str) -> Image:
        """A matrix with its axes swapped."""
        matrix = self.image(name)
        assert matrix is not None
        return matrix.map(lambda v: v.transpose(-1, -2))

    def activate(self, parameter: str, default: str, x: Image) -> Image:
        """An activation by the name that the op gives it."""
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
    """Equal parts along the last axis."""
    width = x.shape[-1] // count
    return [x.map(lambda v, i=i: v.narrow(-1, i * width, width)) for i in range(count)]  # type: ignore[misc]


def _rnn(of: _Op, suffix: str) -> Step:
    recurrent = of.turned("weight_hh")

    def step(row: Image, states: States) -> States:
        return (of.activate("activation", "tanh", add(row, product(states[0], recurrent))),)

    return step


def _gru(of: _Op, suffix: str) -> Step:
    reset, output, update = _chunks(of.turned("weight_hh"), 3)
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
    recurrent, peephole = of.turned(f"weight_hh{suffix}"), of.image(f"peephole{suffix}")
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


def _bias(of: _Op, suffix: str) -> Image | None:
    """What the input adds to the gates beside its product."""
    bias, more = of.image(f"bias{suffix}"), of.image("input_bias")
    if bias is not None and of.given.get("reset_after"):
        parts = _chunks(bias, 3)
        parts[1] = parts[1].map(torch.zeros_like)
        bias = _joined(parts)
    return bias if more is None else more if bias is None else add(bias, more)


def _joined(parts: Sequence[Image], axis: int = -1) -> Image:
    return together(parts, lambda each: torch.cat(each, axis))


def _walk(of: _Op, x: Image, suffix: str, states: States, back: bool) -> tuple[list[Image], States]:
    """The outputs in the order in which they are computed, and the last states."""
    rows, bias = product(x, of.turned(f"weight_ih{suffix}")), _bias(of, suffix)
    rows = rows if bias is None else add(rows, bias)
    order = range(x.shape[0])
    step, outputs = STEPS[of.op.op_type](of, suffix), []
    for at in reversed(order) if back else order:
        states = step(rows.map(lambda v, at=at: v[at]), states)  # type: ignore[misc]
        outputs.append(states[0])
    return outputs, states


def _recurrent(a: Algebraic, op: Operation, **arguments: Any) -> Any:
    """The sequence or its last output, and the last states."""
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
    ends = [_joined(each) for each in zip(*lasts, strict=True)]
    one = ends[0].map(lambda v: v[None])
    if arguments.get("output_sequence"):
        rows = [_joined(each).map(lambda v: v[None]) for each in zip(*outputs, strict=True)]
        one = _joined(rows, 0)
    return (one, *ends)


RULES: dict[str, Rule] = dict.fromkeys(STEPS, _recurrent)

Algebraic.rules = element_rules.RULES | sum_rules.RULES | list_rules.RULES | RULES

__all__ = ["Algebraic"]

"""Long short-term memory, in one direction or two: peepholes, coupled gates, a bound on the cell state.

The cell state is c = f c + i z, the output o h(c), with gates i, f and o of the input, of the last output and,
by peepholes, of the cell state (for o, of the new one). A coupled forget gate is 1 - i; where the activation
has f(-x) = 1 - f(x), that is the input gate with all its weights negated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from anesurgery.mil import Array, Var, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.activation_layers import activate
from anesurgery.neuralnetwork.layers.layer_table import layer
from anesurgery.neuralnetwork.layers.sequences import (
    Direction,
    F,
    States,
    Step,
    Weights,
    activations,
    initial_states,
    joined,
    name_of,
    outputs,
    sequence,
    stacked,
    written_out,
)

CLIP = 50.0
"""Bound of the cell state where none is stated (builder of coremltools, `add_unilstm`)."""
INPUT, FORGET, OUTPUT, CELL = "inputGate", "forgetGate", "outputGate", "blockInput"
SYMMETRIC = ("sigmoid", "hard_sigmoid")
"""Activations with f(-x) = 1 - f(x)."""
ROLES = ("recurrent_activation", "cell_activation", "activation")


@layer("uniDirectionalLSTM", inputs=(1, 3))
def uni_directional(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """[y, h, c] of one walk through the sequence."""
    way = _way(ctx, params, params.weightParams, params.activations)
    return _lstm(ctx, params, inputs, [way], bool(params.reverseInput))


@layer("biDirectionalLSTM", inputs=(1, 5))
def bi_directional(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """[y, h, c, backward h, backward c]; y holds both directions, concatenated."""
    if len(params.weightParams) != 2:
        raise ctx.error(f"has weights for {len(params.weightParams)} directions, not 2; export the model again")
    kinds = (params.activationsForwardLSTM, params.activationsBackwardLSTM)
    ways = [_way(ctx, params, w, a) for w, a in zip(params.weightParams, kinds, strict=True)]
    return _lstm(ctx, params, inputs, ways, False)


def _way(ctx: Context, params: Any, stored: Any, stated: Any) -> Direction:
    """The weights of one direction, and its step."""
    kinds = activations(ctx, stated, 3)
    names = [name_of(a) for a in kinds]
    negate = params.params.coupledInputAndForgetGate and names[0] in SYMMETRIC
    weights = _weights(ctx, params, stored, negate)
    return Direction(weights, names, _step(ctx, params, weights, kinds))


def _weights(ctx: Context, params: Any, stored: Any, negate: bool) -> Weights:
    options = params.params
    coupled = options.coupledInputAndForgetGate
    size = int(params.inputVectorSize), int(params.outputVectorSize)
    hidden = size[1]
    forget = INPUT if coupled else FORGET
    gates = (INPUT, forget, OUTPUT, CELL)
    weights = stacked(ctx, stored, gates, size, options.hasBiasVectors)
    bias = weights.bias
    if options.forgetBias and not coupled:
        bias = np.zeros(4 * hidden, F) if bias is None else bias.copy()
        bias[hidden : 2 * hidden] += 1
    peephole = None
    if options.hasPeepholeVectors:
        names = [f"{gate}PeepholeVector" for gate in gates[:3]]
        vectors = [ctx.weights(getattr(stored, n), (hidden,), n) for n in names]
        peephole = np.concatenate(vectors)
    weights = replace(weights, bias=bias, peephole=peephole)
    return _negated(weights, hidden) if negate else weights


def _negated(weights: Weights, hidden: int) -> Weights:
    """The forget gate with its weights negated."""

    def flip(array: Array | None) -> Array | None:
        if array is None:
            return None
        flipped = array.copy()
        flipped[hidden : 2 * hidden] *= -1
        return flipped

    ih, hh = flip(weights.ih), flip(weights.hh)
    assert ih is not None
    assert hh is not None
    return Weights(ih, hh, flip(weights.bias), flip(weights.peephole))


def _bound(params: Any) -> float:
    return float(params.params.cellClipThreshold) or CLIP


def _step(ctx: Context, params: Any, weights: Weights, kinds: Sequence[Any]) -> Step:
    """One step, written out."""
    gate, cell_in, cell_out = kinds
    p_i, p_f, p_o = (None,) * 3 if weights.peephole is None else np.split(weights.peephole, 3)
    coupled = params.params.coupledInputAndForgetGate and name_of(gate) not in SYMMETRIC
    bound = _bound(params)

    def open_(total: Var, peephole: Array | None, c: Var) -> Var:
        if peephole is not None:
            total = mb.add(x=total, y=mb.mul(x=c, y=peephole))
        return activate(ctx, gate, total)

    def step(row: Var, states: States) -> States:
        h, c = states
        total = mb.add(x=row, y=mb.linear(x=h, weight=weights.hh))
        x_i, x_f, x_o, x_z = mb.split(x=total, num_splits=4, axis=-1)
        i = open_(x_i, p_i, c)
        f = mb.sub(x=F(1), y=i) if coupled else open_(x_f, p_f, c)
        z = activate(ctx, cell_in, x_z)
        c = mb.add(x=mb.mul(x=f, y=c), y=mb.mul(x=i, y=z))
        c = mb.clip(x=c, alpha=F(-bound), beta=F(bound))
        return mb.mul(x=open_(x_o, p_o, c), y=activate(ctx, cell_out, c)), c

    return step


def _lstm(ctx: Context, params: Any, inputs: list[Var], ways: Sequence[Direction], backward: bool) -> list[Var]:
    """The outputs of a layer, as MIL's op or written out."""
    x = sequence(ctx, inputs[0], int(params.inputVectorSize))
    states = initial_states(ctx, inputs[1:], x, int(params.outputVectorSize), 2 * len(ways))
    every = params.params.sequenceOutput
    coupled = params.params.coupledInputAndForgetGate and ways[0].names[0] not in SYMMETRIC
    if all(ways[0].names) and ways[0].names == ways[-1].names and not coupled:
        return outputs(ctx, *_op(x, states, ways, backward, every, _bound(params)))
    ys: list[Var] = []
    lasts: list[Var] = []
    for i, way in enumerate(ways):
        back = backward or i == 1
        start = states[2 * i], states[2 * i + 1]
        rows, last = written_out(ctx, x, start, way, back)
        lasts += last
        ys.append(joined(rows[::-1] if i == 1 and every else rows, every))
    y = mb.concat(values=ys, axis=-1) if len(ys) > 1 else ys[0]
    return outputs(ctx, y, lasts)


def _op(
    x: Var, states: list[Var], ways: Sequence[Direction], backward: bool, every: bool, bound: float
) -> tuple[Var, list[Var]]:
    """MIL's op: (y, last states in the order of the initial ones)."""
    two = len(ways) == 2
    direction = "bidirectional" if two else "reverse" if backward else "forward"
    h, c = (mb.concat(values=[states[i], states[2 + i]], axis=-1) if two else states[i] for i in (0, 1))
    weights = ways[0].weights
    reverse = {}
    if two:
        back = ways[1].weights
        reverse = {
            "weight_ih_back": back.ih,
            "weight_hh_back": back.hh,
            "bias_back": back.bias,
            "peephole_back": back.peephole,
        }
    y, h, c = mb.lstm(
        x=x,
        initial_h=h,
        initial_c=c,
        weight_ih=weights.ih,
        weight_hh=weights.hh,
        bias=weights.bias,
        peephole=weights.peephole,
        direction=direction,
        output_sequence=every,
        clip=F(bound),
        **dict(zip(ROLES, ways[0].names, strict=True)),
        **reverse,
    )
    if not two:
        return y, [h, c]
    (h, h_back), (c, c_back) = (mb.split(x=s, num_splits=2, axis=-1) for s in (h, c))
    return y, [h, c, h_back, c_back]

"""Recurrent layers with one state: simple ones and gated ones (GRU)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from anesurgery.mil import Var, mb
from anesurgery.neuralnetwork.context import Context
from anesurgery.neuralnetwork.layers.activation_layers import activate
from anesurgery.neuralnetwork.layers.layer_table import layer
from anesurgery.neuralnetwork.layers.sequences import (
    Direction,
    F,
    States,
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

GRU_GATES = ("resetGate", "outputGate", "updateGate")
"""Gates in the order in which MIL stacks their weights."""


@layer("simpleRecurrent", inputs=(1, 2))
def simple_recurrent(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """The state is h = activation(W x + R h + b)."""
    inner, hidden = int(params.inputVectorSize), int(params.outputVectorSize)
    weights = Weights(
        ctx.weights(params.weightMatrix, (hidden, inner), "weightMatrix"),
        ctx.weights(params.recursionMatrix, (hidden, hidden), "recursionMatrix"),
        ctx.weights(params.biasVector, (hidden,), "biasVector") if params.hasBiasVector else None,
    )

    (act,) = activations(ctx, [params.activation], 1)

    def step(row: Var, states: States) -> States:
        total = mb.add(x=row, y=mb.linear(x=states[0], weight=weights.hh))
        return (activate(ctx, act, total),)

    way = Direction(weights, [name_of(act)], step)
    return _one_state(ctx, params, inputs, way, "rnn", ["activation"])


@layer("gru", inputs=(1, 2))
def gru(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """The state is h = (1 - z) o + z h, with o = g(W x + R (r h) + b)."""
    size = int(params.inputVectorSize), int(params.outputVectorSize)
    weights = stacked(ctx, params, GRU_GATES, size, params.hasBiasVectors)
    gate, act = activations(ctx, params.activations, 2)
    r_hh, o_hh, z_hh = np.split(weights.hh, 3)

    def step(row: Var, states: States) -> States:
        (h,) = states
        x_r, x_o, x_z = mb.split(x=row, num_splits=3, axis=-1)
        r = activate(ctx, gate, mb.add(x=x_r, y=mb.linear(x=h, weight=r_hh)))
        z = activate(ctx, gate, mb.add(x=x_z, y=mb.linear(x=h, weight=z_hh)))
        reset = mb.linear(x=mb.mul(x=r, y=h), weight=o_hh)
        o = activate(ctx, act, mb.add(x=x_o, y=reset))
        return (mb.add(x=mb.mul(x=mb.sub(x=F(1), y=z), y=o), y=mb.mul(x=z, y=h)),)

    way = Direction(weights, [name_of(gate), name_of(act)], step)
    return _one_state(ctx, params, inputs, way, "gru", ["recurrent_activation", "activation"])


def _one_state(
    ctx: Context, params: Any, inputs: list[Var], way: Direction, op: str, roles: Sequence[str]
) -> list[Var]:
    """A layer with one state, as MIL's op or written out."""
    x = sequence(ctx, inputs[0], int(params.inputVectorSize))
    (h,) = initial_states(ctx, inputs[1:], x, int(params.outputVectorSize), 1)
    back = params.reverseInput
    if all(way.names):
        weights = way.weights
        y, last = getattr(mb, op)(
            x=x,
            initial_h=h,
            weight_ih=weights.ih,
            weight_hh=weights.hh,
            bias=weights.bias,
            direction="reverse" if back else "forward",
            output_sequence=params.sequenceOutput,
            **dict(zip(roles, way.names, strict=True)),
        )
        return outputs(ctx, y, [last])
    rows, states = written_out(ctx, x, (h,), way, back)
    return outputs(ctx, joined(rows, params.sequenceOutput), states)

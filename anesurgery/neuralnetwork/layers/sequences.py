"""What recurrent layers share: stacked weights, names of activations, states, and steps written out.

They become MIL's own ops where those have the activations that are asked for; these ops take names without
parameters. Otherwise each step is written out, for which the length of the sequence must be known.

Blobs are (sequence, batch, size, 1, 1), states (1, batch, size, 1, 1). Initial states are 0 unless they are
inputs, which need only have as many numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anesurgery.mil import Array, Var, is_symbolic, mb
from anesurgery.neuralnetwork.context import Context

F = np.float32
DEFAULTS = {
    "linear": ("linear", (1, 0)),
    "sigmoidHard": ("hard_sigmoid", (0.2, 0.5)),
    "scaledTanh": ("scaled_tanh", (1, 1)),
}
"""Activation with alpha and beta -> its name in MIL's recurrent ops, and what alpha and beta are there.

The builder of coremltools states neither for recurrent layers (both are 0 then), and the ops take names only:
these are the values that such a name has in the interpreter; those of `scaled_tanh` are not documented.
"""

States = tuple[Var, ...]
Step = Callable[[Var, States], States]


@dataclass(frozen=True)
class Weights:
    """Stacked weights of a recurrent layer, fp32."""

    ih: Array
    """[gates * H, I]."""
    hh: Array
    """[gates * H, H]."""
    bias: Array | None
    """[gates * H]."""
    peephole: Array | None = None
    """[3 * H]: input, forget and output gate."""


@dataclass(frozen=True)
class Direction:
    """One walk through a sequence: its weights, its activations, and one step written out."""

    weights: Weights
    names: list[str | None]
    """MIL's names of the activations, None for one that has none."""
    step: Step


# -- weights and activations -------------------------------------------------------------------------------


def stacked(ctx: Context, params: Any, gates: Sequence[str], size: tuple[int, int], bias: bool) -> Weights:
    """The weights of some gates, one below the other; `size` is (inputs, outputs)."""
    inputs, hidden = size

    def stack(kind: str, shape: tuple[int, ...]) -> Array:
        names = [f"{gate}{kind}" for gate in gates]
        return np.concatenate([ctx.weights(getattr(params, n), shape, n) for n in names])

    return Weights(
        stack("WeightMatrix", (hidden, inputs)),
        stack("RecursionMatrix", (hidden, hidden)),
        stack("BiasVector", (hidden,)) if bias else None,
    )


def activations(ctx: Context, stated: Any, count: int) -> list[Any]:
    """The activations of a layer; there must be `count` of them."""
    if len(stated) != count:
        raise ctx.error(f"has {len(stated)} activations, expected {count}; export the model again")
    return [_stated(params) for params in stated]


def _stated(params: Any) -> Any:
    """An activation with its alpha and beta stated."""
    kind = params.WhichOneof("NonlinearityType")
    complete = type(params)()
    complete.CopyFrom(params)
    if kind in DEFAULTS:
        inner = getattr(complete, kind)
        if inner.alpha == 0 and inner.beta == 0:
            inner.alpha, inner.beta = DEFAULTS[kind][1]
    return complete


def name_of(params: Any) -> str | None:
    """The name of an activation in MIL's recurrent ops; None for one that they do not have."""
    kind = params.WhichOneof("NonlinearityType")
    if kind in DEFAULTS:
        name, same = DEFAULTS[kind]
        stated = getattr(params, kind)
        return name if np.allclose((stated.alpha, stated.beta), same, 1e-6, 0) else None
    return {"tanh": "tanh", "sigmoid": "sigmoid", "ReLU": "relu"}.get(kind)


# -- blobs -------------------------------------------------------------------------------------------------


def sequence(ctx: Context, x: Var, size: int) -> Var:
    """The input as [sequence, batch, size]."""
    five = ctx.five(x)
    sizes = ctx.shape(five, [2, 3, 4])
    if math.prod(sizes) != size:
        raise ctx.error(
            f"takes {size} numbers at each step, but its input has {math.prod(sizes)} "
            f"(axes 2 to 4 of {five.rank})"
        )
    if sizes[1:] == (1, 1):
        return mb.squeeze(x=five, axes=[3, 4])
    return ctx.reshape(five, [*five.shape[:2], size])


def initial_states(ctx: Context, inputs: Sequence[Var], sequence: Var, hidden: int, count: int) -> list[Var]:
    """Initial states [batch, hidden]."""
    if not inputs:
        return [_zeros(sequence, hidden)] * count
    if len(inputs) != count:
        raise ctx.error(f"has {len(inputs) + 1} inputs, takes 1 or {count + 1}")
    return [_state(ctx, x, sequence.shape[1], hidden) for x in inputs]


def _state(ctx: Context, x: Var, batch: Any, hidden: int) -> Var:
    """An initial state as [batch, hidden], read flat: converters write (batch, hidden, 1, 1, 1) too."""
    static = not any(is_symbolic(d) for d in (*x.shape, batch))
    if static and math.prod(x.shape) != batch * hidden:
        raise ctx.error(f"has an initial state of {math.prod(x.shape)} numbers, takes {batch} x {hidden}")
    return mb.reshape(x=x, shape=[batch if static else -1, hidden])


def _zeros(sequence: Var, hidden: int) -> Var:
    batch = sequence.shape[1]
    if not is_symbolic(batch):
        return mb.const(val=np.zeros((int(batch), hidden), F))
    size = mb.gather(x=mb.shape(x=sequence), indices=np.array([1], np.int32), axis=0)
    shape = mb.concat(values=[size, np.array([hidden], np.int32)], axis=0)
    return mb.fill(shape=shape, value=F(0))


def outputs(ctx: Context, y: Var, states: Sequence[Var]) -> list[Var]:
    """The outputs that the layer names: the sequence, and the last states if they are asked for."""
    values = [mb.expand_dims(x=y, axes=[3, 4])]
    values += [mb.expand_dims(x=s, axes=[0, 3, 4]) for s in states]
    return values[: len(ctx.layer.output)]


# -- written out -------------------------------------------------------------------------------------------


def written_out(
    ctx: Context, x: Var, states: States, way: Direction, backward: bool
) -> tuple[list[Var], States]:
    """The outputs [batch, hidden] of all steps in the order of computing, and the last states."""
    (length,) = ctx.shape(x, [0])
    projected = mb.linear(x=x, weight=way.weights.ih, bias=way.weights.bias)
    rows = mb.split(x=projected, num_splits=length, axis=0) if length > 1 else [projected]
    results = []
    for row in reversed(rows) if backward else rows:
        states = way.step(mb.squeeze(x=row, axes=[0]), states)
        results.append(states[0])
    return results, states


def joined(rows: Sequence[Var], sequence: bool) -> Var:
    """[sequence or 1, batch, hidden]."""
    return mb.stack(values=rows if sequence else rows[-1:], axis=0)

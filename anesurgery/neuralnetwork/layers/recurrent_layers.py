"""Recurrent layers, and the activations that they compute inside and that are layers of their own.

The layers are simple ones, gated ones (GRU), and LSTMs in one direction or two. They become MIL's own ops where
those have the activations that are asked for; these ops take names without parameters. Otherwise each step is
written out, for which the length of the sequence must be known.

Blobs are (sequence, batch, size, 1, 1), states (1, batch, size, 1, 1). Initial states are 0 unless they are
inputs, which need only have as many numbers.

The cell state of an LSTM is c = f c + i z, the output o h(c), with gates i, f and o of the input, of the last
output and, by peepholes, of the cell state (for o, of the new one). A coupled forget gate is 1 - i; where the
activation has f(-x) = 1 - f(x), that is the input gate with all its weights negated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anesurgery.mil import Array, Var, is_symbolic, mb
from anesurgery.neuralnetwork.context import Context, layer

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
        return (_activate(ctx, act, total),)

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
        r = _activate(ctx, gate, mb.add(x=x_r, y=mb.linear(x=h, weight=r_hh)))
        z = _activate(ctx, gate, mb.add(x=x_z, y=mb.linear(x=h, weight=z_hh)))
        reset = mb.linear(x=mb.mul(x=r, y=h), weight=o_hh)
        o = _activate(ctx, act, mb.add(x=x_o, y=reset))
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
        return _activate(ctx, gate, total)

    def step(row: Var, states: States) -> States:
        h, c = states
        total = mb.add(x=row, y=mb.linear(x=h, weight=weights.hh))
        x_i, x_f, x_o, x_z = mb.split(x=total, num_splits=4, axis=-1)
        i = open_(x_i, p_i, c)
        f = mb.sub(x=F(1), y=i) if coupled else open_(x_f, p_f, c)
        z = _activate(ctx, cell_in, x_z)
        c = mb.add(x=mb.mul(x=f, y=c), y=mb.mul(x=i, y=z))
        c = mb.clip(x=c, alpha=F(-bound), beta=F(bound))
        return mb.mul(x=open_(x_o, p_o, c), y=_activate(ctx, cell_out, c)), c

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


SIMPLE: dict[str, Callable[[Any, Var], Var]] = {
    "linear": lambda p, x: _linear(x, p.alpha, p.beta),
    "ReLU": lambda p, x: mb.relu(x=x),
    "leakyReLU": lambda p, x: mb.leaky_relu(x=x, alpha=F(p.alpha)),
    "tanh": lambda p, x: mb.tanh(x=x),
    "scaledTanh": lambda p, x: mb.scaled_tanh(x=x, alpha=F(p.alpha), beta=F(p.beta)),
    "sigmoid": lambda p, x: mb.sigmoid(x=x),
    "sigmoidHard": lambda p, x: mb.sigmoid_hard(x=x, alpha=F(p.alpha), beta=F(p.beta)),
    "ELU": lambda p, x: mb.elu(x=x, alpha=F(p.alpha)),
    "softsign": lambda p, x: mb.softsign(x=x),
    "softplus": lambda p, x: mb.softplus(x=x),
    "thresholdedReLU": lambda p, x: mb.thresholded_relu(x=x, alpha=F(p.alpha)),
}
"""Activations without weights: kind -> builder."""

GELU = {0: "EXACT", 1: "TANH_APPROXIMATION", 2: "SIGMOID_APPROXIMATION"}


def _linear(x: Var, alpha: float, beta: float) -> Var:
    """Alpha x + beta."""
    return mb.linear_activation(x=x, alpha=F(alpha), beta=F(beta))


def _activate(ctx: Context, params: Any, x: Var) -> Var:
    """The activation that an `ActivationParams` message describes.

    Raises:
        LoadError: it describes none, or its weights do not fit the channels.
    """
    kind = params.WhichOneof("NonlinearityType")
    if kind in SIMPLE:
        return SIMPLE[kind](getattr(params, kind), x)
    if kind == "PReLU":
        image, back = _with_channels(ctx, x)
        return back(mb.prelu(x=image, alpha=_each(ctx, params.PReLU.alpha, image, "alpha")))
    if kind == "parametricSoftplus":
        image, back = _with_channels(ctx, x)
        soft = params.parametricSoftplus
        alpha, beta = (_each(ctx, w, image, n) for w, n in ((soft.alpha, "alpha"), (soft.beta, "beta")))
        return back(mb.softplus_parametric(x=image, alpha=alpha, beta=beta))
    raise ctx.error("has no activation that is known; upgrade coremltools, or export the model again")


def _with_channels(ctx: Context, x: Var) -> tuple[Var, Callable[[Var], Var]]:
    """A value as (batch, channel, height, width), and the way back; of two axes, the last is the channel.

    The specification asks for three axes, but converters write such layers after matrix products.
    """
    if x.rank > 2:
        return ctx.images(x)
    axes = [2, 3] if x.rank == 2 else [0, 2, 3]
    return mb.expand_dims(x=x, axes=axes), lambda y: mb.squeeze(x=y, axes=axes)


def _each(ctx: Context, params: Any, image: Var, name: str) -> Array:
    """A parameter for each channel; the file may hold a single one for all."""
    (channels,) = ctx.shape(image, [1])
    bits = 8 * len(params.rawValue)
    single = (
        len(params.floatValue) == 1
        or len(params.float16Value) == 2
        or 0 < bits < channels * params.quantization.numberOfBits
    )
    return np.broadcast_to(ctx.weights(params, [1 if single else channels], name), channels).copy()


layer("activation")(lambda ctx, params, inputs: _activate(ctx, params, inputs[0]))
layer("clip")(lambda ctx, params, inputs: mb.clip(x=inputs[0], alpha=F(params.minVal), beta=F(params.maxVal)))
layer("clampedReLU")(
    lambda ctx, params, inputs: mb.clamped_relu(x=inputs[0], alpha=F(params.alpha), beta=F(params.beta))
)
layer("gelu")(lambda ctx, params, inputs: mb.gelu(x=inputs[0], mode=GELU[params.mode]))

"""Recurrent layers, and the activations that they compute inside and that are layers of their own.

The layers are simple ones, gated ones (GRU), and LSTMs in one direction or two. A layer becomes MIL's own op
(`rnn`, `gru`, `lstm`) if that op has the layer's activations: it takes their names, without parameters.
Otherwise we unroll the layer, one group of ops for each step; then the length of the sequence must be known.

Blobs are (sequence, batch, size, 1, 1), states (1, batch, size, 1, 1). Initial states are 0 unless they are
inputs. Such an input may have any shape with batch * size numbers.

An LSTM has the gates i (input), f (forget) and o (output), and z, the activated cell input. Its cell state is
c = f * c + i * z, and its output o * activation(c). The gates read the input, the previous output and, through
peepholes, the cell state: i and f the previous one, o the new one. A coupled forget gate is 1 - i. Where the
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

MIL_NAMES = {"tanh": "tanh", "sigmoid": "sigmoid", "ReLU": "relu"}
"""Activation without parameters -> its name in MIL's recurrent ops."""
PARAMETRIC = {
    "linear": ("linear", (1, 0)),
    "sigmoidHard": ("hard_sigmoid", (0.2, 0.5)),
    "scaledTanh": ("scaled_tanh", (1, 1)),
}
"""Activation with alpha and beta -> its name in MIL's recurrent ops, and what (alpha, beta) are there.

coremltools' builder leaves both at 0 in recurrent layers, and the ops take only names. So 0 stands for the
values that the interpreter gives such a name; those of `scaled_tanh` are not documented.
"""

States = tuple[Var, ...]
"""The states after a step, each [batch, hidden]: (h,), or (h, c) of an LSTM. The first one is the output."""
Step = Callable[[Var, States], States]
"""Builds one step: (projected input [batch, gates * hidden], states before) -> states after."""


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
    """One walk through a sequence, forward or backward."""

    weights: Weights
    names: list[str | None]
    """MIL's names of the activations, None for one that has none."""
    step: Step
    backward: bool


def stacked(
    ctx: Context, params: Any, gates: Sequence[str], inputs: int, hidden: int, has_bias: bool
) -> Weights:
    """Return the weights of some gates, one below the other."""

    def stack(kind: str, shape: tuple[int, ...]) -> Array:
        names = [f"{gate}{kind}" for gate in gates]
        return np.concatenate([ctx.weights(getattr(params, n), shape, n) for n in names])

    return Weights(
        stack("WeightMatrix", (hidden, inputs)),
        stack("RecursionMatrix", (hidden, hidden)),
        stack("BiasVector", (hidden,)) if has_bias else None,
    )


def activations(ctx: Context, messages: Any, count: int) -> list[Any]:
    """Return the `ActivationParams` of a layer; there must be `count` of them."""
    if len(messages) != count:
        raise ctx.error(f"has {len(messages)} activations, expected {count}; export the model again")
    return [_with_parameters(params) for params in messages]


def _with_parameters(params: Any) -> Any:
    """Return a copy of `ActivationParams` in which alpha and beta, if both are 0, are those of `PARAMETRIC`."""
    kind = params.WhichOneof("NonlinearityType")
    complete = type(params)()
    complete.CopyFrom(params)
    if kind in PARAMETRIC:
        inner = getattr(complete, kind)
        if inner.alpha == 0 and inner.beta == 0:
            inner.alpha, inner.beta = PARAMETRIC[kind][1]
    return complete


def name_of(params: Any) -> str | None:
    """Return the name of an activation in MIL's recurrent ops; None for one that they do not have."""
    kind = params.WhichOneof("NonlinearityType")
    if kind in PARAMETRIC:
        name, parameters = PARAMETRIC[kind]
        inner = getattr(params, kind)
        return name if np.allclose((inner.alpha, inner.beta), parameters, 1e-6, 0) else None
    return MIL_NAMES.get(kind)


def sequence(ctx: Context, x: Var, size: int) -> Var:
    """Build the input as [sequence, batch, size]."""
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
    """Build the initial states, each [batch, hidden]: zeros where the layer has no such inputs."""
    if not inputs:
        return [_zeros(sequence, hidden)] * count
    if len(inputs) != count:
        raise ctx.error(f"has {len(inputs) + 1} inputs, takes 1 or {count + 1}")
    return [_state(ctx, x, sequence.shape[1], hidden) for x in inputs]


def _state(ctx: Context, x: Var, batch: Any, hidden: int) -> Var:
    """Reshape an initial state to [batch, hidden]: converters write (batch, hidden, 1, 1, 1) too."""
    static = not any(is_symbolic(d) for d in (*x.shape, batch))
    if static and math.prod(x.shape) != batch * hidden:
        raise ctx.error(f"has an initial state of {math.prod(x.shape)} numbers, takes {batch} x {hidden}")
    return mb.reshape(x=x, shape=[batch if static else -1, hidden])


def _zeros(sequence: Var, hidden: int) -> Var:
    """Build zeros [batch, hidden], also for a dynamic batch."""
    batch = sequence.shape[1]
    if not is_symbolic(batch):
        return mb.const(val=np.zeros((int(batch), hidden), np.float32))
    size = mb.gather(x=mb.shape(x=sequence), indices=np.array([1], np.int32), axis=0)
    shape = mb.concat(values=[size, np.array([hidden], np.int32)], axis=0)
    return mb.fill(shape=shape, value=np.float32(0))


def outputs(ctx: Context, y: Var, states: Sequence[Var]) -> list[Var]:
    """Build the outputs that the layer names: the sequence, and the last states if it names them."""
    values = [mb.expand_dims(x=y, axes=[3, 4])]
    values += [mb.expand_dims(x=s, axes=[0, 3, 4]) for s in states]
    return values[: len(ctx.layer.output)]


def unrolled(ctx: Context, x: Var, states: States, direction: Direction) -> tuple[list[Var], States]:
    """Build all steps of one direction.

    Returns:
        The output [batch, hidden] of each step, in the order of computing, and the last states.
    """
    (length,) = ctx.shape(x, [0])
    projected = mb.linear(x=x, weight=direction.weights.ih, bias=direction.weights.bias)
    rows = mb.split(x=projected, num_splits=length, axis=0) if length > 1 else [projected]
    results = []
    for row in reversed(rows) if direction.backward else rows:
        states = direction.step(mb.squeeze(x=row, axes=[0]), states)
        results.append(states[0])
    return results, states


def joined(rows: Sequence[Var], whole_sequence: bool) -> Var:
    """Stack the outputs of all steps, [sequence, batch, hidden], or take the last, [1, batch, hidden]."""
    return mb.stack(values=rows if whole_sequence else rows[-1:], axis=0)


GRU_GATES = ("resetGate", "outputGate", "updateGate")
"""Gates in the order in which MIL stacks their weights."""


@layer("simpleRecurrent", inputs=(1, 2))
def simple_recurrent(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """Build a layer whose state is h = activation(W x + R h + b)."""
    size, hidden = int(params.inputVectorSize), int(params.outputVectorSize)
    weights = Weights(
        ctx.weights(params.weightMatrix, (hidden, size), "weightMatrix"),
        ctx.weights(params.recursionMatrix, (hidden, hidden), "recursionMatrix"),
        ctx.weights(params.biasVector, (hidden,), "biasVector") if params.hasBiasVector else None,
    )

    (act,) = activations(ctx, [params.activation], 1)

    def step(row: Var, states: States) -> States:
        total = mb.add(x=row, y=mb.linear(x=states[0], weight=weights.hh))
        return (_activate(ctx, act, total),)

    direction = Direction(weights, [name_of(act)], step, params.reverseInput)
    return _one_state(ctx, params, inputs, direction, "rnn", ["activation"])


@layer("gru", inputs=(1, 2))
def gru(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """Build a layer whose state is h = (1 - z) o + z h, with o = activation(W x + R (r h) + b).

    r is the reset gate, z the update gate; `GRU_GATES` calls o the output gate.
    """
    size, hidden = int(params.inputVectorSize), int(params.outputVectorSize)
    weights = stacked(ctx, params, GRU_GATES, size, hidden, params.hasBiasVectors)
    gate, act = activations(ctx, params.activations, 2)
    r_hh, o_hh, z_hh = np.split(weights.hh, 3)

    def step(row: Var, states: States) -> States:
        (h,) = states
        x_r, x_o, x_z = mb.split(x=row, num_splits=3, axis=-1)
        r = _activate(ctx, gate, mb.add(x=x_r, y=mb.linear(x=h, weight=r_hh)))
        z = _activate(ctx, gate, mb.add(x=x_z, y=mb.linear(x=h, weight=z_hh)))
        reset = mb.linear(x=mb.mul(x=r, y=h), weight=o_hh)
        o = _activate(ctx, act, mb.add(x=x_o, y=reset))
        return (mb.add(x=mb.mul(x=mb.sub(x=np.float32(1), y=z), y=o), y=mb.mul(x=z, y=h)),)

    direction = Direction(weights, [name_of(gate), name_of(act)], step, params.reverseInput)
    return _one_state(ctx, params, inputs, direction, "gru", ["recurrent_activation", "activation"])


def _one_state(
    ctx: Context, params: Any, inputs: list[Var], direction: Direction, op_type: str, roles: Sequence[str]
) -> list[Var]:
    """Build a layer with one state, as MIL's op or unrolled; `roles` are the op's inputs for activations."""
    x = sequence(ctx, inputs[0], int(params.inputVectorSize))
    (h,) = initial_states(ctx, inputs[1:], x, int(params.outputVectorSize), 1)
    if all(direction.names):
        weights = direction.weights
        y, last = getattr(mb, op_type)(
            x=x,
            initial_h=h,
            weight_ih=weights.ih,
            weight_hh=weights.hh,
            bias=weights.bias,
            direction="reverse" if direction.backward else "forward",
            output_sequence=params.sequenceOutput,
            **dict(zip(roles, direction.names, strict=True)),
        )
        return outputs(ctx, y, [last])
    rows, states = unrolled(ctx, x, (h,), direction)
    return outputs(ctx, joined(rows, params.sequenceOutput), states)


CLIP = 50.0
"""Bound of the cell state where none is stated (builder of coremltools, `add_unilstm`)."""
SYMMETRIC = ("sigmoid", "hard_sigmoid")
"""Activations with f(-x) = 1 - f(x)."""
ROLES = ("recurrent_activation", "cell_activation", "activation")
"""Inputs of MIL's `lstm` for the activations of the gates, of the cell input, and of the cell output."""


@layer("uniDirectionalLSTM", inputs=(1, 3))
def uni_directional(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """Build the outputs [y, h, c] of one direction."""
    direction = _lstm_direction(ctx, params, params.weightParams, params.activations, bool(params.reverseInput))
    return _lstm(ctx, params, inputs, [direction])


@layer("biDirectionalLSTM", inputs=(1, 5))
def bi_directional(ctx: Context, params: Any, inputs: list[Var]) -> list[Var]:
    """Build the outputs [y, h, c, backward h, backward c]; y holds both directions, concatenated."""
    if len(params.weightParams) != 2:
        raise ctx.error(f"has weights for {len(params.weightParams)} directions, not 2; export the model again")
    kinds = (params.activationsForwardLSTM, params.activationsBackwardLSTM)
    forward, backward = (
        _lstm_direction(ctx, params, stored, messages, is_backward)
        for stored, messages, is_backward in zip(params.weightParams, kinds, (False, True), strict=True)
    )
    return _lstm(ctx, params, inputs, [forward, backward])


def _lstm_direction(ctx: Context, params: Any, stored: Any, messages: Any, backward: bool) -> Direction:
    """Return one direction of an LSTM from its stored weights and the messages of its three activations."""
    kinds = activations(ctx, messages, 3)
    names = [name_of(a) for a in kinds]
    weights = _lstm_weights(ctx, params, stored, names[0])
    return Direction(weights, names, _lstm_step(ctx, params, weights, kinds), backward)


def _computes_forget_gate(params: Any, gate: str | None) -> bool:
    """Is the forget gate coupled, and computed as 1 - i since negated weights would not give that?"""
    return bool(params.params.coupledInputAndForgetGate) and gate not in SYMMETRIC


def _lstm_weights(ctx: Context, params: Any, stored: Any, gate: str | None) -> Weights:
    """Return the weights of one direction; `gate` is MIL's name of the activation of its gates."""
    options = params.params
    coupled = options.coupledInputAndForgetGate
    hidden = int(params.outputVectorSize)
    gates = ("inputGate", "inputGate" if coupled else "forgetGate", "outputGate", "blockInput")
    weights = stacked(ctx, stored, gates, int(params.inputVectorSize), hidden, options.hasBiasVectors)
    bias = weights.bias
    if options.forgetBias and not coupled:
        bias = np.zeros(4 * hidden, np.float32) if bias is None else bias.copy()
        bias[hidden : 2 * hidden] += 1
    peephole = None
    if options.hasPeepholeVectors:
        names = [f"{gate}PeepholeVector" for gate in gates[:3]]
        vectors = [ctx.weights(getattr(stored, n), (hidden,), n) for n in names]
        peephole = np.concatenate(vectors)
    weights = replace(weights, bias=bias, peephole=peephole)
    return _with_negated_forget_gate(weights, hidden) if coupled and gate in SYMMETRIC else weights


def _with_negated_forget_gate(weights: Weights, hidden: int) -> Weights:
    """Return the weights with those of the forget gate, the second of the gates, negated."""

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


def _cell_bound(params: Any) -> float:
    return float(params.params.cellClipThreshold) or CLIP


def _lstm_step(ctx: Context, params: Any, weights: Weights, kinds: Sequence[Any]) -> Step:
    """Return what builds one step; `kinds` are the activations of gates, cell input and cell output."""
    gate, cell_in, cell_out = kinds
    p_i, p_f, p_o = (None,) * 3 if weights.peephole is None else np.split(weights.peephole, 3)
    computes_forget_gate = _computes_forget_gate(params, name_of(gate))
    bound = _cell_bound(params)

    def activated_gate(total: Var, peephole: Array | None, c: Var) -> Var:
        if peephole is not None:
            total = mb.add(x=total, y=mb.mul(x=c, y=peephole))
        return _activate(ctx, gate, total)

    def step(row: Var, states: States) -> States:
        h, c = states
        total = mb.add(x=row, y=mb.linear(x=h, weight=weights.hh))
        x_i, x_f, x_o, x_z = mb.split(x=total, num_splits=4, axis=-1)
        i = activated_gate(x_i, p_i, c)
        f = mb.sub(x=np.float32(1), y=i) if computes_forget_gate else activated_gate(x_f, p_f, c)
        z = _activate(ctx, cell_in, x_z)
        c = mb.add(x=mb.mul(x=f, y=c), y=mb.mul(x=i, y=z))
        c = mb.clip(x=c, alpha=np.float32(-bound), beta=np.float32(bound))
        return mb.mul(x=activated_gate(x_o, p_o, c), y=_activate(ctx, cell_out, c)), c

    return step


def _lstm(ctx: Context, params: Any, inputs: list[Var], directions: Sequence[Direction]) -> list[Var]:
    """Build the outputs of an LSTM, as MIL's op or unrolled; a second direction is the backward one."""
    x = sequence(ctx, inputs[0], int(params.inputVectorSize))
    states = initial_states(ctx, inputs[1:], x, int(params.outputVectorSize), 2 * len(directions))
    whole_sequence = params.params.sequenceOutput
    names = directions[0].names
    if all(names) and names == directions[-1].names and not _computes_forget_gate(params, names[0]):
        return outputs(ctx, *_lstm_op(x, states, directions, whole_sequence, _cell_bound(params)))
    ys: list[Var] = []
    last_states: list[Var] = []
    for direction, h, c in zip(directions, states[::2], states[1::2], strict=True):
        rows, last = unrolled(ctx, x, (h, c), direction)
        last_states += last
        in_order = len(directions) == 2 and direction.backward and whole_sequence
        ys.append(joined(rows[::-1] if in_order else rows, whole_sequence))
    y = mb.concat(values=ys, axis=-1) if len(ys) > 1 else ys[0]
    return outputs(ctx, y, last_states)


def _lstm_op(
    x: Var, states: list[Var], directions: Sequence[Direction], whole_sequence: bool, bound: float
) -> tuple[Var, list[Var]]:
    """Build MIL's op, and return y and the last states.

    Args:
        x: [sequence, batch, size].
        states: [h, c] or, of two directions, [h, c, backward h, backward c]; the last states come so too.
        directions: one, or the forward and the backward one.
        whole_sequence: does y hold all steps, or the last one?
        bound: of the cell state.
    """
    weights, mode = directions[0].weights, "reverse" if directions[0].backward else "forward"
    backward_weights = {}
    if len(directions) == 2:
        mode, back = "bidirectional", directions[1].weights
        backward_weights = {
            "weight_ih_back": back.ih,
            "weight_hh_back": back.hh,
            "bias_back": back.bias,
            "peephole_back": back.peephole,
        }
        h, c = (mb.concat(values=both, axis=-1) for both in (states[::2], states[1::2]))
    else:
        h, c = states
    y, h, c = mb.lstm(
        x=x,
        initial_h=h,
        initial_c=c,
        weight_ih=weights.ih,
        weight_hh=weights.hh,
        bias=weights.bias,
        peephole=weights.peephole,
        direction=mode,
        output_sequence=whole_sequence,
        clip=np.float32(bound),
        **dict(zip(ROLES, directions[0].names, strict=True)),
        **backward_weights,
    )
    if len(directions) == 1:
        return y, [h, c]
    (h, h_back), (c, c_back) = (mb.split(x=s, num_splits=2, axis=-1) for s in (h, c))
    return y, [h, c, h_back, c_back]


ACTIVATIONS = {
    "linear": ("linear_activation", ("alpha", "beta")),
    "ReLU": ("relu", ()),
    "leakyReLU": ("leaky_relu", ("alpha",)),
    "tanh": ("tanh", ()),
    "scaledTanh": ("scaled_tanh", ("alpha", "beta")),
    "sigmoid": ("sigmoid", ()),
    "sigmoidHard": ("sigmoid_hard", ("alpha", "beta")),
    "ELU": ("elu", ("alpha",)),
    "softsign": ("softsign", ()),
    "softplus": ("softplus", ()),
    "thresholdedReLU": ("thresholded_relu", ("alpha",)),
}
"""Activation without weights -> the MIL op, and the parameters that both have."""

CHANNEL_ACTIVATIONS = {
    "PReLU": ("prelu", ("alpha",)),
    "parametricSoftplus": ("softplus_parametric", ("alpha", "beta")),
}
"""Activation with weights for each channel -> the MIL op, and the weights."""

GELU = {0: "EXACT", 1: "TANH_APPROXIMATION", 2: "SIGMOID_APPROXIMATION"}


def _activate(ctx: Context, params: Any, x: Var) -> Var:
    """Build the activation that an `ActivationParams` message describes.

    Raises:
        LoadError: it describes none, or its weights do not fit the channels.
    """
    kind = params.WhichOneof("NonlinearityType")
    if kind in ACTIVATIONS:
        op_type, names = ACTIVATIONS[kind]
        inner = getattr(params, kind)
        return getattr(mb, op_type)(x=x, **{name: np.float32(getattr(inner, name)) for name in names})
    if kind in CHANNEL_ACTIVATIONS:
        op_type, names = CHANNEL_ACTIVATIONS[kind]
        image, back = _with_channels(ctx, x)
        inner = getattr(params, kind)
        weights = {name: _channel_weights(ctx, getattr(inner, name), image, name) for name in names}
        return back(getattr(mb, op_type)(x=image, **weights))
    raise ctx.error("has no activation that is known; upgrade coremltools, or export the model again")


def _with_channels(ctx: Context, x: Var) -> tuple[Var, Callable[[Var], Var]]:
    """Build a value as (batch, channel, height, width), and return it with what undoes that.

    The channel of a value with two axes is the last one. The specification asks for three axes, but converters
    write such layers after matrix products.
    """
    if x.rank > 2:
        return ctx.images(x)
    axes = [2, 3] if x.rank == 2 else [0, 2, 3]
    return mb.expand_dims(x=x, axes=axes), lambda y: mb.squeeze(x=y, axes=axes)


def _channel_weights(ctx: Context, params: Any, image: Var, name: str) -> Array:
    """Return a weight for each channel; the file may hold a single one for all."""
    (channels,) = ctx.shape(image, [1])
    bits = 8 * len(params.rawValue)
    single = (
        len(params.floatValue) == 1
        or len(params.float16Value) == 2
        or 0 < bits < channels * params.quantization.numberOfBits
    )
    return np.broadcast_to(ctx.weights(params, [1 if single else channels], name), channels).copy()


layer("activation")(lambda ctx, params, inputs: _activate(ctx, params, inputs[0]))
layer("clip")(
    lambda ctx, params, inputs: mb.clip(
        x=inputs[0], alpha=np.float32(params.minVal), beta=np.float32(params.maxVal)
    )
)
layer("clampedReLU")(
    lambda ctx, params, inputs: mb.clamped_relu(
        x=inputs[0], alpha=np.float32(params.alpha), beta=np.float32(params.beta)
    )
)
layer("gelu")(lambda ctx, params, inputs: mb.gelu(x=inputs[0], mode=GELU[params.mode]))

"""Recurrent layers against their equations in numpy, and against torch: gates, ways, states, activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from layer_case import assert_near

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.mil import Array, quiet_host, walk_ops
from anesurgery.neuralnetwork.importing import import_network

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder

S, B, N, H = 4, 2, 3, 5
FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "TANH": np.tanh,
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "SIGMOID_HARD": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "RELU": lambda x: np.maximum(x, 0),
    "LINEAR": lambda x: x,
    "SCALED_TANH": lambda x: 1.7159 * np.tanh(2 / 3 * x),
}


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(0.6)


def weights(gates: int, seed: int) -> dict[str, list[Array]]:
    kinds = {"W_x": (H, N), "W_h": (H, H), "b": (H,), "peep": (H,)}
    return {
        kind: [floats(*shape, seed=seed + 10 * g + k) for g in range(gates)]
        for k, (kind, shape) in enumerate(kinds.items())
    }


def sequence(seed: int = 1) -> Array:
    return floats(S, B, N, 1, 1, seed=seed)


def state(seed: int) -> Array:
    return floats(1, B, H, 1, 1, seed=seed)


def built(inputs: dict[str, Array], outputs: list[str], fill: Any, legacy: bool = False) -> Any:
    builder = NeuralNetworkBuilder(
        [(n, datatypes.Array(*v.shape)) for n, v in inputs.items()],
        [(n, None) for n in outputs],
        disable_rank5_shape_mapping=not legacy,
    )
    fill(builder)
    return builder.spec


def compare(spec: Any, inputs: dict[str, Array], expected: dict[str, Array]) -> None:
    found = ane.run(import_network(spec), inputs)
    for name, value in expected.items():
        assert_near(found[name], value.reshape(found[name].shape))


def op_types(spec: Any) -> set[str]:
    return {op.op_type for op in walk_ops(import_network(spec).program)}


def lstm(
    x: Array,
    h: Array,
    c: Array,
    w: dict[str, Any],
    acts: tuple[str, str, str],
    *,
    peep: bool,
    bias: bool,
    forget_bias: bool,
    coupled: bool,
    clip: float,
    back: bool,
) -> tuple[Array, Array, Array]:
    """The equations of the layer, in float64."""
    f, g, k = (FUNCTIONS[a] for a in acts)
    wx, wh, b, p = ([v.astype(np.float64) for v in w[n]] for n in ("W_x", "W_h", "b", "peep"))
    b = [v if bias else 0 * v for v in b]
    p = [v if peep else 0 * v for v in p]
    h, c = h.reshape(B, H).astype(np.float64), c.reshape(B, H).astype(np.float64)
    made = []
    for row in x.reshape(S, B, N)[:: -1 if back else 1].astype(np.float64):
        i, fo, o, z = (row @ wx[n].T + h @ wh[n].T + b[n] for n in range(4))
        gate_i = f(i + p[0] * c)
        gate_f = 1 - gate_i if coupled else f(fo + p[1] * c + (1 if forget_bias else 0))
        c = np.clip(gate_f * c + gate_i * g(z), -clip, clip)
        h = f(o + p[2] * c) * k(c)
        made.append(h)
    return np.stack(made), h, c


DEFAULT = ("SIGMOID", "TANH", "TANH")
LSTMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"output_all": True},
    "reversed": {"output_all": True, "reverse_input": True},
    "without_bias": {"bias": False},
    "peepholes": {"peep": True, "output_all": True},
    "forget_bias": {"forget_bias": True},
    "forget_bias_alone": {"forget_bias": True, "bias": False},
    "coupled": {"coupled_input_forget_gate": True, "peep": True, "output_all": True},
    "coupled_hard": {"coupled_input_forget_gate": True, "acts": ("SIGMOID_HARD", "TANH", "TANH")},
    "coupled_tanh": {"coupled_input_forget_gate": True, "acts": ("TANH", "TANH", "TANH")},
    "clipped": {"cell_clip_threshold": 0.3, "output_all": True},
    "relu": {"acts": ("SIGMOID_HARD", "RELU", "LINEAR"), "output_all": True},
    "written_out": {"acts": ("SIGMOID", "SCALED_TANH", "TANH"), "peep": True, "output_all": True},
    "written_out_reversed": {"acts": ("SIGMOID", "SCALED_TANH", "TANH"), "reverse_input": True},
    "written_out_clipped": {"acts": ("SIGMOID", "SCALED_TANH", "TANH"), "cell_clip_threshold": 0.2},
}


def scaled(spec: Any) -> Any:
    """With a scaled tanh that MIL has not; the builder states no parameters for any activation."""
    for layer in spec.neuralNetwork.layers:
        params = getattr(layer, layer.WhichOneof("layer"))
        kinds = [params.activation] if hasattr(params, "activation") else []
        for name in ("activations", "activationsForwardLSTM", "activationsBackwardLSTM"):
            kinds += list(getattr(params, name, []))
        for kind in kinds:
            if kind.WhichOneof("NonlinearityType") == "scaledTanh":
                kind.scaledTanh.alpha, kind.scaledTanh.beta = 1.7159, 2 / 3
    return spec


def options(case: dict[str, Any], w: dict[str, list[Array]]) -> dict[str, Any]:
    """The keywords of the builder for a case."""
    acts = case.get("acts", DEFAULT)
    names = ("inner_activation", "cell_state_update_activation", "output_activation")
    plain = {k: v for k, v in case.items() if k not in ("acts", "peep", "bias")}
    return {
        "W_h": w["W_h"],
        "W_x": w["W_x"],
        "b": w["b"] if case.get("bias", True) else None,
        "peep": w["peep"][:3] if case.get("peep") else None,
        "hidden_size": H,
        "input_size": N,
        **dict(zip(names, acts, strict=True)),
        **plain,
    }


def reference(case: dict[str, Any], x: Array, h: Array, c: Array, w: Any, back: bool) -> Any:
    return lstm(
        x,
        h,
        c,
        w,
        case.get("acts", DEFAULT),
        peep=bool(case.get("peep")),
        bias=case.get("bias", True),
        forget_bias=bool(case.get("forget_bias")),
        coupled=bool(case.get("coupled_input_forget_gate")),
        clip=case.get("cell_clip_threshold", 50000.0),
        back=back,
    )


@pytest.mark.one_of(5)
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", LSTMS)
def test_lstm_follows_its_equations(name: str, legacy: bool) -> None:
    case, w = LSTMS[name], weights(4, 100)
    inputs = {"x": sequence(), "h0": state(2), "c0": state(3)}
    spec = scaled(
        built(
            inputs,
            ["y", "h", "c"],
            lambda b: b.add_unilstm(
                "l", input_names=["x", "h0", "c0"], output_names=["y", "h", "c"], **options(case, w)
            ),
            legacy,
        )
    )
    rows, h, c = reference(case, inputs["x"], inputs["h0"], inputs["c0"], w, bool(case.get("reverse_input")))
    y = rows if case.get("output_all") else rows[-1:]
    compare(spec, inputs, {"y": y, "h": h, "c": c})
    written = "written_out" in name or name == "coupled_tanh"
    assert ("lstm" in op_types(spec)) is not written


@pytest.mark.parametrize("name", ["plain", "sequence", "peepholes", "coupled", "written_out"])
def test_two_directions_follow_their_equations(name: str) -> None:
    case, w, back = LSTMS[name], weights(4, 100), weights(4, 300)
    states = {n: state(i) for i, n in enumerate(["h0", "c0", "h1", "c1"])}
    inputs = {"x": sequence(), **states}
    outputs = ["y", "h", "c", "hb", "cb"]
    keywords = options(case, w)
    keywords |= {
        "W_h_back": back["W_h"],
        "W_x_back": back["W_x"],
        "b_back": back["b"],
        "peep_back": back["peep"][:3] if case.get("peep") else None,
    }
    spec = scaled(
        built(
            inputs,
            outputs,
            lambda b: b.add_bidirlstm("l", input_names=list(inputs), output_names=outputs, **keywords),
        )
    )
    rows, h, c = reference(case, inputs["x"], states["h0"], states["c0"], w, False)
    rows_b, hb, cb = reference(case, inputs["x"], states["h1"], states["c1"], back, True)
    if case.get("output_all"):
        y = np.concatenate([rows, rows_b[::-1]], -1)
    else:
        y = np.concatenate([rows[-1:], rows_b[-1:]], -1)
    compare(spec, inputs, {"y": y, "h": h, "c": c, "hb": hb, "cb": cb})


def test_absent_states_are_zero_and_outputs_optional() -> None:
    w, x = weights(4, 100), sequence()
    spec = built(
        {"x": x},
        ["y"],
        lambda b: b.add_unilstm("l", input_names=["x"], output_names=["y"], **options(LSTMS["sequence"], w)),
    )
    rows, _, _ = reference(LSTMS["sequence"], x, 0 * state(0), 0 * state(0), w, False)
    compare(spec, {"x": x}, {"y": rows})


def test_a_bound_that_is_absent_is_50() -> None:
    w = {k: [200 * v for v in each] for k, each in weights(4, 100).items()}
    case = {"acts": ("SIGMOID", "LINEAR", "LINEAR"), "output_all": True}
    x = sequence()
    spec = built(
        {"x": x}, ["y"], lambda b: b.add_unilstm("l", input_names=["x"], output_names=["y"], **options(case, w))
    )
    spec.neuralNetwork.layers[0].uniDirectionalLSTM.params.ClearField("cellClipThreshold")
    with np.errstate(over="ignore"):
        rows, _, _ = reference(case | {"cell_clip_threshold": 50.0}, x, 0 * state(0), 0 * state(0), w, False)
    assert rows.max() == 50
    compare(spec, {"x": x}, {"y": rows})


GRUS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sequence": {"output_all": True},
    "reversed": {"output_all": True, "reverse_input": True},
    "without_bias": {"bias": False},
    "sigmoid": {"inner_activation": "SIGMOID", "activation": "RELU"},
    "written_out": {"activation": "SCALED_TANH", "output_all": True},
}


@pytest.mark.parametrize("name", GRUS)
def test_gru_follows_its_equations(name: str) -> None:
    case, w = GRUS[name], weights(3, 100)
    inputs = {"x": sequence(), "h0": state(2)}
    keywords = {k: v for k, v in case.items() if k != "bias"}
    bias = w["b"] if case.get("bias", True) else None
    spec = scaled(
        built(
            inputs,
            ["y", "h"],
            lambda b: b.add_gru("g", w["W_h"], w["W_x"], bias, H, N, ["x", "h0"], ["y", "h"], **keywords),
        )
    )
    f = FUNCTIONS[case.get("inner_activation", "SIGMOID_HARD")]
    g = FUNCTIONS[case.get("activation", "TANH")]
    h = inputs["h0"].reshape(B, H).astype(np.float64)
    made = []
    for row in inputs["x"].reshape(S, B, N)[:: -1 if case.get("reverse_input") else 1]:
        z, r, o = (row @ w["W_x"][n].T + (w["b"][n] if bias else 0) for n in range(3))
        z, r = f(z + h @ w["W_h"][0].T), f(r + h @ w["W_h"][1].T)
        h = (1 - z) * g(o + (r * h) @ w["W_h"][2].T) + z * h
        made.append(h)
    y = np.stack(made) if case.get("output_all") else made[-1][None]
    compare(spec, inputs, {"y": y, "h": h})
    assert ("gru" in op_types(spec)) is (name != "written_out")


@pytest.mark.parametrize("activation", sorted(FUNCTIONS))
@pytest.mark.parametrize("back", [False, True])
def test_simple_recurrent_follows_its_equation(activation: str, back: bool) -> None:
    w = weights(1, 100)
    inputs = {"x": sequence(), "h0": state(2)}
    spec = scaled(
        built(
            inputs,
            ["y", "h"],
            lambda b: b.add_simple_rnn(
                "r",
                w["W_h"][0],
                w["W_x"][0],
                w["b"][0],
                H,
                N,
                activation,
                ["x", "h0"],
                ["y", "h"],
                output_all=True,
                reverse_input=back,
            ),
        )
    )
    h, made = inputs["h0"].reshape(B, H), []
    for row in inputs["x"].reshape(S, B, N)[:: -1 if back else 1]:
        h = FUNCTIONS[activation](row @ w["W_x"][0].T + h @ w["W_h"][0].T + w["b"][0])
        made.append(h)
    compare(spec, inputs, {"y": np.stack(made), "h": h})


def test_lstm_agrees_with_torch() -> None:
    module = torch.nn.LSTM(N, H, bidirectional=True)
    order = [0, 1, 3, 2]  # torch has the gates i, f, z, o
    found: dict[str, list[Array]] = {}
    for way in ("", "_reverse"):
        p = {
            n: getattr(module, f"{n}_l0{way}").detach().numpy()
            for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        found["x" + way] = [np.split(p["weight_ih"], 4)[g] for g in order]
        found["h" + way] = [np.split(p["weight_hh"], 4)[g] for g in order]
        found["b" + way] = [np.split(p["bias_ih"] + p["bias_hh"], 4)[g] for g in order]
    x = sequence()
    spec = built(
        {"x": x},
        ["y"],
        lambda b: b.add_bidirlstm(
            "l",
            found["h"],
            found["x"],
            found["b"],
            found["h_reverse"],
            found["x_reverse"],
            found["b_reverse"],
            H,
            N,
            ["x"],
            ["y"],
            output_all=True,
        ),
    )
    with torch.no_grad():
        expected = module(torch.from_numpy(x.reshape(S, B, N)))[0].numpy()
    compare(spec, {"x": x}, {"y": expected})


def test_numbers_of_an_image_are_one_step() -> None:
    w, x = weights(4, 100), floats(1, B, 1, 1, N, seed=1)
    spec = built(
        {"x": x}, ["y"], lambda b: b.add_unilstm("l", input_names=["x"], output_names=["y"], **options({}, w))
    )
    h = ane.run(import_network(spec), {"x": x})["y"]
    flat = ane.run(
        import_network(
            built(
                {"x": x.reshape(1, B, N, 1, 1)},
                ["y"],
                lambda b: b.add_unilstm("l", input_names=["x"], output_names=["y"], **options({}, w)),
            )
        ),
        {"x": x.reshape(1, B, N, 1, 1)},
    )["y"]
    np.testing.assert_array_equal(h, flat)


def break_gates(params: Any) -> None:
    del params.activations[2]


def break_weights(params: Any) -> None:
    del params.weightParams.forgetGateRecursionMatrix.floatValue[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (break_gates, r"layer 'l' \(uniDirectionalLSTM\): has 2 activations, expected 3"),
        (break_weights, "layer 'l' .*forgetGateRecursionMatrix has 24 numbers, expected 25"),
    ],
)
def test_damaged_layers_are_explained(change: Any, words: str) -> None:
    x = sequence()
    spec = built(
        {"x": x},
        ["y"],
        lambda b: b.add_unilstm("l", input_names=["x"], output_names=["y"], **options({}, weights(4, 100))),
    )
    change(spec.neuralNetwork.layers[0].uniDirectionalLSTM)
    with pytest.raises(LoadError, match=words):
        import_network(spec)


def test_an_input_of_another_size_is_explained() -> None:
    x = floats(S, B, N + 1, 1, 1)
    spec = built(
        {"x": x},
        ["y"],
        lambda b: b.add_unilstm("l", input_names=["x"], output_names=["y"], **options({}, weights(4, 100))),
    )
    with pytest.raises(LoadError, match="layer 'l' .*takes 3 numbers at each step, but its input has 4"):
        import_network(spec)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("shape", [(B, H, 1, 1, 1), (1, B, H, 1, 1), (1, 1, B, H, 1)])
@pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
def test_states_are_read_flat(kind: str, shape: tuple[int, ...], legacy: bool) -> None:
    """Of whatever shape: converters of coremltools write that of a simple one as (batch, hidden, 1, 1, 1)."""
    names = {"rnn": ["x", "h0"], "gru": ["x", "h0"], "lstm": ["x", "h0", "c0"]}[kind]
    w = weights({"rnn": 1, "gru": 3, "lstm": 4}[kind], 100)

    def fill(b: Any) -> None:
        if kind == "lstm":
            b.add_unilstm("l", input_names=names, output_names=["y"], **options({}, w))
        elif kind == "gru":
            b.add_gru("l", w["W_h"], w["W_x"], w["b"], H, N, names, ["y"])
        else:
            b.add_simple_rnn("l", w["W_h"][0], w["W_x"][0], w["b"][0], H, N, "TANH", names, ["y"])

    usual = {"x": sequence()} | {n: state(i) for i, n in enumerate(names[1:])}
    other = {n: v.reshape(shape) if n != "x" else v for n, v in usual.items()}
    wanted = ane.run(import_network(built(usual, ["y"], fill, legacy)), usual)
    compare(built(other, ["y"], fill, legacy), other, wanted)


def test_states_of_another_size_are_refused() -> None:
    inputs = {"x": sequence(), "h0": floats(1, B, H + 1, 1, 1)}
    w = weights(3, 100)
    spec = built(inputs, ["y"], lambda b: b.add_gru("g", w["W_h"], w["W_x"], w["b"], H, N, ["x", "h0"], ["y"]))
    with pytest.raises(LoadError, match=rf"initial state of {B * (H + 1)} numbers, takes {B} x {H}"):
        import_network(spec)


def test_states_come_together() -> None:
    inputs = {"x": sequence(), "h0": state(1)}
    spec = built(
        inputs,
        ["y"],
        lambda b: b.add_unilstm(
            "l", input_names=["x", "h0"], output_names=["y"], **options({}, weights(4, 100))
        ),
    )
    with pytest.raises(LoadError, match="layer 'l' .*has 2 inputs, takes 1 or 3"):
        import_network(spec)

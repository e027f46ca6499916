"""Real networks upgraded as a new user does it: saved, loaded again, run, and compared with what they were."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from closeness import assert_close

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files.package import read_spec
from anesurgery.files.protobuf import proto
from anesurgery.mil import Var, ct, mb, quiet_host
from anesurgery.network_editing.upgrade import NOTES

Kind = proto.FeatureTypes_pb2.ArrayFeatureType.ArrayDataType
DOUBLES = "64 bit floats became 32 bit floats"
FIVE = "the rank 5 mapping (sequence, batch, channel, height, width) has ended"


def swish(context: Any, params: Any, inputs: list[Var]) -> Var:
    made: Var = mb.silu(x=inputs[0])
    return made


def crop(context: Any, params: Any, inputs: list[Var]) -> Var:
    x = inputs[0]
    kept, cut = [True] * (x.rank - 2) + [False] * 2, [0] * (x.rank - 2)
    made: Var = mb.slice_by_index(x=x, begin=[*cut, 2, 2], end=[*cut, -2, -2], begin_mask=kept, end_mask=kept)
    return made


def rescale(context: Any, params: Any, inputs: list[Var]) -> Var:
    made: Var = mb.mul(x=mb.add(x=inputs[0], y=np.float32(1)), y=np.float32(127.5))
    return made


@dataclass(frozen=True)
class Real:
    """A network of the corpus, and what its upgrade tells."""

    notes: tuple[str, ...] = ()
    """How the notes begin."""
    custom: dict[str, Callable[..., Any]] | None = None


STATES = "input 'decoder_lstm_{}_in' is optional: when it is absent, it is 0"
REAL = {
    "blazeface_scaled": Real(("'1477' is called '_1477'", "'1011' is called '_1011'")),
    "custom_swish_mcneural": Real((FIVE, f"{DOUBLES}: output"), {"Swish": swish}),
    "mlc_edsr_f32b5": Real(),
    "mlt_es2en_char_decoder16": Real((FIVE, DOUBLES, STATES.format("h"), STATES.format("c"))),
    "mlt_gesture_classifier": Real(
        (FIVE, DOUBLES, "input 'hiddenIn' is optional", "input 'cellIn' is optional")
    ),
    "packt_starrynight": Real(custom={"ResCropBlockLambda": crop, "RescaleOutputLambda": rescale}),
    "pose_cpm": Real((FIVE, DOUBLES)),
    "sinet_portrait_seg": Real(("'input.54' is called 'input_54'", "'1390' is called '_1390'")),
    "waifu2x_anime_noise0": Real((FIVE, f"{DOUBLES}: input, conv7")),
}


def names(old: Any) -> dict[str, str]:
    """Names as MIL takes them, for those of these models."""
    found = [f.name for f in (*old.description.input, *old.description.output)]
    return {n: re.sub(r"^(?=\d)", "_", n.replace(".", "_")) for n in found}


def expected_description(old: Any, notes: list[str]) -> Any:
    """The description of the network with the changes that an upgrade may make, and no others."""
    wanted = type(old.description)()
    wanted.CopyFrom(old.description)
    for feature in (*wanted.input, *wanted.output):
        feature.name = names(old)[feature.name]
        if feature.type.WhichOneof("Type") == "multiArrayType":
            array = feature.type.multiArrayType
            array.dataType = Kind.Value("FLOAT32")
            if feature.type.isOptional:
                array.floatDefaultValue = 0
    if notes:
        wanted.metadata.userDefined[NOTES] = "\n".join(notes)
    return wanted


def same(a: Any, b: Any) -> None:
    if isinstance(a, np.ndarray):
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b


def test_each_network_of_the_corpus_is_here(corpus: Path) -> None:
    found = {path.stem for path in corpus.glob("*.mlmodel")}
    assert found == REAL.keys() | {"exermote", "nnv2_simple_layer"}, (
        "what cannot be upgraded has a test of its own"
    )


def test_a_sequence_that_is_too_short_for_its_convolutions_is_named(corpus: Path) -> None:
    """Its first convolution runs along the sequence, of which the file does not say how long it is."""
    with pytest.raises(
        LoadError, match=r"layer 'accelerations' \(convolution\): does not fit its inputs of shape"
    ):
        ane.upgrade(corpus / "exermote.mlmodel")


GATES = ("input", "forget", "output", "blockInput")


def lstm(x: Any, params: Any) -> Any:
    """Every output of an LSTM with hard sigmoid gates by the formulas of the format; x is (steps, size).

    The file states no parameters of the hard sigmoid, which are then 0.2 and 0.5.
    """
    weights = params.weightParams

    def gate(*fields: str) -> tuple[Any, Any, Any]:
        w, r, b = (np.array(getattr(weights, field).floatValue) for field in fields)
        return w.reshape(len(b), -1), r.reshape(len(b), -1), b

    parts = ("WeightMatrix", "RecursionMatrix", "BiasVector")
    gates = {n: gate(*(f"{n}{'Gate' if n != 'blockInput' else ''}{p}" for p in parts)) for n in GATES}
    h = c = np.zeros(params.outputVectorSize)
    made = []
    for step in x:
        i, f, o, z = (w @ step + r @ h + b for w, r, b in gates.values())
        i, f, o = (np.clip(0.2 * v + 0.5, 0, 1) for v in (i, f + params.params.forgetBias, o))
        c = f * c + i * np.tanh(z)
        h = o * np.tanh(c)
        made.append(h)
    return np.array(made)


def test_a_sequence_of_a_given_length(corpus: Path) -> None:
    """A Keras network of convolutions and LSTMs along 40 steps, against its formulas in fp64."""
    path = corpus / "exermote.mlmodel"
    layers = {layer.name: layer for layer in read_spec(path).neuralNetwork.layers}
    x = np.random.default_rng(0).standard_normal((40, 12))
    y = x
    for name, stride in (("accelerations", 2), ("conv1d_1", 1)):
        params = layers[name].convolution
        kernel = np.reshape(params.weights.floatValue, (32, -1, 3))
        windows = np.stack([y[k : len(y) - 2 + k : stride] for k in range(3)], -1)
        y = np.maximum(np.einsum("tck,ock->to", windows, kernel) + np.array(params.bias.floatValue), 0)
    for name in ("lstm_1", "lstm_2"):
        y = lstm(y, layers[name].uniDirectionalLSTM)
    dense = layers["dense_1"].innerProduct
    logits = np.reshape(dense.weights.floatValue, (4, 32)) @ y[-1] + np.array(dense.bias.floatValue)
    expected = np.exp(logits) / np.exp(logits).sum()
    model = ane.upgrade(path, sequence=40, precision="fp32")
    found = ane.run(model, {"accelerations": x.reshape(40, 1, 12, 1, 1).astype(np.float32)})["scores"]
    assert_close(found, expected, rtol=1e-5)


def test_a_length_that_makes_no_sense_is_refused(corpus: Path) -> None:
    with pytest.raises(LoadError, match="sequence=0; a sequence has at least 1 step"):
        ane.upgrade(corpus / "exermote.mlmodel", sequence=0)
    with pytest.raises(LoadError, match="sequence= is for the rank 5 mapping"):
        ane.upgrade(corpus / "mlc_edsr_f32b5.mlmodel", sequence=4)


@pytest.mark.quick_cases(
    "custom_swish_mcneural", "mlt_es2en_char_decoder16", "mlt_gesture_classifier", "waifu2x_anime_noise0"
)
@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", REAL)
def test_an_upgrade_keeps_numbers_and_description(name: str, corpus: Path, tmp_path: Path) -> None:
    path, out, real = corpus / f"{name}.mlmodel", tmp_path / "new.mlpackage", REAL[name]
    ane.upgrade(path, custom=real.custom, precision="fp32").save(str(out))
    with quiet_host():
        model = ct.models.MLModel(str(out), skip_model_load=True)
    old, new = read_spec(path), model.get_spec()
    assert new.WhichOneof("Type") == "mlProgram"
    notes = new.description.metadata.userDefined.get(NOTES, "").splitlines()
    assert len(notes) == len(real.notes)
    for found, wanted in zip(notes, real.notes, strict=True):
        assert found.startswith(wanted)
    assert new.description == expected_description(old, notes)
    values = ane.Predictor(out).sample(seed=3)
    made = ane.run(out, values)
    assert all(np.isfinite(v).all() for v in made.values() if isinstance(v, np.ndarray))
    if real.custom is None:
        before = ane.run(path, {n: values[names(old)[n]] for n in (f.name for f in old.description.input)})
        assert [names(old)[n] for n in before] == list(made)
        for a, b in zip(before.values(), made.values(), strict=True):
            same(a, b)


def test_optional_inputs_may_be_left_out_before_and_after(corpus: Path, tmp_path: Path) -> None:
    path, out = corpus / "mlt_es2en_char_decoder16.mlmodel", tmp_path / "new.mlpackage"
    ane.upgrade(path, precision="fp32").save(str(out))
    values = {"encodedChar": ane.Predictor(path).sample()["encodedChar"]}
    zeros = {f"decoder_lstm_{s}_in": np.zeros(256, np.float32) for s in "hc"}
    for found in (ane.run(path, values), ane.run(out, values), ane.run(out, values | zeros)):
        np.testing.assert_array_equal(found["nextCharProbs"], ane.run(path, values)["nextCharProbs"])


def test_labels_are_kept_with_their_probabilities(corpus: Path, tmp_path: Path) -> None:
    path, out = corpus / "mlt_gesture_classifier.mlmodel", tmp_path / "new.mlpackage"
    ane.upgrade(path, precision="fp32").save(str(out))
    labels = list(read_spec(path).neuralNetworkClassifier.stringClassLabels.vector)
    found = ane.run(out, ane.Predictor(out).sample())
    assert list(found["activityProbability"]) == labels
    assert found["activity"] == max(labels, key=found["activityProbability"].__getitem__)


def test_a_custom_layer_is_built_by_the_caller_or_explained(corpus: Path, tmp_path: Path) -> None:
    path = corpus / "custom_swish_mcneural.mlmodel"
    words = r"layer 'swish_1' \(custom\): is a custom layer of class 'Swish', whose code is not in the file; "
    for use in (ane.upgrade, ane.Predictor):
        with pytest.raises(LoadError, match=words + r"say how to build it, upgrade\(model, custom="):
            use(path)
    with pytest.raises(LoadError, match=r"did you mean 'swish'\?"):
        ane.upgrade(path, custom={"swish": swish})
    with pytest.raises(LoadError, match="for class 'Swish' gives a int; let it give MIL values"):
        ane.upgrade(path, custom={"Swish": lambda context, params, inputs: [1]})
    with pytest.raises(LoadError, match=r"'swish_1' \(custom\): does not fit .*: no such thing;"):
        ane.upgrade(path, custom={"Swish": failing})
    spelled = {"Swish": lambda c, p, inputs: mb.mul(x=inputs[0], y=mb.sigmoid(x=inputs[0]))}
    ours, theirs = (ane.upgrade(path, custom=custom) for custom in ({"Swish": swish}, spelled))
    values = ane.Predictor(ours).sample()
    found, expected = (ane.run(model, values)["output"] for model in (ours, theirs))
    assert_close(found, expected, rtol=1e-5)


def failing(context: Any, params: Any, inputs: list[Var]) -> Var:
    raise ZeroDivisionError("no such thing")


def test_the_example_of_the_page_works_on_a_custom_layer(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "neural-networks.md").read_text(encoding="utf-8")
    (example,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.S) if "ane.upgrade" in b)
    shutil.copy(corpus / "custom_swish_mcneural.mlmodel", tmp_path / "old.mlmodel")
    monkeypatch.chdir(tmp_path)
    exec(compile(f"import anesurgery as ane\n{example}", "neural-networks.md", "exec"), {})
    assert sorted(os.listdir(tmp_path)) == ["old.mlmodel", "upgraded.mlpackage"]
    assert DOUBLES in capsys.readouterr().out

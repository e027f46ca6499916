"""Whole models in Core AI: names, states, functions, lengths, weights, and what cannot be moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from classifiers import classifier
from closeness import assert_close
from core_ai_models import needs_core_ai
from coremltools.converters.mil.mil import get_new_symbol

import anesurgery as ane
from anesurgery.commands.app import app
from anesurgery.coreai import running, toolkit
from anesurgery.coreai.lowerings import FORMS, MISSING, MODES, TABLE, Mode
from anesurgery.errors import LoadError, NotExpressible, UnknownName
from anesurgery.examples.example_models import EXAMPLES
from anesurgery.mil import Program, Var, ct, mb, op_types, types

pytestmark = needs_core_ai

CORPUS = Path(__file__).parents[2].parent / "shared" / "corpus"
R = np.random.default_rng(0)
PSNR = 60.0
"""dB that the outputs of a whole model must have, in fp32."""


def agrees(model: Any, path: Path) -> None:
    """Apple's runtime and the interpreter give the same numbers of a sampled input."""
    made = ane.to_coreai(model, path, mode="check")
    predictor = ane.Predictor(model)
    inputs = {name: np.asarray(value) for name, value in predictor.sample().items()}
    outputs, _ = running.run(made.path, inputs)
    for name, wanted in ane.run(model, inputs).items():
        error = np.sqrt(np.mean((outputs[name].astype(np.float64) - wanted) ** 2))
        assert np.isfinite(wanted).all()
        assert error <= np.abs(wanted).max() * 10 ** (-PSNR / 20), name


LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "unet")]


@pytest.mark.parametrize(
    "name", [*sorted(set(EXAMPLES) - {"gpt2", "llama", "whisper", "bert", "unet"}), *LARGE]
)
def test_an_example_means_the_same(name: str, tmp_path: Path) -> None:
    model = ane.example(name, tmp_path / f"model{EXAMPLES[name].suffix}")
    agrees(ane.upgrade(model) if model.suffix == ".mlmodel" else model, tmp_path / "model.aimodel")


@pytest.mark.parametrize("name", ["basic_pitch_nmp", "dtln_aec_128_part2_fp16", "silero_unified_palette_4bit"])
def test_a_published_package_means_the_same(name: str, tmp_path: Path) -> None:
    package = CORPUS / f"{name}.mlpackage"
    if not package.exists():
        pytest.skip(f"{package} is not here")
    agrees(package, tmp_path / "model.aimodel")


def shaped(lengths: Any) -> Program:
    @mb.program(input_specs=[mb.TensorSpec(lengths, types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        y = mb.linear(x=x, weight=np.eye(4, dtype=np.float16) * 2, name="second")
        return mb.softmax(x=y, name="first"), y

    return program


def test_names_order_and_element_types_are_kept(tmp_path: Path) -> None:
    made = ane.to_coreai(shaped((3, 4)), tmp_path / "m.aimodel")
    (signature,) = made.functions.values()
    assert [str(p) for p in signature.inputs] == ["x (3x4 fp16)"]
    assert [str(p) for p in signature.outputs] == ["first (3x4 fp16)", "second (3x4 fp16)"]
    assert "main: x (3x4 fp16) -> first (3x4 fp16), second (3x4 fp16)" in str(made)
    summary = toolkit.authoring.AIModelAsset.load(made.path).summary()
    assert [name for name, _ in summary.function_outputs("main")] == ["first", "second"]
    outputs, _ = running.run(made.path, {"x": np.ones((3, 4))})
    assert outputs["second"].dtype == np.float16


def test_flexible_lengths_are_dynamic(tmp_path: Path) -> None:
    program = shaped((get_new_symbol(), 4))
    made = ane.to_coreai(program, tmp_path / "m.aimodel", mode="check")
    for length in (1, 7):
        x = R.standard_normal((length, 4)).astype(np.float16)
        outputs, _ = running.run(made.path, {"x": x})
        assert_close(outputs["first"], ane.run(program, {"x": x})["first"], 1e-5)


def test_slices_of_dynamic_axes(tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((get_new_symbol(), 4)), mb.TensorSpec((2,), types.int32)])
    def program(x: Var, at: Var) -> Any:
        last = mb.slice_by_index(x=x, begin=[-2, 0], end=[0, 0], end_mask=[True, True], name="last")
        rest = mb.slice_by_index(x=x, begin=[0, 1], end=[-1, -1], name="rest")
        row = mb.slice_by_index(
            x=x, begin=at, end=mb.add(x=at, y=1), end_mask=[False, True], squeeze_mask=[True, False], name="row"
        )
        flat = mb.reshape(x=mb.concat(values=(last, x), axis=0), shape=[-1], name="flat")
        back = mb.slice_by_index(
            x=x,
            begin=[0, 0],
            end=[0, 0],
            stride=[-1, 1],
            begin_mask=[True, True],
            end_mask=[True, True],
            name="back",
        )
        return last, rest, row, flat, back, mb.tile(x=x, reps=[2, 1], name="twice")

    made = ane.to_coreai(program, tmp_path / "m.aimodel")
    for length in (2, 5):
        values = {"x": R.standard_normal((length, 4)).astype(np.float32), "at": np.array([-1, 1], np.int32)}
        outputs, wanted = running.run(made.path, values)[0], ane.run(program, values)
        assert [name for name, value in wanted.items() if not np.array_equal(outputs[name], value)] == []


def test_products_of_dynamic_lengths_are_dynamic(tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 4, get_new_symbol(), 3))])
    def program(x: Var) -> Var:
        return mb.pixel_shuffle(x=x, upscale_factor=2, name="y")

    made = ane.to_coreai(program, tmp_path / "m.aimodel")
    x = R.standard_normal((1, 4, 5, 3)).astype(np.float32)
    assert np.array_equal(running.run(made.path, {"x": x})[0]["y"], ane.run(program, {"x": x})["y"])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 2, None, 4), "it computes with the length of an axis, which is dynamic"),
        ((None, 2, 5, 4), r"more than one length of \[-1, 1, -1\] is dynamic"),
    ],
)
def test_a_dynamic_length_is_never_a_number(shape: Any, words: str, tmp_path: Path) -> None:
    lengths = [get_new_symbol() if n is None else n for n in shape]
    how = {"sampling_mode": "nearest", "padding_mode": "border", "padding_value": np.float32(0)}

    @mb.program(input_specs=[mb.TensorSpec(lengths)])
    def program(x: Var) -> Var:
        at = np.zeros((1, 3, 3, 2), np.float32)
        return mb.resample(x=x, coordinates=at, **how, coordinates_mode="unnormalized", align_corners=True)

    with pytest.raises(NotExpressible, match=words):
        ane.to_coreai(program, tmp_path / "m.aimodel")


def counter() -> Program:
    inputs = [mb.TensorSpec((1, 3), types.fp16), mb.StateTensorSpec((4, 3), types.fp16)]

    @mb.program(input_specs=inputs, opset_version=ct.target.iOS18)
    def program(x: Var, kept: Var) -> Var:
        rows = mb.slice_update(x=mb.read_state(input=kept), update=x, begin=[1, 0], end=[2, 3])
        return mb.reduce_sum(x=mb.coreml_update_state(state=kept, value=rows), axes=[0], name="y")

    return program


def test_states_are_written_in_place(tmp_path: Path) -> None:
    made = ane.to_coreai(counter(), tmp_path / "m.aimodel")
    assert [str(p) for p in made.functions["main"].inputs] == ["x (1x3 fp16)", "kept (4x3 state fp16)"]
    before = {"kept": np.full((4, 3), 2, np.float16)}
    outputs, after = running.run(made.path, {"x": np.full((1, 3), 5)}, states=before)
    assert outputs["y"].tolist() == [11, 11, 11]
    assert after["kept"][1].tolist() == [5, 5, 5]


def test_a_state_of_fp32_is_read_as_fp16(tmp_path: Path) -> None:
    """`check` writes fp32. The wrong version: "ValueError: State only support fp16 dtype", from coremltools."""
    made = ane.to_coreai(counter(), tmp_path / "m.aimodel", mode="check")
    assert "kept (4x3 state fp32)" in [str(p) for p in made.functions["main"].inputs]
    back = ane.to_coreml(made.path, tmp_path / "m.mlpackage")
    assert "state kept holds fp32 in the file, and fp16 here" in back.notes
    predictor = ane.Predictor(back.path)
    state = predictor.make_state()
    assert predictor({"x": np.full((1, 3), 5)}, state=state)["y"].tolist() == [5, 5, 5]
    assert predictor({"x": np.full((1, 3), 6)}, state=state)["y"].tolist() == [6, 6, 6]
    assert state["kept"].value.numpy().tolist()[1] == [6, 6, 6]


def scaled(factor: float) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2,))], opset_version=ct.target.iOS18)(
        lambda x: mb.mul(x=x, y=factor, name="y")
    )


def test_each_function_is_written(tmp_path: Path) -> None:
    for name, factor in (("one", 1.0), ("two", 2.0)):
        ane.save(ane.load(scaled(factor)), tmp_path / f"{name}.mlpackage")
    ane.merge({n: tmp_path / f"{n}.mlpackage" for n in ("one", "two")}, tmp_path / "both.mlpackage")
    made = ane.to_coreai(tmp_path / "both.mlpackage", tmp_path / "m.aimodel")
    assert list(made.functions) == ["one", "two"]
    assert running.run(made.path, {"x": np.ones(2)}, function="two")[0]["y"].tolist() == [2, 2]


def test_control_flow(tmp_path: Path) -> None:
    table = R.standard_normal((4, 3)).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((3,))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Any:
        total = mb.reduce_sum(x=x, axes=[0], keep_dims=False)
        chosen = mb.cond(
            pred=mb.greater(x=total, y=0.0),
            _true_fn=lambda: mb.linear(x=x, weight=table),
            _false_fn=lambda: mb.mul(x=mb.linear(x=x, weight=table), y=-1.0),
        )
        grown = mb.while_loop(
            _cond=lambda a, n: mb.less(x=n, y=5),
            _body=lambda a, n: (mb.add(x=a, y=mb.linear(x=x, weight=table)), mb.add(x=n, y=1)),
            loop_vars=(chosen, np.int32(0)),
        )
        return mb.identity(x=grown[0], name="y")

    made = ane.to_coreai(program, tmp_path / "m.aimodel")
    for sign in (1, -1):
        x = np.array([1.0, 2.0, 3.0], np.float32) * sign
        assert_close(running.run(made.path, {"x": x})[0]["y"], ane.run(program, {"x": x})["y"], 1e-5)


def test_lists(tmp_path: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((5, 3)), mb.TensorSpec((1,), types.int32)])
    def program(x: Var, n: Var) -> Any:
        rows = mb.list_scatter(
            ls=mb.make_list(init_length=5, dynamic_length=False, elem_shape=(3,)),
            indices=[0, 1, 2, 3, 4],
            value=x,
        )
        made = mb.make_list(init_length=5, dynamic_length=False, elem_shape=(3,))

        def step(at: Var, ls: Var) -> Any:
            row = mb.list_read(ls=rows, index=at)
            return mb.add(x=at, y=1), mb.list_write(ls=ls, index=at, value=mb.square(x=row))

        rounds = mb.squeeze(x=n)
        _, filled = mb.while_loop(
            _cond=lambda at, ls: mb.less(x=at, y=rounds), _body=step, loop_vars=(np.int32(0), made)
        )
        count = mb.add(x=mb.list_length(ls=filled), y=0, name="count")
        return mb.list_gather(ls=filled, indices=[1, 4, 0], name="y"), count

    made = ane.to_coreai(program, tmp_path / "m.aimodel")
    values = {"x": R.standard_normal((5, 3)).astype(np.float32), "n": np.array([5], np.int32)}
    outputs, wanted = running.run(made.path, values)[0], ane.run(program, values)
    assert_close(outputs["y"], wanted["y"])
    assert int(outputs["count"]) == 5


def tied(rows: int = 4096, width: int = 64) -> tuple[Program, int]:
    table = R.standard_normal((rows, width)).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 8), types.int32)], opset_version=ct.target.iOS17)
    def program(ids: Var) -> Var:
        weight = mb.const(val=table)
        return mb.linear(x=mb.gather(x=weight, indices=ids, axis=0), weight=weight, name="y")

    return program, table.nbytes


def test_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    program, size = tied()
    made = ane.to_coreai(program, tmp_path / "m.aimodel")
    assert size < made.stored < 1.03 * size


def test_weights_are_stored_as_they_are_compressed(tmp_path: Path) -> None:
    indices = R.integers(0, 16, (256, 256)).astype(types.np_uint4_dtype)
    table = R.standard_normal((1, 1, 16, 1)).astype(np.float16)

    program = mb.program(input_specs=[mb.TensorSpec((2, 256), types.fp16)], opset_version=ct.target.iOS18)(
        lambda x: mb.linear(x=x, weight=mb.constexpr_lut_to_dense(indices=indices, lut=table), name="y")
    )

    made = ane.to_coreai(program, tmp_path / "m.aimodel")
    assert made.stored < 256 * 256 // 2 * 1.1


def test_a_label_becomes_its_numbers(tmp_path: Path) -> None:
    model = CORPUS / "mlt_gesture_classifier.mlmodel"
    if not model.exists():
        pytest.skip(f"{model} is not here")
    made = ane.to_coreai(model, tmp_path / "m.aimodel")
    names = [port.name for port in made.functions["main"].outputs]
    assert names == ["activityProbability", "hiddenOut", "cellOut"]
    metadata = json.loads((made.path / "metadata.json").read_text())
    assert metadata["creatorDefinedMetadata"]["classes.activityProbability"][0] == "chop_it"
    assert "not kept: the label" in str(made)


def test_the_probabilities_of_a_classifier_are_a_tensor(tmp_path: Path) -> None:
    """The wrong version: "scalar fp32", for numbers of 1x3."""
    made = ane.to_coreai(classifier(tmp_path), tmp_path / "m.aimodel")
    assert "(1x3 fp32)" in str(made.functions["main"].outputs[0])


def suppressed(x: Var) -> Any:
    boxes, scores = mb.reshape(x=x, shape=[1, 4, 4]), mb.reshape(x=x, shape=[1, 4, 4])
    least = {"iou_threshold": 0.5, "score_threshold": 0.1}
    return mb.non_maximum_suppression(
        boxes=boxes, scores=scores, max_boxes=2, per_class_suppression=False, **least
    )


WITHOUT_A_FORM: dict[str, Any] = {
    "1 random_normal: Core AI has no random numbers": lambda x: mb.add(x=x, y=mb.random_normal(shape=[16])),
    "1 random_uniform: Core AI has no random numbers": lambda x: mb.add(x=x, y=mb.random_uniform(shape=[16])),
    "1 random_bernoulli: Core AI has no random": lambda x: mb.add(x=x, y=mb.random_bernoulli(shape=[16])),
    "1 random_categorical: Core AI has no random": lambda x: mb.random_categorical(
        x=mb.expand_dims(x=x, axes=[0])
    ),
    "1 non_maximum_suppression: Core AI has no such op; cut the model before it": suppressed,
}
"""Words of the error -> what has no form."""


@pytest.mark.parametrize("words", WITHOUT_A_FORM)
def test_an_op_without_a_lowering_is_named_and_nothing_is_written(words: str, tmp_path: Path) -> None:
    build = WITHOUT_A_FORM[words]
    program = mb.program(input_specs=[mb.TensorSpec((16,))])(lambda x: build(x))
    with pytest.raises(NotExpressible, match=words):
        ane.to_coreai(program, tmp_path / "m.aimodel")
    assert not list(tmp_path.iterdir())


def test_a_form_that_apple_lacks_is_named_with_its_op(tmp_path: Path) -> None:
    program = mb.program(input_specs=[mb.TensorSpec((1, 2, 4, 4))])(
        lambda x: mb.resize(
            x=x,
            shape=[3, 3],
            resized_dims=np.uint32(2),
            interpolation_mode="NEAREST_NEIGHBOR",
            sampling_mode="ALIGN_CORNERS",
            name="small",
        )
    )

    with pytest.raises(NotExpressible, match=r"op small \(resize\): the nearest pixel by ALIGN_CORNERS"):
        ane.to_coreai(program, tmp_path / "m.aimodel")
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(tmp_path: Path) -> None:
    path = ane.to_coreai(shaped((3, 4)), tmp_path / "m.aimodel").path
    before = (path / "main.mlirb").read_bytes()
    with pytest.raises(LoadError, match="exists"):
        ane.to_coreai(shaped((5, 4)), path)
    assert (path / "main.mlirb").read_bytes() == before
    with pytest.raises(LoadError, match=r"let it end in \.aimodel"):
        ane.to_coreai(shaped((3, 4)), tmp_path / "m.mlpackage")


def test_the_command_writes_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ane.save(ane.load(shaped((3, 4))), tmp_path / "m.mlpackage")
    app(
        ["to-coreai", str(tmp_path / "m.mlpackage"), str(tmp_path / "m.aimodel"), "--json"],
        standalone_mode=False,
    )
    said = json.loads(capsys.readouterr().out)
    assert said["functions"]["main"]["outputs"] == ["first (3x4 fp16)", "second (3x4 fp16)"]


def test_modes_differ_by_the_table_alone() -> None:
    with pytest.raises(UnknownName, match="did you mean 'ship'"):
        Mode("shp")
    assert set(FORMS.values()) == set(MODES)
    assert [Mode(mode).dtype("fp16") for mode in MODES] == ["fp16", "fp32"]


def test_reasons_are_of_ops_that_exist_and_have_no_lowering() -> None:
    assert set(MISSING) <= op_types() | {"custom_layer"}
    assert not set(MISSING) & set(TABLE)


def test_the_page_lists_every_form_with_its_mode() -> None:
    page = (Path(__file__).parents[2] / "docs" / "core-ai-problems.md").read_text(encoding="utf-8")
    rows = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("|") for line in page.splitlines())
        if len(cells) == 5
    }
    assert {name: mode for name, mode in rows.items() if mode in MODES} == FORMS

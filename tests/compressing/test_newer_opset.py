"""Models of older opsets, where the form that is asked for begins at iOS 18."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_layer import linear_layer

import anesurgery as ane
from anesurgery.errors import SurgeryWarning
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.rules.loading import newest_for
from anesurgery.placement.target import Target

RNG = np.random.default_rng(19)
WIDTH, ROWS = 32, 64
NUMBERS = (RNG.standard_normal((WIDTH, WIDTH)) / 6).astype(np.float16)
GIVEN = [{"x": RNG.standard_normal((ROWS, WIDTH)).astype(np.float16)} for _ in range(12)]


def layer(opset: Any = ct.target.iOS17, source: str = "x", to: str = "y") -> Program:
    return linear_layer(NUMBERS, ROWS, source, to, opset)


def boxes() -> Program:
    """A crop, which has another form from iOS 17 on."""

    @mb.program(input_specs=[mb.TensorSpec((1, 1, ROWS, WIDTH))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        roi = np.array([0, 0, 0, 3, 3], np.float32).reshape(1, 5, 1, 1, 1)
        crop = mb.crop_resize(x=x, roi=roi, target_height=ROWS, target_width=WIDTH)
        return mb.linear(x=mb.reshape(x=crop, shape=[ROWS, WIDTH]), weight=NUMBERS.astype(np.float32), name="y")

    return program


def small(model: Any, target: str | None, bits: int = 4, **options: Any) -> ane.Compression:
    return ane.compress(model, bits, inputs=GIVEN, target=target, smallest=1000, **options)


@pytest.mark.parametrize("target", ["M5", "M2/macOS 15", "iOS 18", "A18"])
def test_it_becomes_one_of_ios_18_where_the_target_has_that(target: str, tmp_path: Path) -> None:
    """The wrong version took 8 bits, and said nothing."""
    program = layer()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SurgeryWarning)
        found = small(program, target)
    assert [row.form for row in found.weights] == ["int4"]
    assert any("int4 needs iOS 18" in note and "upgraded to iOS 18" in note for note in found.notes)
    path = found.save(tmp_path / "small.mlpackage")
    assert ane.load(path).version == 9
    assert ane.load(program).version == 8
    assert ane.compare(program, path, GIVEN[0], gate=15).ok


@pytest.mark.parametrize(
    ("target", "words"),
    {
        "M2": 'say that the target has it, as target="M2/macOS 15"',
        None: "int8 in its place",
        "M2/macOS 14": "macOS 14 cannot load it",
    }.items(),
)
def test_else_it_is_said_that_there_are_more_bits(target: str | None, words: str) -> None:
    with pytest.warns(SurgeryWarning, match="int4 needs iOS 18, and the model is for iOS 17"):
        found = small(layer(), target)
    assert [row.form for row in found.weights] == ["int8"]
    assert any(words in note for note in found.notes)
    assert found.subject.loaded.version == 8


def test_what_cannot_be_raised_stays_and_the_op_is_named() -> None:
    given = [{"x": RNG.standard_normal((1, 1, ROWS, WIDTH)).astype(np.float32)} for _ in range(12)]
    with pytest.warns(SurgeryWarning, match="cannot become one of iOS 18: crop_resize_0: its boxes"):
        found = ane.compress(boxes(), 4, inputs=given, target="M5", smallest=1000)
    assert [row.form for row in found.weights] == ["int8"]


def test_a_palette_of_as_few_bits_is_no_reason_to_warn() -> None:
    """Of four rows, whose products are bound by reading the weights. Where the target has int4, it is that."""

    @mb.program(input_specs=[mb.TensorSpec((4, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.linear(x=x, weight=NUMBERS, name="y")

    given = [{"x": one["x"][:4]} for one in GIVEN]
    with warnings.catch_warnings():
        warnings.simplefilter("error", SurgeryWarning)
        old, new = (ane.compress(program, 4, inputs=given, target=t, smallest=1000) for t in ("M2", "M5"))
    assert [row.form for one in (old, new) for row in one.weights] == ["palette4", "int4"]
    assert (old.subject.loaded.version, new.subject.loaded.version) == (8, 9)


@pytest.mark.parametrize(("bits", "options"), [(8, {}), (4, {"for_": "size", "mixed": False})])
def test_a_form_that_is_there_raises_nothing(bits: int, options: dict[str, Any]) -> None:
    found = small(layer(), "M5", bits, **options)
    assert found.subject.loaded.version == 8
    assert not any("iOS 18" in note for note in found.notes)


def test_forms_by_name_and_3_bits_are_raised_for() -> None:
    named = small(layer(ct.target.iOS16), "M5", forms="sparse-50-int8")
    three = small(layer(ct.target.iOS16), "M5", 3, for_="size")
    assert [row.form for one in (named, three) for row in one.weights] == ["sparse-50-int8", "palette3"]


def test_a_pipeline_and_a_step_of_a_recipe(tmp_path: Path) -> None:
    models = []
    for source, to in (("x", "h"), ("h", "y")):
        program = layer(source=source, to=to)
        models.append(ct.models.MLModel(str(ane.save(ane.load(program), tmp_path / f"{to}.mlpackage"))))
    ct.utils.make_pipeline(*models).save(str(tmp_path / "whole.mlpackage"))
    found = small(tmp_path / "whole.mlpackage", "M5")
    assert [row.form for row in found.weights] == ["int4", "int4"]
    path = found.save(tmp_path / "small.mlpackage")
    assert ct.models.MLModel(str(path), skip_model_load=True).get_spec().specificationVersion == 9
    assert ane.compare(tmp_path / "whole.mlpackage", path, GIVEN[0], gate=15).ok
    step = ane.passes.CompressWeights(bits=4, inputs=GIVEN, target="M5", more={"smallest": 1000})
    surgery = ane.apply(tmp_path / "h.mlpackage", step)
    assert "it needs iOS 18 or macOS 15" in surgery.details
    assert "compress_weights(target='M5', more={'smallest': 1000})" in map(str, surgery.steps)
    assert ane.load(surgery.save(tmp_path / "step.mlpackage")).version == 9
    whole = ane.apply(tmp_path / "whole.mlpackage", step)
    assert "constexpr_blockwise_shift_scale" in whole.details


@pytest.mark.parametrize(
    ("target", "version"), {"M5": 10, "A17": 8, "M1": 6, "any": 6, "M1/macOS 15": 9, "iOS 27": 10}.items()
)
def test_what_every_os_of_a_target_loads(target: str, version: int) -> None:
    assert newest_for(Target.parse(target)) == version


def wide(x: Var) -> Var:
    """Many positions, for which a palette of 4 bits is slower than fp16."""
    weight = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float16)
    return mb.linear(x=x, weight=weight, name="y")


def test_the_first_line_says_that_weights_have_more_bits_than_were_asked_for() -> None:
    """The wrong version: `compress --bits 4` gives int8, and a note behind the table says so."""
    spec = mb.TensorSpec((1, 256, 64), dtype=types.fp16)
    program = mb.program(input_specs=[spec], opset_version=ct.target.iOS16)(wide)
    samples = [
        {"x": np.random.default_rng(k).standard_normal((1, 256, 64)).astype(np.float32)} for k in range(4)
    ]
    found = {
        t: ane.compress(program, 4, inputs=samples, target=t, smallest=100)
        for t in (None, "iPhone 13/iOS 17", "M1/macOS 14", "iPhone 16/iOS 18")
    }
    first = " ".join(str(found[None]).split("\n\n")[0].split())
    assert first.startswith(
        "Not 4 bits: 1 of 1 weights became int8. int4 needs iOS 18: name a target that has it"
    )
    assert '--target "iPhone 16/iOS 18"' in first
    assert '--target "iPhone 13/iOS 18"' in str(found["iPhone 13/iOS 17"])
    assert 'int4 needs macOS 15: name a target that has it (--target "M1/macOS 15")' in " ".join(
        str(found["M1/macOS 14"]).split()
    )
    assert str(found["iPhone 16/iOS 18"]).startswith("weights: ")

"""Compression as a step: by samples of the surgery or its own, of functions and pipelines, and as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery import recipes
from anesurgery.errors import SurgeryError
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.compress_weights import SAMPLED, CompressWeights

RNG = np.random.default_rng(6)
WIDTH = 48
WEIGHTS = [(RNG.standard_normal((WIDTH, WIDTH)) / 5).astype(np.float16) for _ in range(2)]
SAMPLES = [{"x": RNG.standard_normal((8, WIDTH)).astype(np.float16)} for _ in range(12)]


def model(number: int = 0, source: str = "x", to: str = "y") -> Program:
    @mb.program(input_specs=[mb.TensorSpec((8, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        return mb.linear(x=x, weight=WEIGHTS[number], name=to)

    function = program.functions["main"]
    function._input_dict[source] = function._input_dict.pop("x")
    function.inputs[source].name = source
    return program


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ane.save(ane.load(model()), tmp_path_factory.mktemp("one") / "one.mlpackage")


def same(path: Path, other: Path) -> bool:
    weights = [next(p.rglob("weight.bin")).read_bytes() for p in (path, other)]
    return weights[0] == weights[1]


def test_the_recipe_gives_what_compress_gives(package: Path, tmp_path: Path) -> None:
    """The wrong version takes other samples, or another form, than was asked for."""
    found = ane.compress(package, 4, inputs=SAMPLES, target="M5")
    expected = found.save(tmp_path / "a.mlpackage")
    surgery = ane.apply(package, "compressed", inputs=SAMPLES, target="M5", quiet=True)
    assert same(expected, surgery.save(tmp_path / "b.mlpackage"))
    assert [change.bindings.split(":")[0] for change in surgery.changes] == ["int4"]
    assert found.loss is not None
    assert any(found.loss.words(found.chooses) in note for note in surgery.notes)
    recipes.compressed(package, inputs=SAMPLES, target="M5", quiet=True).save(str(tmp_path / "c.mlpackage"))
    assert same(expected, tmp_path / "c.mlpackage")


def test_options_reach_the_step(package: Path) -> None:
    options: dict[str, Any] = {"bits": 3, "for_": "size", "more": {"mixed": False, "smallest": 100}}
    made = recipes.compressed.with_options(**options)
    surgery = ane.apply(package, made, inputs=SAMPLES, quiet=True)
    assert surgery.changes[0].bindings == "palette3: size alone was asked for"
    none = ane.apply(package, CompressWeights(inputs=SAMPLES, more={"smallest": 10**6}), quiet=True)
    assert not none.changes


def test_it_comes_after_other_steps() -> None:
    """The wrong version compresses first, and leaves a weight that is computed from constants as it is."""

    @mb.program(input_specs=[mb.TensorSpec((8, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        return mb.matmul(x=x, y=mb.mul(x=WEIGHTS[0], y=np.float16(2)), name="y")

    steps = [CompressWeights(inputs=SAMPLES), "fold_constants"]
    surgery = ane.apply(program, steps, target="M5", quiet=True)
    assert [change.pass_name for change in surgery.changes] == ["fold_constants", "compress_weights"]
    assert surgery.after["constexpr_blockwise_shift_scale"] == 1


def test_without_samples_a_note_says_so(package: Path) -> None:
    surgery = ane.apply(package, "compressed", quiet=True)
    assert any(SAMPLED in note for note in surgery.notes)
    assert not any(SAMPLED in note for note in ane.apply(package, "compressed", inputs=SAMPLES).notes)


def test_whole_models_are_compared_by_the_first_sample(package: Path) -> None:
    surgery = ane.apply(package, "compressed", inputs=SAMPLES, prove="model", quiet=True)
    assert surgery.proof is not None
    assert 10 < surgery.proof.psnr < 60


def test_functions_share_what_they_become(package: Path, tmp_path: Path) -> None:
    both = ane.merge({"a": package, "b": package}, tmp_path / "both.mlpackage")
    step = CompressWeights(inputs=SAMPLES, more={"function": "a"})
    path = ane.apply(both, step, quiet=True).save(tmp_path / "small.mlpackage")
    ops = [[op.op_type for op in f.operations] for f in ane.load(path).program.functions.values()]
    assert ops[0] == ops[1]
    assert "constexpr_blockwise_shift_scale" in ops[0]


def test_a_pipeline_is_compressed_as_a_whole(tmp_path: Path) -> None:
    """The wrong version gives the second model the samples of the first, or random ones."""
    models = []
    for number, (source, to) in enumerate((("x", "h"), ("h", "y"))):
        path = ane.save(ane.load(model(number, source, to)), tmp_path / f"{number}.mlpackage")
        models.append(ct.models.MLModel(str(path)))
    ct.utils.make_pipeline(*models).save(str(tmp_path / "whole.mlpackage"))
    expected = ane.compress(tmp_path / "whole.mlpackage", 4, inputs=SAMPLES).save(tmp_path / "a.mlpackage")
    surgery = ane.apply(tmp_path / "whole.mlpackage", "compressed", inputs=SAMPLES, quiet=True)
    assert len(surgery.changes) == 2
    path = surgery.save(tmp_path / "b.mlpackage")
    for values in SAMPLES[:2]:
        np.testing.assert_array_equal(ane.run(path, values)["y"], ane.run(expected, values)["y"])
    alone = ane.apply(tmp_path / "whole.mlpackage", CompressWeights(inputs=SAMPLES), member="0", quiet=True)
    assert not alone.changes
    assert "leave member= out" in alone.refusals[0][1].reason


def test_a_model_that_is_too_old_is_refused() -> None:
    """The wrong version raises, so that the steps beside it are lost."""

    @mb.program(input_specs=[mb.TensorSpec((8, WIDTH))], opset_version=ct.target.iOS15)
    def old(x: Var) -> Var:
        return mb.linear(x=x, weight=WEIGHTS[0].astype(np.float32), name="y")

    before = ane.to_text(old)
    surgery = ane.apply(old, ["negate_subtract", CompressWeights()], quiet=True)
    assert [str(reason) for name, reason in surgery.refusals if name == "compress_weights"] == [
        "weights can be compressed from iOS 16 on; convert the model for that or newer"
    ]
    assert not surgery.changes
    assert not any(SAMPLED in note for note in surgery.notes), "nothing was corrected by samples"
    assert ane.to_text(surgery.program) == before


def test_functions_that_take_the_same_samples_are_refused_until_one_is_named(tmp_path: Path) -> None:
    for number in range(2):
        ane.save(ane.load(model(number)), tmp_path / f"{number}.mlpackage")
    both = {f"f{n}": tmp_path / f"{n}.mlpackage" for n in range(2)}
    merged = ane.merge(both, tmp_path / "both.mlpackage")
    surgery = ane.apply(merged, CompressWeights(), target="M5", quiet=True)
    ((name, reason),) = surgery.refusals
    assert (name, str(reason)) == (
        "compress_weights",
        "the samples fit 2 of the functions f0, f1; say function=...",
    )
    assert not surgery.changes
    one = ane.apply(merged, CompressWeights(more={"function": "f1"}), target="M5", quiet=True)
    assert len(one.changes) == 1
    with pytest.raises(SurgeryError, match="bits=99"):
        ane.apply(merged, CompressWeights(bits=99), quiet=True)


def test_drawn_samples_that_are_no_numbers_are_refused() -> None:
    """A logarithm of what is drawn below 0; samples that were given are an error."""

    @mb.program(input_specs=[mb.TensorSpec((8, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        return mb.linear(x=mb.log(x=x), weight=WEIGHTS[0], name="y")

    surgery = ane.apply(program, "compress_weights", target="M5", quiet=True)
    assert not surgery.changes
    assert any("reads NaN or infinity" in str(refusal) for _, refusal in surgery.refusals)
    with pytest.raises(SurgeryError, match="leave that sample out"):
        ane.apply(program, "compress_weights", target="M5", inputs=SAMPLES, quiet=True)

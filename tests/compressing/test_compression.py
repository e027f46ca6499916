"""A whole model compressed: forms by evidence, functions, states, pipelines, bad samples."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from classifiers import FEATURES, LABELS, classifier
from linear_layer import linear_layer
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.compressing.compression import _check_finite
from anesurgery.compressing.weight_forms import COMPUTING, READING, Evidence, choose
from anesurgery.errors import SurgeryError, SurgeryWarning
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.score import placed
from anesurgery.placement.target import Target

RNG = np.random.default_rng(7)
WIDTH, WORDS, LENGTH = 32, 64, 24
MIXED = RNG.standard_normal((WORDS, 8)) @ RNG.standard_normal((8, WIDTH)) / 8
TABLE = (MIXED + RNG.standard_normal((WORDS, WIDTH)) / 8).astype(np.float16)
UP = (RNG.standard_normal((2 * WIDTH, WIDTH)) / 6).astype(np.float16)
DOWN = (RNG.standard_normal((WIDTH, 2 * WIDTH)) / 8).astype(np.float16)


def decoder(length: int = LENGTH, opset: Any = ct.target.iOS18) -> Program:
    """A table, a layer, a state that adds up, and a tied head."""

    @mb.program(
        input_specs=[
            mb.TensorSpec((1, length), dtype=types.int32),
            mb.StateTensorSpec((1, 1, WIDTH), dtype=types.fp16),
        ],
        opset_version=opset,
    )
    def program(ids: Var, memory: Var) -> Var:
        table = mb.const(val=TABLE, name="table")
        x = mb.gather(x=table, indices=ids, axis=0)
        h = mb.linear(x=mb.relu(x=mb.linear(x=x, weight=UP, name="up")), weight=DOWN, name="down")
        last = mb.slice_by_size(x=h, begin=[0, length - 1, 0], size=[1, 1, WIDTH])
        kept = mb.coreml_update_state(state=memory, value=mb.add(x=mb.read_state(input=memory), y=last))
        return mb.linear(x=mb.add(x=x, y=mb.add(x=h, y=kept)), weight=table, name="logits")

    return program


def samples(count: int = 12, length: int = LENGTH) -> list[dict[str, Any]]:
    return [{"ids": RNG.integers(0, WORDS, (1, length)).astype(np.int32)} for _ in range(count)]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compression")
    return ane.save(ane.load(decoder()), folder / "decoder.mlpackage")


def forms(found: ane.Compression) -> dict[str, str]:
    return {row.weight: row.form for row in found.weights}


def test_a_package_becomes_smaller_and_stays_the_model(package: Path, tmp_path: Path) -> None:
    given = samples()
    found = ane.compress(package, 4, inputs=given, target="M5", smallest=1000)
    assert set(forms(found).values()) == {"int4"}
    assert found.bytes[1] < 0.35 * found.bytes[0]
    assert found.samples == (9, 3)
    assert all(row.error < row.rounded for row in found.compressed)
    path = found.save(tmp_path / "small.mlpackage")
    held = given[3]
    expected = ane.run(package, held)
    written = ane.run(path, held)
    np.testing.assert_array_equal(written["logits"], found.subject and ane.run(found.model, held)["logits"])
    assert ane.compare(package, path, held, gate=15, precision="fp32").ok
    assert (written["logits"].argmax(-1) == expected["logits"].argmax(-1)).mean() > 0.9
    interfaces = [ane.load(p).spec.description for p in (package, path)]
    assert interfaces[0] == interfaces[1]
    ct.models.MLModel(str(path), skip_model_load=True)


def test_features_have_no_kl() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 8, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        return mb.tanh(x=mb.linear(x=x, weight=DOWN.T.copy()[:WIDTH, :WIDTH]), name="features")

    drawn = [{"x": RNG.standard_normal((1, 8, WIDTH)).astype(np.float16)} for _ in range(8)]
    found = ane.compress(program, 4, inputs=drawn, target="M4/macOS 15", smallest=100)
    assert found.compressed
    assert "KL" not in str(found)
    assert "held-out samples: PSNR" in str(found)
    loss = found.to_json()["loss"]
    assert loss["kl"] is loss["top1"] is None
    assert loss["psnr_db"] > 10


def test_kl_is_of_the_outputs_that_choose() -> None:
    """The wrong version counts the rows of what is kept for the next call too, as if they were logits."""

    def program(both: bool) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((4, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
        def program(x: Var) -> Any:
            h = mb.linear(x=x, weight=UP[:WIDTH], name="kept_out")
            logits = mb.linear(x=h, weight=DOWN[:, :WIDTH], name="logits")
            return (logits, h) if both else logits

        return program

    given = [{"x": RNG.standard_normal((4, WIDTH)).astype(np.float16)} for _ in range(12)]
    losses = [
        ane.compress(program(both), 4, inputs=given, target="M5", smallest=64).loss for both in (True, False)
    ]
    assert all(losses)
    assert losses[0].kl == losses[1].kl  # type: ignore[union-attr]


def test_the_loss_is_that_of_samples_held_out(package: Path) -> None:
    """The wrong version judges by what it calibrated on: there a table fitted to the samples loses nothing."""
    given = samples(16)
    found = ane.compress(package, 4, inputs=given, for_="size", mixed=False, smallest=1000)
    assert found.loss is not None
    assert found.loss.sums["logits"].rows == 4 * LENGTH
    assert 0 < found.loss.kl < 0.1


def test_correction_keeps_more_than_rounding(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = samples(32)
    corrected = ane.compress(package, 3, inputs=given, for_="size", mixed=False, smallest=1000)
    monkeypatch.setattr("anesurgery.compressing.fitting.ROUNDS", 0)
    rounded = ane.compress(package, 3, inputs=given, for_="size", mixed=False, smallest=1000)
    assert corrected.bytes == rounded.bytes
    assert corrected.loss is not None
    assert rounded.loss is not None
    assert corrected.loss.kl < 0.75 * rounded.loss.kl


@pytest.mark.slow
def test_bits_are_given_where_they_cost_least(package: Path) -> None:
    """The wrong version gives every weight the same: a faint input then costs what the head does."""
    given = samples(24)
    even = ane.compress(package, 3, inputs=given, for_="size", mixed=False, smallest=1000)
    found = ane.compress(package, 3.2, inputs=given, for_="size", smallest=1000, mixed=True)
    assert len(set(forms(found).values())) > 1
    assert found.bytes[1] - even.bytes[1] <= 0.2 / 8 * 3 * 2048
    assert found.loss is not None
    assert even.loss is not None
    assert found.loss.kl < even.loss.kl
    with pytest.raises(SurgeryError, match="an average of others with mixed=True"):
        ane.compress(package, 3.2, inputs=given)


def test_a_weight_whose_op_would_leave_the_engine_stays(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version keeps the form, or gives up every other weight too."""

    def judged(loaded: Any, target: Target) -> list[Any]:
        (function,) = loaded.program.functions.values()
        inner = {op.name: op for op in function.operations}
        (found,) = placed(loaded, target)
        narrow = {n for n, op in inner.items() if op.op_type == "linear" and op.weight.shape[1] == 2 * WIDTH}
        narrow = {n for n in narrow if inner[n].weight.op.op_type != "const"}
        units = {row.name: "cpu" if row.name in narrow else "ane" for row in found.ops}
        return [replace(found, ops=tuple(replace(row, preferred=units[row.name]) for row in found.ops))]

    monkeypatch.setattr("anesurgery.compressing.compression.placed", judged)
    found = ane.compress(package, 4, inputs=samples(), target="M5", smallest=1000)
    assert [row.form for row in found.weights] == ["int4", "int4", ""]
    assert found.weights[2].why == "an op that reads it would leave the Neural Engine"
    assert found.on_engine == (1.0, 1.0)


def test_functions_that_share_weights_share_what_they_become(package: Path, tmp_path: Path) -> None:
    short = ane.save(ane.load(decoder(1)), tmp_path / "short.mlpackage")
    both = ane.merge({"long": package, "short": short}, tmp_path / "both.mlpackage")
    found = ane.compress(both, 4, inputs=samples(), function="long", target="M5", smallest=1000)
    path = found.save(tmp_path / "small.mlpackage")
    assert found.bytes[1] < 0.35 * found.bytes[0]
    weights = [p / "Data/com.apple.CoreML/weights/weight.bin" for p in (both, path)]
    assert weights[1].stat().st_size < 0.6 * weights[0].stat().st_size
    program = ane.load(path).program
    kinds = [
        [op.op_type for op in f.operations if "constexpr" in op.op_type] for f in program.functions.values()
    ]
    assert kinds[0] == kinds[1] == ["constexpr_blockwise_shift_scale"] * 3
    with pytest.raises(SurgeryError, match="the samples fit 2 of the functions long, short; say function="):
        ane.compress(both, 4, inputs=samples(), target="M5", smallest=1000)


def test_functions_that_keep_their_weights_are_named(package: Path, tmp_path: Path) -> None:
    other = ane.save(ane.load(linear_layer(2 * UP, 4, "x", "h")), tmp_path / "other.mlpackage")
    both = ane.merge({"one": package, "two": other}, tmp_path / "both.mlpackage")
    found = ane.compress(both, 8, inputs=samples(), function="one", target="M5", smallest=1000)
    assert any("not two: compress the result, function=two" in note for note in found.notes)


def test_a_pipeline_is_compressed_part_by_part(package: Path, tmp_path: Path) -> None:
    models = []
    for number, (numbers, source, to) in enumerate(((UP, "x", "h"), (DOWN, "h", "y"))):
        program = linear_layer(numbers[:WIDTH, :WIDTH], 4, source, to)
        models.append(ct.models.MLModel(str(ane.save(ane.load(program), tmp_path / f"{number}.mlpackage"))))
    whole = ct.utils.make_pipeline(*models)
    whole.save(str(tmp_path / "whole.mlpackage"))
    given = [{"x": RNG.standard_normal((4, WIDTH)).astype(np.float16)} for _ in range(12)]
    found = ane.compress(tmp_path / "whole.mlpackage", 4, inputs=given, for_="size", mixed=False, smallest=1000)
    assert [row.form for row in found.weights] == ["palette4", "palette4"]
    path = found.save(tmp_path / "small.mlpackage")
    assert ane.compare(tmp_path / "whole.mlpackage", path, given[0], gate=15).ok
    assert found.loss is not None
    assert found.loss.psnr > 15
    with pytest.raises(SurgeryError, match="unknown input 'h'"):
        ane.compress(tmp_path / "whole.mlpackage", 4, inputs=[one | {"h": one["x"]} for one in given])


NAN = {"ids": np.full((1, LENGTH), np.nan)}
BAD: dict[str, tuple[Any, str]] = {
    "none": ([], "inputs has no sample"),
    "wrong name": ([{"tokens": samples(1)[0]["ids"]}] * 9, "tokens"),
    "NaN": ([*samples(3), NAN], "sample 3: 'ids' holds NaN or infinity"),
    "a number": ([*samples(3), 7], "sample 3 is a int; give a dictionary"),
    "a path": ("samples.npz", "inputs is a str; give a list of samples"),
    "an array": (samples(1)[0]["ids"], "inputs is a ndarray"),
    "a number alone": (3, "inputs is a int"),
    "rows of several lengths": ([{"ids": [[1, 2], [3]]}], "sample 0: 'ids' is no array"),
    "masked": (
        [*samples(3), {"ids": cast(Any, np.ma).masked_less(samples(1)[0]["ids"], 9)}],
        "sample 3: 'ids' holds masked",
    ),
    "another vocabulary": (
        [*samples(3), {"ids": np.full((1, LENGTH), WORDS, np.int32)}],
        f"holds {WORDS}, and indexes a table of {WORDS} rows",
    ),
    "below the table": (
        [{"ids": np.full((1, LENGTH), -WORDS - 1, np.int32)}] * 9,
        f"holds {-WORDS - 1}, and indexes a table",
    ),
    "another shape": (samples(9, LENGTH - 1), "'ids' has shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_samples_are_errors(package: Path, name: str) -> None:
    given, words = BAD[name]
    with pytest.raises(SurgeryError, match=words):
        ane.compress(package, 4, inputs=given, smallest=1000)


def test_a_held_out_sample_that_does_not_fit_is_said_before_the_work(package: Path) -> None:
    """The wrong version corrects all weights first, and then cannot state the loss."""
    given = samples()
    given[3] = {"tokens": given[3]["ids"]}
    told: list[int] = []
    with pytest.raises(SurgeryError, match="unknown input 'tokens'"):
        ane.compress(package, 4, inputs=given, smallest=1000, progress=lambda done, _: told.append(done))
    assert not told


def rows_of_width(count: int = 12, largest: float = 1.0) -> list[dict[str, Any]]:
    return [{"x": largest * RNG.standard_normal((4, WIDTH))} for _ in range(count)]


@pytest.mark.parametrize("size", [8, 4])
def test_samples_that_overflow_are_errors(size: int) -> None:
    """The wrong version rounds to the nearest, as the moments say nothing, and states a loss of none."""
    program = linear_layer(UP[:WIDTH, :WIDTH], 4)
    with pytest.raises(SurgeryError, match="linear 'y' reads NaN or infinity when a sample runs"):
        ane.compress(program, size, inputs=rows_of_width(largest=1e7), smallest=1000)


def half_rows(values: Any) -> Program:
    """Rows times numbers, added to what an infinite scale makes of the same rows."""

    @mb.program(input_specs=[mb.TensorSpec((4, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        y = mb.linear(x=x, weight=UP[:WIDTH, :WIDTH], name="y")
        return mb.mul(x=y, y=np.asarray(values, np.float16), name="z")

    return program


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_model_that_makes_no_numbers_has_no_loss(scale: float) -> None:
    with pytest.raises(SurgeryError, match="the model given makes NaN or infinity at 'z' of held-out sample 0"):
        ane.compress(half_rows(scale), 4, inputs=rows_of_width(), smallest=1000)


def test_infinities_of_the_model_itself_are_left_out() -> None:
    """As a mask makes them: what is finite is compared. The wrong version calls no rows a KL of 0."""
    scale = np.where(np.arange(WIDTH) % 2, 1.0, np.inf)
    found = ane.compress(half_rows(scale), 8, inputs=rows_of_width(), smallest=1000)
    assert found.loss is not None
    assert found.loss.psnr > 30
    assert found.to_json()["loss"] == {"kl": None, "top1": None, "psnr_db": found.loss.psnr}
    assert "held-out samples: infinite numbers are left out, PSNR" in str(found)


def test_numbers_that_become_infinite_are_an_error() -> None:
    with pytest.raises(
        SurgeryError, match="the compressed model makes NaN or infinity at 'y' of held-out sample 7"
    ):
        _check_finite(7, {"y": np.array([1.0, np.inf])}, {"y": np.array([np.inf, np.inf])})
    with pytest.raises(SurgeryError, match="the compressed model makes NaN"):
        _check_finite(7, {"y": np.array([1.0, np.inf])}, {"y": np.array([1.0, np.nan])})
    _check_finite(7, {"y": np.array([1.0, np.inf])}, {"y": np.array([1.0, np.inf])})


SOME = samples(5)
DOUBTFUL: dict[str, tuple[Any, str]] = {
    "one": (samples(1), "only one sample: none is held out, so the loss is not measured"),
    "few": (samples(3), "only 3 samples"),
    "constant": (samples(1) * 9, "the input 'ids' is the same in all samples"),
    "given twice": (samples(6) + SOME + SOME, "3 of the 4 samples held out are in the calibration too"),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", DOUBTFUL)
def test_doubtful_samples_are_said(package: Path, name: str) -> None:
    given, words = DOUBTFUL[name]
    with pytest.warns(SurgeryWarning, match=words):
        found = ane.compress(package, 4, inputs=given, smallest=1000)
    assert any(words in note for note in found.notes)
    assert (found.loss is None) == (name == "one")


def test_fewer_rows_than_columns_are_said() -> None:
    """Beyond what the samples span, a correction by them is a guess."""
    program = linear_layer(UP[:WIDTH], 4)
    short, enough = (
        [{"x": RNG.standard_normal((4, WIDTH)).astype(np.float16)} for _ in range(count)] for count in (9, 12)
    )
    with pytest.warns(SurgeryWarning, match=r"1 of 1 weights have more columns .*\(32 against 28\)"):
        found = ane.compress(program, 4, inputs=short, target="M5", smallest=100)
    assert found.weights[0].calibration_rows == (28, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SurgeryWarning)
        weight = ane.compress(program, 4, inputs=enough, target="M5", smallest=100).weights[0]
        assert weight.calibration_rows == (36, WIDTH)


def test_good_samples_make_no_warning(package: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SurgeryWarning)
        ane.compress(package, 8, inputs=samples(), smallest=1000)


def test_the_model_given_is_not_changed() -> None:
    program = decoder()
    before = ane.to_text(program)
    ane.compress(program, 4, inputs=samples(), smallest=1000)
    assert ane.to_text(program) == before


def test_the_form_of_an_older_opset() -> None:
    @mb.program(input_specs=[mb.TensorSpec((4, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        return mb.linear(x=x, weight=DOWN[:, :WIDTH], name="y")

    given = [{"x": RNG.standard_normal((4, WIDTH)).astype(np.float16)} for _ in range(12)]
    found = ane.compress(program, 8, inputs=given, target="M1", smallest=1000)
    assert list(forms(found).values()) == ["int8"]
    three = ane.compress(program, 3, inputs=given, for_="size", smallest=1000)
    assert not three.compressed
    assert "3 bits need iOS 18" in three.weights[0].why


SPEED = {"M5": Target.parse("M5"), "M1": Target.parse("M1"), "any": Target.parse("any")}
COMPUTE, READ = frozenset((COMPUTING,)), frozenset((READING,))


def test_wide_products_on_an_m5_get_plain_numbers_not_a_palette() -> None:
    assert choose(4, SPEED["M5"], COMPUTE, 9, "speed").form == "int4"
    three = choose(3, SPEED["M5"], COMPUTE, 9, "speed")
    assert three.form == "int4"
    assert "; forms of 3 bits are slower than fp16 (palette at 0." in three.why
    assert "forms of" not in choose(4, SPEED["M5"], COMPUTE, 9, "speed").why
    assert choose(3, SPEED["M5"], COMPUTE, 9, "size").form == "palette3"
    assert "no speed was published on M1" in choose(4, SPEED["M1"], COMPUTE, 9, "speed").why
    assert choose(4, SPEED["M1"], READ, 9, "speed").form == "palette4"


def test_a_form_that_is_slower_everywhere_is_left() -> None:
    """The wrong version takes the least slow one."""
    slow = [
        Evidence(kind, 4, COMPUTING, "M5 Pro", "", 1024, 0.5, "a product", "a source")
        for kind in ("int4", "int8", "palette")
    ]
    found = choose(4, SPEED["M5"], COMPUTE, 9, "speed", slow)
    assert found.form is None
    assert "slower than fp16: int4 at 0.50 times" in found.why


def test_a_classifier_keeps_its_labels(tmp_path: Path) -> None:
    """The wrong version: its list of labels has no shape, and asking for it is an error."""
    path = classifier(tmp_path)
    drawn = np.random.default_rng(1)
    rows = [{"x": drawn.normal(size=(1, FEATURES)).astype(np.float32)} for _ in range(12)]
    found = ane.compress(path, inputs=rows, target="M4/macOS 15", smallest=1)
    assert len(forms(found)) == 1
    for given in (path, found.model):
        assert ane.run(given, rows[0])["classLabel"] in LABELS


def test_the_command(package: Path, tmp_path: Path) -> None:
    options = []
    for number, values in enumerate(samples(8)):
        np.savez(tmp_path / f"{number}.npz", **values)
        options += ["--inputs", str(tmp_path / f"{number}.npz")]
    out = tmp_path / "out.mlpackage"
    call = ["compress", str(package), str(out), *options, "--smallest", "1000", "--target", "M5"]
    done = CliRunner().invoke(cli.app, [*call, "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["samples"] == [6, 2]
    assert {w["form"] for w in content["weights"]} == {"int4"}
    assert ane.load(out).program
    done = CliRunner().invoke(cli.app, [*call, "--overwrite", "--for", "size", "--no-mixed"])
    assert "palette4" in done.stdout
    assert "on 2 held-out samples: KL" in done.stdout
    assert "exists; choose another name" in str(CliRunner().invoke(cli.app, call).exception)

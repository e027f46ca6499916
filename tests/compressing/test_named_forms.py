"""Forms that are asked for by name: zeros, vectors and tables of groups, on every op that reads a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.compressing import fitting
from anesurgery.compressing.correcting import decode
from anesurgery.compressing.fitting import choose_zeros, fit_form
from anesurgery.compressing.second_order import HessianFactor, round_columns, squared_error
from anesurgery.compressing.weight_forms import COMPUTING, READING, choose_form, read_form
from anesurgery.errors import SurgeryError
from anesurgery.mil import Array, Program, Var, ct, mb, quiet_host, types
from anesurgery.placement.target import Target

RNG = np.random.default_rng(11)
CHANNELS, LENGTH = 32, 12
FORMS = {
    "palette3-group-16": {"constexpr_lut_to_dense"},
    "palette4-vector-2": {"constexpr_lut_to_dense"},
    "sparse-50": {"constexpr_sparse_to_dense"},
    "sparse-50-int8": {"constexpr_sparse_blockwise_shift_scale", "constexpr_sparse_to_dense"},
    "sparse-50-palette3": {"constexpr_lut_to_sparse", "constexpr_sparse_to_dense"},
    "zeros-50": set(),
}
"""A form, and the ops that decode it."""


def numbers(*shape: int) -> Array:
    return (RNG.standard_normal(shape) / 6).astype(np.float16)


MIX = RNG.standard_normal((6, CHANNELS))
WEIGHTS = [
    numbers(CHANNELS, CHANNELS, 3),
    numbers(CHANNELS, CHANNELS // 2, 3),
    numbers(CHANNELS, CHANNELS, 3),
    numbers(CHANNELS, CHANNELS),
    numbers(CHANNELS, CHANNELS),
    numbers(CHANNELS, CHANNELS),
    (np.random.default_rng(12).standard_normal((CHANNELS, CHANNELS // 2, 3)) / 6).astype(np.float16),
]


def network(opset: Any = ct.target.iOS18) -> Program:
    """Convs with strides, groups and dilations, conv_transposes, a linear, weights of matmul on each side."""

    @mb.program(input_specs=[mb.TensorSpec((1, CHANNELS, 2 * LENGTH), dtype=types.fp16)], opset_version=opset)
    def program(x: Var) -> Var:
        one, two, three, four, five, six, halves = WEIGHTS
        h = mb.conv(x=x, weight=one, strides=[2], pad_type="same", name="strides")
        h = mb.conv(x=h, weight=two, groups=2, dilations=[2], pad_type="same", name="groups")
        h = mb.conv_transpose(x=h, weight=three, pad_type="same", name="turned")
        h = mb.conv_transpose(x=h, weight=halves, groups=2, pad_type="same", name="halves")
        h = mb.linear(x=mb.transpose(x=h, perm=[0, 2, 1]), weight=four, name="line")
        h = mb.matmul(x=h, y=five, name="second")
        return mb.matmul(x=six, y=mb.transpose(x=h, perm=[0, 2, 1]), name="y")

    made: Program = program
    return made


def samples(count: int = 12) -> list[dict[str, Any]]:
    """Channels that vary together."""
    drawn = RNG.standard_normal((count, 2 * LENGTH, 6)) @ MIX
    drawn = drawn + 0.1 * RNG.standard_normal(drawn.shape)
    return [{"x": each.T[None].astype(np.float16)} for each in drawn]


GIVEN = samples()


@pytest.mark.one_of(4)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_stored_read_back_and_run(form: str, tmp_path: Path) -> None:
    found = ane.compress(network(), forms=form, inputs=GIVEN, smallest=500, for_="size")
    assert [row.form for row in found.weights] == [form] * len(WEIGHTS)
    assert all(row.error < row.rounded for row in found.weights)
    path = found.save(tmp_path / "small.mlpackage")
    read = ane.load(path).program
    held = {op.op_type for op in read.functions["main"].operations if op.op_type.startswith("constexpr")}
    assert held == FORMS[form]
    expected = ane.Predictor(found.subject.loaded)(GIVEN[0])["y"]
    np.testing.assert_array_equal(ane.Predictor(path)(GIVEN[0])["y"], expected)
    with quiet_host():
        again = ct.models.MLModel(str(path), skip_model_load=True)
        again.save(str(tmp_path / "again.mlpackage"))
    np.testing.assert_array_equal(ane.Predictor(tmp_path / "again.mlpackage")(GIVEN[0])["y"], expected)
    others = [size - sum(row.bytes[i] for row in found.weights) for i, size in enumerate(found.bytes)]
    assert 0 <= others[1] - others[0] <= 5 * 2 * CHANNELS  # five ops get a bias


@pytest.mark.one_of(4)
@pytest.mark.parametrize("form", ["int4", "palette4-vector-2", "sparse-50-palette3"])
def test_without_correction_every_op_loses_more(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version rounds each number to the nearest."""
    round_columns = ane.compress(network(), forms=form, inputs=GIVEN, smallest=500, for_="size")
    monkeypatch.setattr(fitting, "ROUNDS", 0)
    rounded = ane.compress(network(), forms=form, inputs=GIVEN, smallest=500, for_="size")
    for with_it, without in zip(round_columns.weights, rounded.weights, strict=True):
        assert with_it.ops == without.ops
        assert with_it.error < 0.8 * without.error, with_it.ops
    assert round_columns.loss is not None
    assert rounded.loss is not None
    assert round_columns.loss.psnr > rounded.loss.psnr + 1


def layer() -> tuple[Array, Array]:
    drawn = RNG.standard_normal((256, 6)) @ MIX * np.exp(RNG.standard_normal(CHANNELS))
    drawn = drawn + 0.1 * RNG.standard_normal(drawn.shape)
    return numbers(24, CHANNELS).astype(np.float64), drawn.T @ drawn


def test_zeros_are_where_they_cost_least() -> None:
    """Against zeros for the smallest numbers, and for those of least magnitude times input, not handed on."""
    weight, hessian = layer()
    kept, made = choose_zeros(weight[None], [HessianFactor.of(hessian)], 50)
    assert np.count_nonzero(kept) == weight.size // 2
    np.testing.assert_array_equal(made[~kept], 0)
    error = squared_error(made[0] - weight, hessian)
    scores = {"magnitude": np.abs(weight), "input": np.abs(weight) * np.sqrt(np.diag(hessian))}
    for score in scores.values():
        plain = np.where(score > np.median(score), weight, 0)
        assert error < 0.5 * squared_error(plain - weight, hessian)


def test_zeros_by_the_factor_beat_zeros_of_the_smallest_numbers() -> None:
    """The wrong version takes the smallest numbers, and hands on all the same."""
    weight, hessian = layer()
    factors = HessianFactor.of(hessian)
    _, made = choose_zeros(weight[None], [factors], 50)
    flat = HessianFactor(factors.order, factors.upper.clone())
    flat.upper.diagonal().fill_(1.0)
    kept, _ = choose_zeros(weight[None], [flat], 50)
    by_size = round_columns(weight, factors, lambda column, at: column * kept[0][:, at]).rows
    assert squared_error(made[0] - weight, hessian) < 0.8 * squared_error(by_size - weight, hessian)


def test_an_entry_of_a_vector_holds_neighbours() -> None:
    weight, hessian = layer()
    channels = np.arange(24)[None]
    grid = fit_form("palette3-vector-2", weight[None], hessian[None], channels, 0, 2, np.float16)
    near = grid.nearest(weight, 0)
    pairs = {tuple(pair) for pair in near.reshape(12, 2, -1).transpose(0, 2, 1).reshape(-1, 2)}
    assert len(pairs) == 8
    form = grid.form(near[None], lambda rows: rows[0], np.float16, 9)
    assert form.inputs["indices"].shape == (12, CHANNELS)
    np.testing.assert_array_equal(decode(form), near)


def test_tables_of_groups_serve_channels_that_differ() -> None:
    """One table for rows a hundred times as large as others leaves these nothing."""
    weight, hessian = layer()
    weight[12:] /= 100
    channels = np.arange(24)[None]
    errors = []
    for form in ("palette3", "palette3-group-12"):
        grid = fit_form(form, weight[None], hessian[None], channels, 0, 2, np.float16)
        off = (grid.nearest(weight, 0) - weight)[12:]
        errors.append(squared_error(off, hessian) / squared_error(weight[12:], hessian))
    assert errors[1] < 0.1 * errors[0]


ANY = frozenset((COMPUTING, READING))
WORDS = {
    "sparse-75 on an A16": ("sparse-75", "A16", COMPUTING, "speed", "sparse at 1.19 times the speed of fp16"),
    "fewer zeros than were timed": ("sparse-50", "A16", COMPUTING, "speed", "no speed was published"),
    "zeros stored plainly on an M5": ("zeros-75", "M5", COMPUTING, "speed", "zeros at 1.88 times the speed"),
    "zeros not stored on an M5": ("sparse-75", "M5", COMPUTING, "speed", "no speed was published on M5"),
    "vectors": ("palette6-vector-2", "M5", COMPUTING, "speed", "no speed was published on M5"),
    "groups on an M5": ("palette4-group-16", "M5", COMPUTING, "size", "though slower: palette at 0."),
}
REFUSED = {
    "groups on an M5": ("palette4-group-16", "M5", 9, "slower than fp16: palette at 0."),
    "a palette with zeros on an A19": ("sparse-50-palette4", "A19", 9, "slower than one without (john-rocky"),
    "iOS 17": ("sparse-50-int8", "M5", 8, "sparse-50-int8 needs iOS 18"),
}


@pytest.mark.parametrize("name", WORDS)
def test_what_is_known_of_a_form_is_said(name: str) -> None:
    form, chip, bound, purpose, words = WORDS[name]
    choice = choose_form(form, Target.parse(chip), frozenset((bound,)), 9, purpose)
    assert choice.form == form
    assert words in choice.why


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_that_is_slower_or_too_new_is_refused_with_the_reason(name: str) -> None:
    form, chip, version, words = REFUSED[name]
    choice = choose_form(form, Target.parse(chip), ANY, version, "speed")
    assert choice.form is None
    assert words in choice.why


def test_channels_that_do_not_fit_are_said() -> None:
    @mb.program(
        input_specs=[mb.TensorSpec((1, CHANNELS, LENGTH), dtype=types.fp16)], opset_version=ct.target.iOS18
    )
    def program(x: Var) -> Var:
        h = mb.conv(x=x, weight=numbers(CHANNELS, 1, 31), groups=CHANNELS, pad_type="same", name="each")
        return mb.conv(x=h, weight=numbers(31, CHANNELS, 1), name="y")

    found = ane.compress(program, forms="palette2-vector-2", inputs=GIVEN_SHORT, smallest=500, for_="size")
    why = [row.why for row in found.weights]
    assert "1 output channels, which meet the same inputs, are no multiple of 2" in why[0]
    assert "31 output channels" in why[1]
    found = ane.compress(program, forms="palette2-group-8", inputs=GIVEN_SHORT, smallest=500, for_="size")
    assert [row.form for row in found.weights] == ["palette2-group-8", ""]
    assert "no multiple of groups of 8" in found.weights[1].why


GIVEN_SHORT = [{"x": values["x"][:, :, :LENGTH]} for values in GIVEN]


def test_of_several_forms_each_weight_gets_its_own() -> None:
    several = ("palette3", "palette2", "palette4", "palette4-group-16")
    found = ane.compress(network(), forms=several, inputs=GIVEN, smallest=500, for_="size")
    even = ane.compress(network(), forms="palette3", inputs=GIVEN, smallest=500, for_="size")
    assert found.bytes[1] <= even.bytes[1]
    assert {row.form for row in found.weights} <= set(several)


@pytest.mark.parametrize(
    "name", ["int3", "palette5", "sparse-0", "sparse-50-", "zeros-50-int8", "int4-group-8"]
)
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(SurgeryError, match="there is no form .*sparse-50-palette4"):
        read_form(name)


def test_the_command_takes_forms(tmp_path: Path) -> None:
    package = ane.save(ane.load(network()), tmp_path / "network.mlpackage")
    options = []
    for number, values in enumerate(GIVEN[:4]):
        np.savez(tmp_path / f"{number}.npz", **values)
        options += ["--inputs", str(tmp_path / f"{number}.npz")]
    call = ["compress", str(package), str(tmp_path / "out.mlpackage"), *options, "--smallest", "500"]
    done = CliRunner().invoke(cli.app, [*call, "--form", "sparse-50-int8"])
    assert done.exit_code == 0, done.output
    assert "sparse-50-int8" in done.stdout

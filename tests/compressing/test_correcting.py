"""Weights rounded with the error handed on: against a plain GPTQ, and against what an op computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from anesurgery.compressing import grids
from anesurgery.compressing.correcting import Candidate, Correction, correct, find_candidates
from anesurgery.compressing.fitting import fit_form
from anesurgery.compressing.grids import Grid, ScaledGrid
from anesurgery.compressing.input_moments import InputDrift
from anesurgery.compressing.second_order import HessianFactor, round_columns, second_moments, squared_error
from anesurgery.compressing.storing import shift_biases, store
from anesurgery.compressing.weight_forms import read_form
from anesurgery.compressing.weight_rows import WeightRows
from anesurgery.files.package import Loaded
from anesurgery.interpret.core import Executable
from anesurgery.interpret.table import Listener
from anesurgery.mil import Array, Operation, Program, Var, ct, function_of, mb, operands, types

RNG = np.random.default_rng(5)
WIDTH, OUT = 48, 20


FORMS = (
    "int4",
    "int8",
    "palette2",
    "palette3",
    "palette4",
    "palette2-group-5",
    "palette4-vector-2",
    "sparse-50",
    "sparse-50-int4",
    "sparse-50-int8",
    "sparse-50-palette3",
)


def correlated(count: int, width: int = WIDTH) -> Array:
    """Inputs that vary together, some far more than others."""
    mixed = RNG.standard_normal((count, width // 4)) @ RNG.standard_normal((width // 4, width))
    return np.asarray(mixed * np.exp(RNG.standard_normal(width)) + 0.1 * RNG.standard_normal((count, width)))


def plain_gptq(weight: Any, hessian: Any, scale: Any, low: int, high: int) -> Any:
    """GPTQ as it is published, on torch tensors [rows, columns], column by column in order of the diagonal."""
    w, h = weight.clone(), hessian + 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian)).double()
    order = torch.argsort(h.diagonal(), descending=True)
    w, h = w[:, order], h[order][:, order]
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    made = torch.zeros_like(w)
    for i in range(w.shape[1]):
        made[:, i] = torch.clamp(torch.round(w[:, i] / scale), low, high) * scale
        error = (w[:, i] - made[:, i]) / upper[i, i]
        w[:, i:] -= error[:, None] * upper[i, i:]
    return made[:, torch.argsort(order)]


def layer() -> tuple[Array, Array]:
    """A weight and the second moments of its inputs."""
    inputs = torch.from_numpy(correlated(256))[None]
    return RNG.standard_normal((OUT, WIDTH)).astype(np.float16).astype(np.float64), second_moments(inputs)[0]


def four_bits(weight: Array, hessian: Array) -> ScaledGrid:
    grid = fit_form("int4", weight[None], hessian[None], np.arange(len(weight))[None], 0, 2, np.float16)
    assert isinstance(grid, ScaledGrid)
    return grid


@pytest.mark.parametrize("blocks", [(), (7,), (128, 16), (30, 7)])
def test_it_is_a_plain_gptq(monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, ...]) -> None:
    monkeypatch.setattr("anesurgery.compressing.second_order.BLOCKS", blocks)
    weight, hessian = layer()
    grid = four_bits(weight, hessian)
    rounded = round_columns(weight, HessianFactor.of(hessian), lambda column, at: grid.nearest(column, 0, at))
    found = rounded.rows
    assert rounded.error == pytest.approx(squared_error(found - weight, hessian), rel=1e-5)  # sums in fp32
    scale = torch.from_numpy(grid.scales.astype(np.float64))
    plain = plain_gptq(torch.from_numpy(weight), torch.from_numpy(hessian), scale, -8, 7).numpy()
    errors = [squared_error(made - weight, hessian) for made in (found, plain, grid.nearest(weight, 0))]
    assert errors[0] <= 1.01 * errors[1]
    assert errors[0] <= 0.5 * errors[2]


WRONG: dict[str, Callable[[Array], Array]] = {
    "without feedback": lambda hessian: np.diag(np.diag(hessian)),
    "the columns of inputs that are read transposed": lambda hessian: hessian[::-1, ::-1],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_versions_are_noticed(wrong: str) -> None:
    weight, hessian = layer()
    grid = four_bits(weight, hessian)
    factors = [HessianFactor.of(each) for each in (hessian, WRONG[wrong](hessian))]
    found = [
        round_columns(weight, each, lambda column, at: grid.nearest(column, 0, at)).rows for each in factors
    ]
    errors = [squared_error(made - weight, hessian) for made in found]
    assert errors[1] > 1.5 * errors[0]


def test_an_input_that_is_always_zero_changes_nothing_else() -> None:
    weight, hessian = layer()
    hessian[3], hessian[:, 3] = 0, 0
    grid = four_bits(weight, hessian)
    found = round_columns(
        weight, HessianFactor.of(hessian), lambda column, at: grid.nearest(column, 0, at)
    ).rows
    np.testing.assert_array_equal(found[:, 3], grid.nearest(weight[:, 3], 0))
    assert np.isfinite(found).all()


@pytest.mark.one_of(3)
@pytest.mark.parametrize("form", FORMS)
def test_a_weight_that_reads_zeros_alone_is_rounded_to_the_nearest(form: str) -> None:
    """As a second layer where all samples are 0: no table fits nothing better than the one it began with."""
    one = candidate(linear)
    made = correct(one, form, np.zeros((1, WIDTH, WIDTH)), 9)
    weight = np.asarray(one.var.val, np.float64)
    even = correct(one, form, np.eye(WIDTH)[None], 9)
    near, far = (np.square(each.array - weight).mean() for each in (even, made))
    assert near > 0
    assert far <= 2 * near


STORED = [(form, 9) for form in FORMS] + [
    (form, version) for form in FORMS if (version := read_form(form).version) == 7
]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("form", "version"), STORED)
def test_what_is_stored_is_what_was_measured(form: str, version: int) -> None:
    one, hessian = candidate(linear), layer()[1]
    made = correct(one, form, hessian[None], version)
    weight = np.asarray(one.var.val, np.float64)
    off = squared_error(made.array.astype(np.float64) - weight, hessian) / squared_error(weight, hessian)
    assert made.array.dtype == np.float16
    assert made.error == pytest.approx(off, rel=1e-5)  # sums in fp32
    assert made.error <= (1 if read_form(form).kind == "int" and form != "int4" else 0.5) * made.nearest_error


def test_a_second_round_with_fitted_values_is_no_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    one, hessian = candidate(linear), layer()[1]
    found = []
    for rounds in (0, 1, 2):
        monkeypatch.setattr("anesurgery.compressing.fitting.ROUNDS", rounds)
        found.append(correct(one, "palette2", hessian[None], 9).error)
    assert found[2] <= found[1] < found[0]


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def linear(x: Var) -> Var:
    return mb.linear(x=mb.reshape(x=x, shape=(-1, WIDTH)), weight=numbers(OUT, WIDTH).astype(np.float16) / 2)


def conv(**options: Any) -> Callable[[Var], Var]:
    inputs = 6 // options.get("groups", 1)
    return lambda x: mb.conv(x=x, weight=numbers(8, inputs, 3, 2), **options)


def conv_transpose(**options: Any) -> Callable[[Var], Var]:
    return lambda x: mb.conv_transpose(x=x, weight=numbers(6, 4, 3, 2), **options)


OPS: dict[str, Callable[[Var], Var]] = {
    "linear": lambda x: mb.linear(x=x, weight=numbers(7, 8)),
    "matmul": lambda x: mb.matmul(x=x, y=numbers(8, 7)),
    "matmul, turned": lambda x: mb.matmul(x=x, y=numbers(7, 5), transpose_x=True, transpose_y=True),
    "matmul, first": lambda x: mb.matmul(x=numbers(7, 5), y=x),
    "matmul, first and turned": lambda x: mb.matmul(x=numbers(8, 7), y=x, transpose_x=True, transpose_y=True),
    "conv": conv(),
    "conv, same": conv(pad_type="same", strides=[2, 1], dilations=[1, 2]),
    "conv, groups": conv(groups=2, pad_type="custom", pad=[1, 0, 2, 1]),
    "conv, depthwise": lambda x: mb.conv(x=x, weight=numbers(12, 1, 3, 2), groups=6),
    "conv_transpose": conv_transpose(),
    "conv_transpose, steps": conv_transpose(strides=[2, 3], pad_type="custom", pad=[1, 0, 0, 1]),
    "conv_transpose, dilated": conv_transpose(dilations=[2, 1], strides=[3, 1], pad_type="same"),
    "conv_transpose, groups": conv_transpose(groups=2, strides=[2, 1], pad_type="custom", pad=[1, 0, 0, 1]),
    "conv_transpose, depthwise": conv_transpose(groups=6, pad_type="same"),
}


def program_of(build: Callable[[Var], Var], dtype: Any = types.fp32) -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 6, 5, 8), dtype=dtype)], opset_version=ct.target.iOS18)(
        lambda x: build(x)
    )


def candidate(build: Callable[[Var], Var]) -> Candidate:
    function = function_of(program_of(build, types.fp16 if build is linear else types.fp32), None)
    (one,), _ = find_candidates(function, 8)
    return one


class Inputs(Listener):
    """What an op read, as columns of a weight, and what it made."""

    def __init__(self, rows: WeightRows) -> None:
        self.rows, self.read, self.made = rows, torch.empty(0), torch.empty(0)

    def before(self, op: Operation, inputs: Any) -> None:
        if op is self.rows.op:
            found = self.rows.inputs(inputs)
            assert found is not None
            self.read = found

    def after(self, op: Operation, outputs: Any) -> None:
        if op is self.rows.op:
            self.made = outputs[0]


@pytest.mark.parametrize("name", OPS)
def test_the_rows_times_the_inputs_are_what_the_op_computes(name: str) -> None:
    """The wrong version reads the inputs along another axis, or the taps in another order."""
    program = program_of(OPS[name])
    function = function_of(program, None)
    (one,), _ = find_candidates(function, 8)
    reader = one.readers[0]
    seen = Inputs(reader)
    Executable(program)({"x": numbers(2, 6, 5, 8)}, listener=seen)
    weight = np.asarray(one.var.val)
    np.testing.assert_array_equal(reader.from_rows(reader.to_rows(weight)), weight)
    found = reader.to_rows(weight) @ seen.read.numpy().transpose(0, 2, 1)
    expected = seen.made.numpy()
    if "conv" in name:
        batch, channels = expected.shape[:2]
        expected = expected.reshape(batch, reader.groups, channels // reader.groups, -1)
        expected = expected.transpose(1, 2, 0, 3)
    elif "first" in name:
        expected = np.moveaxis(expected, -2, 0)
    else:
        expected = np.moveaxis(expected, -1, 0)
    np.testing.assert_allclose(found, expected.reshape(found.shape), rtol=1e-4, atol=1e-4)


def test_what_is_no_product_is_said() -> None:
    def build(x: Var) -> Var:
        return mb.mul(x=x, y=numbers(6, 5, 8))

    found, why = find_candidates(function_of(program_of(build), None), 8)
    assert not found
    assert list(why.values()) == ["mul reads it as y, which is no product"]


TABLE = RNG.standard_normal((40, 16)).astype(np.float16)


def tied() -> Program:
    """A table that is looked up and read by the head."""

    @mb.program(input_specs=[mb.TensorSpec((1, 12), dtype=types.int32)], opset_version=ct.target.iOS18)
    def program(ids: Var) -> Var:
        table = mb.const(val=TABLE, name="table")
        h = mb.gather(x=table, indices=ids, axis=0)
        h = mb.linear(x=mb.relu(x=h), weight=mb.const(val=TABLE[:16] / 4, name="inner"))
        return mb.linear(x=h, weight=table, name="logits")

    return program


def test_a_tied_table_is_corrected_for_its_head() -> None:
    program = tied()
    chosen, _ = find_candidates(function_of(program, None), 8)
    assert [[r.op.op_type for r in one.readers] for one in chosen] == [["gather", "linear"], ["linear"]]
    samples = [{"ids": RNG.integers(0, 40, (1, 12)).astype(np.int32)} for _ in range(8)]
    done = Correction(
        Loaded(program), "main", samples, chosen, lambda _: "palette3", may_shift_bias=lambda _: False
    )
    outputs = done.run()
    assert [one.candidate.var.name for one in done.corrected] == ["table", "inner"]
    assert done.corrected[0].error < done.corrected[0].nearest_error
    changed = tied()
    for op in function_of(changed, None).operations:
        for one in done.corrected:
            if op.op_type == "const" and op.name == one.candidate.var.name:
                cast(Any, op.outputs[0])._sym_val.val = one.array
    expected = Executable(changed)(samples[3])
    np.testing.assert_allclose(outputs[3]["logits"], expected["logits"], rtol=1e-3, atol=1e-3)
    assert all(v.name for op in function_of(program, None).operations for _, v in operands(op))


def test_later_layers_see_what_is_compressed_in_front() -> None:
    """The wrong version corrects each weight for the inputs of the plain model."""
    program = tied()
    chosen, _ = find_candidates(function_of(program, None), 8)
    samples = [{"ids": RNG.integers(0, 40, (1, 12)).astype(np.int32)} for _ in range(8)]
    both = Correction(Loaded(program), "main", samples, chosen, lambda _: "palette1")
    both.run()
    alone = Correction(Loaded(program), "main", samples, chosen[1:], lambda _: "palette1")
    alone.run()
    assert not np.array_equal(both.corrected[1].array, alone.corrected[0].array)


def test_grids_hold_what_they_round_to() -> None:
    weight, hessian = layer()
    for form in FORMS:
        grid: Grid = fit_form(form, weight[None], hessian[None], np.arange(OUT)[None], 0, 2, np.float16)
        once = grid.nearest(weight, 0)
        np.testing.assert_array_equal(grid.nearest(once, 0), once)
        np.testing.assert_array_equal(
            np.stack([grid.nearest(c, 0, i) for i, c in enumerate(weight.T)], 1), once
        )


OTHER = np.random.default_rng(19)
LAYERS = [(OTHER.standard_normal((n, WIDTH)) / 5).astype(np.float32) for n in (WIDTH, WIDTH, OUT)]


def chain() -> Program:
    """Three layers, each of which adds to what the ones before have lost."""

    @mb.program(input_specs=[mb.TensorSpec((24, WIDTH))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        for weight in LAYERS[:-1]:
            x = mb.relu(x=mb.linear(x=x, weight=weight))
        return mb.linear(x=x, weight=LAYERS[-1], name="y")

    made: Program = program
    return made


WRONG_TARGETS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "twice": lambda drift: drift and replace(drift, crossed=2 * drift.crossed),
    "the other way": lambda drift: drift and replace(drift, crossed=-drift.crossed),
    "transposed": lambda drift: drift and replace(drift, crossed=drift.crossed.transpose(0, 2, 1)),
}


def test_a_weight_takes_up_what_its_inputs_have_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """On inputs that no correction saw."""
    mixed = OTHER.standard_normal((WIDTH // 4, WIDTH))
    drawn = OTHER.standard_normal((40, 24, WIDTH // 4)) @ mixed / 4
    given = [{"x": (each + OTHER.standard_normal(each.shape) / 20).astype(np.float32)} for each in drawn]
    wanted, original = [Executable(chain())(values)["y"] for values in given[30:]], InputDrift.of

    def lost() -> float:
        program = chain()
        chosen, _ = find_candidates(function_of(program, None), 8)
        work = Correction(Loaded(program), "main", given[:30], chosen, lambda _: "palette2")
        work.run()
        for one in work.corrected:
            shift_biases(one, [r.op for r in one.candidate.readers])
        store([program], work.corrected)
        made = [Executable(program)(values)["y"] for values in given[30:]]
        return float(np.square(np.stack(made) - np.stack(wanted)).sum())

    right, wrong = lost(), {}
    for name, change in WRONG_TARGETS.items():
        monkeypatch.setattr(InputDrift, "of", lambda *rest, change=change: change(original(*rest)))
        wrong[name] = lost()
    assert right < 0.9 * min(wrong.values()), (right, wrong)


@pytest.mark.parametrize("form", ["int4", "palette2"])
def test_without_correction_a_tied_head_loses_more(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version rounds the table to the nearest."""
    samples = [{"ids": OTHER.integers(0, 40, (1, 12)).astype(np.int32)} for _ in range(8)]
    errors = []
    for rounds in (2, 0):
        monkeypatch.setattr("anesurgery.compressing.fitting.ROUNDS", rounds)
        program = tied()
        chosen, _ = find_candidates(function_of(program, None), 8)
        work = Correction(Loaded(program), "main", samples, chosen, lambda _: form)
        work.run()
        errors.append(work.corrected[0].error)
    assert errors[0] < 0.9 * errors[1]


def test_scales_clip_where_that_loses_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a table that is looked up, in each of which one number is far larger than the others."""
    table = OTHER.standard_normal((64, 256))
    table[:, 7] *= 4
    errors = []
    for shares in (grids.SHRUNK, (1.0,)):
        monkeypatch.setattr(grids, "SHRUNK", shares)
        grid = fit_form("int4", table[None], np.eye(256)[None], np.arange(64)[None], 0, 2, np.float16)
        errors.append(float(np.square(grid.nearest(table, 0) - table).sum()))
    assert errors[0] < 0.9 * errors[1]

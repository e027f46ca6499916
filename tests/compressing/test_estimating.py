"""Bits for each weight by an estimate: where weights count differently, at the size of equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.compressing import assignment
from anesurgery.compressing.assignment import estimate_forms
from anesurgery.compressing.correcting import correct, find_candidates, form_bytes, plain_moments
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.finished import Finished
from anesurgery.compressing.fitting import fit_form
from anesurgery.compressing.program_compression import weight_bytes
from anesurgery.errors import SurgeryError
from anesurgery.files.package import Loaded
from anesurgery.interpret.forks import Fork
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, function_of, mb, types

RNG = np.random.default_rng(31)
WIDTH = 48
FORMS = ("palette3", "palette2", "palette4", "palette6", "palette8")


def half(*shape: int) -> Any:
    return (RNG.standard_normal(shape) / 6).astype(np.float16)


WEIGHTS = [half(WIDTH, WIDTH) for _ in range(3)]


def branches(sizes: tuple[float, ...]) -> Program:
    """The sum of products of one input, each of which counts as much as it is large."""

    @mb.program(input_specs=[mb.TensorSpec((24, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        total = None
        for number, (weight, size) in enumerate(zip(WEIGHTS, sizes, strict=True)):
            h = mb.mul(x=mb.linear(x=x, weight=weight, name=f"w{number}"), y=np.float16(size))
            total = h if total is None else mb.add(x=total, y=h)
        return mb.identity(x=total, name="logits")

    return program


def samples(count: int = 12) -> list[dict[str, Any]]:
    mixed = RNG.standard_normal((WIDTH // 3, WIDTH)) / 2
    return [
        {"x": (RNG.standard_normal((24, WIDTH // 3)) @ mixed + half(24, WIDTH)).astype(np.float16)}
        for _ in range(count)
    ]


def forms(found: ane.Compression) -> list[str]:
    return [row.form for row in found.weights]


def test_weights_that_count_most_get_more_bits_at_the_same_size() -> None:
    given, program = samples(), branches((1.0, 0.02, 0.02))
    options: dict[str, Any] = {"inputs": given, "for_": "size", "smallest": 1000}
    even, found = (ane.compress(program, 3, mixed=mixed, **options) for mixed in (False, None))
    assert forms(even) == ["palette3"] * 3
    assert forms(found)[0] in ("palette4", "palette6")
    assert set(forms(found)[1:]) <= {"palette2", "palette3"}
    assert found.bytes[1] <= even.bytes[1]
    assert found.loss is not None
    assert even.loss is not None
    assert found.loss.kl < 0.5 * even.loss.kl


@pytest.mark.slow
def test_weights_that_count_alike_get_the_same() -> None:
    """The wrong version trusts small differences of an estimate."""
    found = ane.compress(branches((1.0, 1.0, 1.0)), 3, inputs=samples(), for_="size", smallest=1000)
    assert forms(found) == ["palette3"] * 3


def test_for_speed_all_get_what_was_asked_for() -> None:
    found = ane.compress(branches((1.0, 0.02, 0.02)), 4, inputs=samples(), target="M5", smallest=1000)
    assert forms(found) == ["int4"] * 3


def test_a_weight_is_run_once_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version runs each form, which takes several times as long."""
    runs: list[Any] = []
    monkeypatch.setattr(Fork, "__call__", _counted(Fork.__call__, runs))
    monkeypatch.setattr(assignment, "MOST_RUNS", 5)
    program = branches((1.0, 0.02, 0.02))
    found, _ = find_candidates(function_of(program, None), 1000)
    estimate_forms(Loaded(program), "main", samples(9), dict.fromkeys(found, FORMS), Finished())
    assert len([array for array in runs if array is not None]) == 3 * 5


def _counted(call: Any, runs: list[Any]) -> Any:
    def counted(self: Fork, array: Any = None) -> Any:
        runs.append(array)
        return call(self, array)

    return counted


def test_estimated_errors_are_near_those_after_correction() -> None:
    program, given = branches((1.0, 1.0, 1.0)), samples()
    one, *_ = find_candidates(function_of(program, None), 1000)[0]
    hessians = plain_moments(Loaded(program), "main", given, [one])[one.var]
    trial = assignment._try_on_some_rows(one, FORMS, hessians)
    made = {form: correct(one, form, hessians, 9) for form in FORMS}
    for form in FORMS:
        expected = made[form].error / made[FORMS[0]].nearest_error
        assert 0.5 < trial.errors[form] / expected < 3, form
        assert trial.bytes[form] == form_bytes(made[form].form)


NEWER = ("palette3-group-16", "palette4-vector-2", "sparse-75", "sparse-50-int8", "sparse-50-palette4")


@pytest.mark.parametrize("form", ["int4", "int8", "palette1", "palette3", "palette8", *NEWER])
def test_the_bytes_of_a_grid_are_those_of_its_form(form: str) -> None:
    program = branches((1.0, 1.0, 1.0))
    one, *_ = find_candidates(function_of(program, None), 1000)[0]
    reader, weight = one.readers[0], np.asarray(one.var.val)
    rows = reader.to_rows(weight.astype(np.float64))
    grid = fit_form(form, rows, np.eye(WIDTH)[None], reader.channels, reader.channel_axis, 2, np.float16)
    assert grid.bytes(weight.size) == form_bytes(grid.form(rows, reader.from_rows, np.float16, 9))


@pytest.mark.parametrize(
    ("reference", "changed", "words", "top1"),
    [
        ([[np.inf, 1.0]], [[5.0, 1.0]], "identical but for infinite numbers, which are left out", 1.0),
        ([[1.0, 2.0]], [[1.0, 2.0]], "identical", 1.0),
        ([[1.0, 2.0]], [[np.nan, 2.0]], "an output is not finite any more", 0.0),
    ],
)
def test_what_is_not_finite_is_not_identical(reference: Any, changed: Any, words: str, top1: float) -> None:
    cost = Cost()
    cost.add({"y": np.array(reference)}, {"y": np.array(changed)})
    assert (cost.words(chooses=False), cost.top1) == (words, top1)


def test_a_weight_that_breaks_the_outputs_costs_most() -> None:
    """The wrong version leaves out forms of infinite cost, and takes the weight for one that costs nothing."""
    program = branches((1.0, 1.0, 1.0))
    one, *_ = find_candidates(function_of(program, None), 1000)[0]
    trial = assignment._try_on_some_rows(one, FORMS, np.eye(WIDTH)[None])
    cost = Cost()
    cost.add({"y": np.ones((2, 4))}, {"y": np.full((2, 4), np.inf)})
    costs = [option.kl for option in assignment._estimated_options(trial, cost).values()]
    assert np.isfinite(costs).all()
    assert min(costs) > 1e3


@pytest.mark.slow
def test_weights_take_the_bytes_that_are_asked_for() -> None:
    """The wrong version takes the bytes of equal forms, or lets biases that weights gain take more."""
    given, program = samples(), branches((1.0, 0.02, 0.02))
    options: dict[str, Any] = {"inputs": given, "for_": "size", "smallest": 1000}
    losses = []
    for room in (2500, 3600, 5200):
        found = ane.compress(program, 3, max_bytes=room, **options)
        assert 0.85 * room < found.bytes[1] <= room
        assert found.loss is not None
        losses.append(found.loss.kl)
    assert losses[0] > 2 * losses[1] > 4 * losses[2]
    named = ane.compress(program, 4, max_bytes=4500, forms=("palette4-group-16", "palette6"), **options)
    assert set(forms(named)) <= {"palette4-group-16", "palette6"}
    assert named.bytes[1] <= 4500
    with pytest.raises(SurgeryError, match="the smallest forms measured take"):
        ane.compress(program, 4, max_bytes=900, **options)
    with pytest.raises(
        SurgeryError, match="leaves 5 bytes to a program, but .* cannot be compressed; give more"
    ):
        ane.compress(program, 4, max_bytes="5 B", **options)
    with pytest.raises(SurgeryError, match="bits=8, without mixed and max_bytes"):
        ane.compress(program, 8, max_bytes=4000, activations="max", **options)


def test_weights_inside_a_branch_count() -> None:
    weight = np.ones((64, 64), np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, 64), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        is_large = mb.greater(x=mb.reduce_max(x=x), y=np.float16(1))
        yes, no = (lambda: mb.linear(x=x, weight=weight)), (lambda: mb.linear(x=x, weight=2 * weight))
        return mb.cond(pred=is_large, _true_fn=yes, _false_fn=no)

    assert 2 * weight.nbytes < weight_bytes(load(program)) < 2.1 * weight.nbytes

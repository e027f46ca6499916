"""What lies beyond fp16 between two values is computed in fp32: forms, twins, types, wrong versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from pass_cases import stays, table

import anesurgery as ane
from anesurgery.checking.output_comparison import psnr
from anesurgery.interpret import run
from anesurgery.interpret.arithmetic.precision import Double
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.compute_fp16 import ComputeFp16
from anesurgery.passes.widen_to_fp32 import WidenToFp32
from anesurgery.show.costs import costs
from anesurgery.testing import apply_pass

HALF = np.float16
GOOD = 60.0


def program(
    body: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]], dtype: Any = types.fp16
) -> Program:
    specs = [mb.TensorSpec(shape, dtype=dtype) for shape in shapes.values()]

    return mb.program(input_specs=specs)(lambda a, b: body(a, b))


def rows(reduce: Callable[..., Var], x: Var, axis: int = -1) -> Var:
    return reduce(x=x, axes=[axis], keep_dims=True)


def ratio(a: Var, b: Var) -> Var:
    square = mb.square(x=a)
    return mb.real_div(x=square, y=mb.add(x=square, y=HALF(1)), name="y")


def plain_ratio(a: Var, b: Var) -> Var:
    return mb.real_div(x=a, y=mb.add(x=mb.abs(x=a), y=np.float32(3)), name="y")


def generalized_mean(a: Var, b: Var) -> Var:
    return mb.pow(x=rows(mb.reduce_mean, mb.pow(x=mb.abs(x=a), y=HALF(3))), y=HALF(1 / 3), name="y")


def kurtosis(a: Var, b: Var) -> Var:
    square = mb.square(x=a)
    fourth = rows(mb.reduce_mean, mb.square(x=square))
    return mb.real_div(x=fourth, y=mb.square(x=rows(mb.reduce_mean, square)), name="y")


def shares(a: Var, b: Var) -> Var:
    e = mb.sigmoid(x=a)
    return mb.real_div(x=mb.matmul(x=e, y=b, transpose_y=True), y=rows(mb.reduce_sum, e), name="y")


def distances(a: Var, b: Var) -> Var:
    x, y = rows(mb.reduce_sum, mb.square(x=a)), mb.reduce_sum(x=mb.square(x=b), axes=[-1], keep_dims=False)
    twice = mb.mul(x=mb.matmul(x=a, y=b, transpose_y=True), y=HALF(2))
    return mb.sub(x=mb.add(x=x, y=y), y=twice, name="y")


def roots(a: Var, b: Var) -> Var:
    size = mb.abs(x=a)
    return mb.sub(x=mb.sqrt(x=mb.add(x=size, y=HALF(1))), y=mb.sqrt(x=size), name="y")


def divergence(a: Var, b: Var) -> Var:
    """exp(a) - 1 - a, the part of a variance in what one bell curve is told from another by."""
    return mb.sub(x=mb.sub(x=mb.exp(x=a), y=HALF(1)), y=a, name="y")


def angle(a: Var, b: Var) -> Var:
    return mb.sin(x=mb.mul(x=a, y=np.linspace(0.1, 1, 64, dtype=HALF)), name="y")


def log_of_rest(a: Var, b: Var) -> Var:
    return mb.log(x=mb.sub(x=HALF(1), y=mb.exp(x=mb.mul(x=mb.abs(x=a), y=HALF(-1)))), epsilon=HALF(0), name="y")


def log_of_product(a: Var, b: Var) -> Var:
    return mb.log(x=rows(mb.reduce_prod, mb.sigmoid(x=a)), epsilon=HALF(0), name="y")


def overlap(a: Var, b: Var) -> Var:
    """The area that two boxes share, by that of both: lengths in pixels, whose products leave fp16."""
    one, other = (mb.abs(x=mb.reshape(x=v, shape=[-1, 64, 2])) for v in (a, b))
    one = mb.slice_by_size(x=one, begin=[0, 0, 0], size=[1, 64, 2])
    area = (mb.reduce_prod(x=v, axes=[-1]) for v in (one, other, mb.minimum(x=one, y=other)))
    first, second, both = area
    return mb.real_div(x=both, y=mb.sub(x=mb.add(x=first, y=second), y=both), name="y")


FORMS: dict[str, tuple[Callable[[Var, Var], Var], float]] = {
    "product of three": (
        lambda a, b: mb.mul(x=mb.mul(x=a, y=b), y=mb.mul(x=rows(mb.reduce_max, a), y=HALF(1e-5)), name="y"),
        400.0,
    ),
    "ratio": (ratio, 500.0),
    "generalized mean": (generalized_mean, 60.0),
    "kurtosis": (kurtosis, 30.0),
    "overlap of boxes": (overlap, 600.0),
    "shares": (shares, 8000.0),
    "distances": (distances, 0.0),
    "exp(x) - 1": (lambda a, b: mb.sub(x=mb.exp(x=a), y=HALF(1), name="y"), 1e-3),
    "1 - exp(x)": (lambda a, b: mb.sub(x=HALF(1), y=mb.exp(x=a), name="y"), 1e-3),
    "divergence of bell curves": (divergence, 0.02),
    "a difference of roots": (roots, 0.0),
    "a root less that of a number": (
        lambda a, b: mb.sub(x=mb.sqrt(x=mb.add(x=mb.abs(x=a), y=HALF(2))), y=HALF(2**0.5), name="y"),
        1e-2,
    ),
    "log(1 + x)": (lambda a, b: mb.log(x=mb.add(x=mb.abs(x=a), y=HALF(1)), epsilon=HALF(0), name="y"), 1e-3),
    "angle": (angle, 700.0),
    "logarithm of the rest": (log_of_rest, 1e-3),
    "logarithm of a product": (log_of_product, 1.0),
}
"""Name -> the form, and the size of numbers on which it fails; 0 for numbers that lie near each other."""
SHAPES = {"a": (4, 64), "b": (8, 64)}
SAME = {"a": (4, 64), "b": (4, 64)}


def draw(scale: float, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    drawn = {n: rng.standard_normal(s) for n, s in shapes.items()}
    return {n: (v * scale if scale else v + 40).astype(HALF) for n, v in drawn.items()}


def decibels(model: Program, values: dict[str, Any], exact: Any, precision: str) -> float:
    (value,) = run(model, values, precision=precision).values()
    found = np.asarray(value, np.float64)
    if not np.isfinite(found).all():
        return -np.inf
    return psnr(float(np.abs(exact).max()), float(np.sqrt(np.mean((found - exact) ** 2))))


def of(name: str) -> tuple[Program, dict[str, Any], Any]:
    body, scale = FORMS[name]
    shapes = SAME if name == "product of three" else SHAPES
    model, values = program(body, shapes), draw(scale, shapes)
    (exact,) = run(model, values, precision=Double()).values()  # type: ignore[arg-type]
    return model, values, np.asarray(exact, np.float64)


@pytest.mark.parametrize("name", FORMS)
def test_numbers_are_right_in_fp16_and_beside_the_engine(name: str) -> None:
    model, values, exact = of(name)
    after, session = apply_pass(WidenToFp32(), model)
    assert [c.proof is not None and c.proof.grade.words == "proved" for c in session.changes] == [True]
    for precision in ("fp16", "ane", "ane:M1"):
        assert decibels(after, values, exact, precision) >= GOOD, precision
    assert min(decibels(model, values, exact, p) for p in ("fp16", "ane")) < GOOD


@pytest.mark.parametrize("name", FORMS)
def test_it_is_named_and_not_any_more(name: str) -> None:
    rules = {"num-between", "num-cancel", "num-angle"}
    model = of(name)[0]
    found = [f for f in ane.inspect(model, target="M1/macOS 14").all_findings if f.rule in rules]
    assert {f.remedy for f in found} == {"widen_to_fp32"}
    after = apply_pass(WidenToFp32(), model)[0]
    assert not [f for f in ane.inspect(after, target="M1/macOS 14").all_findings if f.rule in rules]


@pytest.mark.parametrize("name", [n for n in FORMS if not n.startswith("log")])
def test_of_bounded_numbers_nothing_is_changed_or_said(name: str) -> None:
    body = FORMS[name][0]
    shapes = SAME if name == "product of three" else SHAPES
    model = program(lambda a, b: body(mb.tanh(x=a), mb.tanh(x=b)), shapes)
    assert not apply_pass(WidenToFp32(), model)[1].changes
    assert not [f for f in ane.inspect(model, target="M1/macOS 14").all_findings if f.kind == "numeric"]


@pytest.mark.parametrize(("factor", "speaks"), [(4.0, False), (-0.5, False), (3.0, True), (4096.0, True)])
def test_an_angle_that_nothing_rounds_is_left_alone(factor: float, speaks: bool) -> None:
    """An input of fp16 times a power of two; a large one overflows."""
    model = program(lambda a, b: mb.sin(x=mb.mul(x=a, y=HALF(factor)), name="y"), SAME)
    assert bool(apply_pass(WidenToFp32(), model)[1].changes) is speaks
    found = [f.rule for f in ane.inspect(model, target="M1/macOS 14").all_findings if f.kind == "numeric"]
    assert found == ["num-angle"] * speaks


BELL = np.outer([1, 2, 1], [1, 2, 1]).astype(HALF).reshape(1, 1, 3, 3) / HALF(16)


def weighted_variance(kernel: Any, other: Any = None) -> Program:
    """The variance of windows by a convolution, as a structural similarity has it."""

    @mb.program(input_specs=[mb.TensorSpec((1, 1, 12, 12), dtype=types.fp16)])
    def program(x: Var) -> Var:
        mean = mb.conv(x=x, weight=kernel if other is None else other)
        return mb.sub(x=mb.conv(x=mb.square(x=x), weight=kernel), y=mb.square(x=mean), name="y")

    return program


def test_variances_of_weighted_windows() -> None:
    model = weighted_variance(BELL)
    x = {"x": (20 + np.random.default_rng(0).random((1, 1, 12, 12))).astype(HALF)}
    after = apply_pass(WidenToFp32(), model)[0]
    (exact,) = run(model, x, precision=Double()).values()  # type: ignore[arg-type]
    assert decibels(model, x, exact, "fp16") < 20
    assert decibels(after, x, exact, "fp16") > GOOD
    found = {f.rule for f in ane.inspect(model, target="M1/macOS 14").all_findings if f.kind == "numeric"}
    assert found == {"num-square", "num-cancel"}


@pytest.mark.slow
def test_long_chains_are_looked_at_as_far_as_a_region_reaches() -> None:
    @mb.program(input_specs=[mb.TensorSpec((400, 4), dtype=types.fp16)])
    def chain(a: Var) -> Var:
        value, *others = mb.split(x=a, num_splits=400, axis=0)
        for other in others:
            value = mb.mul(x=value, y=mb.sigmoid(x=other))
        return mb.mul(x=value, y=value, name="y")

    assert not apply_pass(WidenToFp32(), chain)[1].changes


def test_programs_of_fp32_stay_and_islands_are_kept_by_compute_fp16() -> None:
    assert not apply_pass(WidenToFp32(), program(plain_ratio, SHAPES, types.fp32))[1].changes
    island = apply_pass(WidenToFp32(), program(ratio, SHAPES))[0]
    after, session = apply_pass(ComputeFp16(), island)
    assert not session.changes
    assert any("it was widened to fp32" in str(refusal) for _, refusal in session.refusals)
    values = draw(500.0, SHAPES)
    assert np.isfinite(run(after, values, precision="fp16")["y"]).all()


def test_in_a_program_of_fp32_the_engine_rounds_all_ops_and_beside_fp16_none_of_fp32() -> None:
    """What an arithmetic of one type cannot tell: the engine takes no ops of fp32."""
    values = {n: v.astype(np.float32) for n, v in draw(500.0, SHAPES).items()}
    whole = program(plain_ratio, SHAPES, types.fp32)
    assert not np.array_equal(run(whole, values, precision="ane")["y"], run(whole, values)["y"])
    mixed = program(
        lambda a, b: (plain_ratio(a, b), mb.relu(x=mb.cast(x=b, dtype="fp16"), name="half")), SHAPES, types.fp32
    )
    found = run(mixed, values, precision="ane")
    assert np.array_equal(found["y"], run(whole, values)["y"])
    assert np.array_equal(found["half"], found["half"].astype(HALF))


def test_names_of_ops_may_be_one_word_and_exist() -> None:
    model = program(lambda a, b: mb.add(x=mb.mul(x=a, y=b, name="p"), y=b, name="q"), SAME)
    one: Any = "p, q"
    assert [c.where for c in ane.apply(model, WidenToFp32(ops=one), quiet=True).changes] == ["p", "q"]
    with pytest.raises(ane.SurgeryError, match="unknown op or value 'r'"):
        ane.apply(model, WidenToFp32(ops=("p", "r")), quiet=True)
    with pytest.raises(ane.SurgeryError, match="unknown op or value 'r'"):
        ane.apply(model, ComputeFp16(keep=["r"]), quiet=True)


test_cases, test_surroundings = table(
    WidenToFp32(),
    *(
        stays(program, body, SAME)
        for body in [
            lambda a, b: mb.mul(x=mb.mul(x=a, y=a), y=a, name="y"),
            lambda a, b: mb.mul(x=mb.silu(x=a), y=b, name="y"),
            lambda a, b: mb.softmax(
                x=mb.mul(x=mb.matmul(x=a, y=b, transpose_y=True), y=HALF(0.1)), axis=-1, name="y"
            ),
            lambda a, b: mb.mul(
                x=a, y=mb.rsqrt(x=mb.add(x=mb.sigmoid(x=b), y=HALF(1)), epsilon=HALF(0)), name="y"
            ),
            lambda a, b: mb.exp(x=mb.mul(x=mb.square(x=a), y=HALF(-1)), name="y"),
            lambda a, b: mb.inverse(x=mb.add(x=mb.square(x=a), y=HALF(1)), epsilon=HALF(0), name="y"),
        ]
    ),
    *(
        stays(weighted_variance, *kernels)
        for kernels in [(BELL * HALF(2),), (-BELL,), (BELL, np.flip(BELL, -1) * HALF(0.5))]
    ),
)


CODES = np.random.default_rng(0).integers(3, 7, (256, 32)).astype(np.float16)
"""Rows whose squared lengths fp16 holds; others are rounded when a model is converted, for good."""
LENGTHS = np.square(CODES, dtype=np.float64).sum(1)


def times_codes(x: Var) -> Var:
    return mb.matmul(x=x, y=CODES.T.copy())


def by_squares(x: Var) -> Var:
    total = mb.add(x=mb.reduce_sum(x=mb.square(x=x), axes=[-1], keep_dims=True), y=LENGTHS.astype(np.float16))
    return mb.reduce_argmin(x=mb.sub(x=total, y=mb.mul(x=times_codes(x), y=np.float16(2))), axis=-1)


def by_lengths(x: Var) -> Var:
    product = mb.mul(x=times_codes(x), y=np.float16(2))
    return mb.reduce_argmin(x=mb.sub(x=LENGTHS.astype(np.float16), y=product), axis=-1)


def by_bias(x: Var) -> Var:
    """The negative, halved, as one linear."""
    bias = (-LENGTHS / 2).astype(np.float16)
    return mb.reduce_argmax(x=mb.linear(x=x, weight=CODES, bias=bias), axis=-1)


def by_scores(x: Var) -> Var:
    """No distance: the bias has nothing to do with the rows."""
    bias = np.random.default_rng(1).standard_normal(256).astype(np.float16)
    return mb.reduce_argmax(x=mb.linear(x=x, weight=CODES, bias=bias), axis=-1)


@pytest.mark.parametrize("build", [by_squares, by_lengths, by_bias])
def test_the_nearest_row_is_chosen_in_fp32(build: Callable[[Var], Var]) -> None:
    spec = mb.TensorSpec((400, 32), dtype=types.fp16)
    program = mb.program(input_specs=[spec], opset_version=ct.target.iOS17)(lambda x: build(x))
    x = (np.random.default_rng(2).integers(24, 48, (400, 32)) / 8).astype(np.float16)
    exact = (LENGTHS - 2 * x.astype(np.float64) @ CODES.T.astype(np.float64)).argmin(1)

    def wrong(one: Program) -> float:
        return float(np.mean(next(iter(ane.run(one, {"x": x}, precision="fp16").values())) != exact))

    first = costs(ane.inspect(program, "M4"))
    (said,) = (problem for problem in first if problem.rule == "num-cancel")
    assert "may take a neighbour of the nearest row" in said.why
    assert wrong(program) > 0.02
    widened = ane.apply(program, "widen_to_fp32", quiet=True).program
    assert wrong(widened) == 0


def test_the_best_score_is_not_taken_for_the_nearest_row() -> None:
    spec = mb.TensorSpec((4, 32), dtype=types.fp16)
    program = mb.program(input_specs=[spec], opset_version=ct.target.iOS17)(lambda x: by_scores(x))
    assert "num-cancel" not in {f.rule for f in ane.inspect(program).all_findings}

"""The arithmetic of the Neural Engine: each modelled row against what was measured, or a plain loop."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from anesurgery.errors import InterpretError
from anesurgery.interpret import run
from anesurgery.interpret.arithmetic import neural_engine, properties
from anesurgery.interpret.arithmetic import neural_engine as products
from anesurgery.mil import Array, Program, Var, ct, mb, types

RNG = np.random.default_rng(5)


def program_of(build: Any, *shapes: tuple[int, ...], half: bool = True) -> Program:
    """A program of fp16 inputs a, b, ... and one output."""
    dtype = types.fp16 if half else types.fp32
    specs = [mb.TensorSpec(s, dtype=dtype) for s in shapes]

    def one(a: Var) -> Var:
        return build(a)

    def two(a: Var, b: Var) -> Var:
        return build(a, b)

    made = mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    return made(one if len(shapes) == 1 else two)


def on_ane(build: Any, *values: Any, chip: str = "", half: bool = True) -> Array:
    """The only output of a program run in the engine's arithmetic."""
    arrays = [np.asarray(v, np.float16 if half else np.float32) for v in values]
    program = program_of(build, *(a.shape for a in arrays), half=half)
    given = dict(zip("ab", arrays, strict=False))
    (made,) = run(program, given, precision=f"ane:{chip}" if chip else "ane").values()
    return np.asarray(made, np.float32)


def plain_sum(terms: Array) -> float:
    """A sum with a sticky ceiling, as it is documented: one addition after the other."""
    total = np.float32(0)
    for term in terms:
        total += term
        if abs(total) >= 32768:
            return math.copysign(math.inf, total)
    return float(total)


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [
        ([200, 100], [100, 100], 30000),
        ([256, 128], [128, 128], math.inf),
        ([-256, -128], [128, 128], -math.inf),
        ([256, 128, -256], [128, 128, 128], math.inf),  # what follows does not undo it
        ([256, -256, 128], [127, 128, 128], 16128),
        ([255.875, 127.875], [128, 0], 32752),
    ],
)
def test_products_stop_at_32768(row: list[float], column: list[float], expected: float) -> None:
    found = on_ane(lambda a, b: mb.matmul(x=a, y=b), [row], np.reshape(column, (-1, 1)))
    assert found.item() == expected
    assert np.float16(plain_sum(np.array(row, np.float32) * np.array(column, np.float32))) == expected


@pytest.mark.parametrize("transpose", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("lead", [((), ()), ((2,), (2,)), ((3, 1), (2,))])
def test_partial_sums_of_a_matmul(transpose: tuple[bool, bool], lead: Any) -> None:
    x = (RNG.standard_normal((*lead[0], 4, 16)) * 85).astype(np.float16)
    y = (RNG.standard_normal((*lead[1], 16, 5)) * 85).astype(np.float16)
    a = x.swapaxes(-1, -2) if transpose[0] else x
    b = y.swapaxes(-1, -2) if transpose[1] else y
    found = on_ane(lambda a, b: mb.matmul(x=a, y=b, transpose_x=transpose[0], transpose_y=transpose[1]), a, b)
    terms = x.astype(np.float32)[..., :, None, :] * y.astype(np.float32).swapaxes(-1, -2)[..., None, :, :]
    expected = np.apply_along_axis(plain_sum, -1, terms)
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float16).astype(np.float32)
    assert 0 < np.isinf(expected).sum() < expected.size
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1)
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


def test_a_product_of_an_empty_batch_is_empty() -> None:
    found = on_ane(lambda a, b: mb.matmul(x=a, y=b), np.zeros((0, 3, 4)), np.zeros((0, 4, 2)))
    assert found.shape == (0, 3, 2)


def test_partial_sums_of_a_linear_start_from_the_bias() -> None:
    weight, bias = (np.array([[1.0, 1.0], [1.0, 1.0]], np.float16), np.array([30000.0, 0.0], np.float16))
    found = on_ane(lambda a: mb.linear(x=a, weight=weight, bias=bias), [[5000.0, -5000.0]])
    np.testing.assert_array_equal(found, [[math.inf, 0.0]])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "form",
    [
        {"pad_type": "valid"},
        {"pad_type": "same", "strides": [2, 1]},
        {"pad_type": "custom", "pad": [1, 0, 2, 1], "dilations": [1, 2]},
    ],
)
def test_partial_sums_of_a_convolution(groups: int, form: dict[str, Any]) -> None:
    x = (RNG.standard_normal((2, 4, 6, 5)) * 100).astype(np.float16)
    weight = (RNG.standard_normal((6, 4 // groups, 3, 2)) * 100).astype(np.float16)
    bias = RNG.standard_normal(6).astype(np.float16)
    found = on_ane(lambda a: mb.conv(x=a, weight=weight, bias=bias, groups=groups, **form), x)
    exact = run(
        program_of(lambda a: mb.conv(x=a, weight=weight, bias=bias, groups=groups, **form), x.shape), {"a": x}
    )
    total = next(iter(exact.values()))
    summed = products.SUMS["conv"](
        torch.from_numpy(x).float(),
        torch.from_numpy(weight).float(),
        torch.from_numpy(bias).float(),
        groups=groups,
        **form,
    )
    places = torch.tensor(list(np.ndindex(*total.shape)))
    terms = summed.terms(places).numpy()
    np.testing.assert_allclose(terms.sum(-1).reshape(total.shape), total, rtol=1e-4, atol=0.5)
    expected = np.apply_along_axis(plain_sum, -1, terms).reshape(total.shape)
    assert 0 < np.isinf(expected).sum() < expected.size
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


def test_one_term_and_elementwise_keep_the_range_of_fp16() -> None:
    one = np.array([[[[250.0]]]], np.float16)
    assert on_ane(lambda a: mb.conv(x=a, weight=one), [[[[250.0]]]]).item() == 62496
    assert on_ane(lambda a, b: mb.mul(x=a, y=b), [250.0], [250.0]).item() == 62496
    assert on_ane(lambda a, b: mb.mul(x=a, y=b), [256.0], [256.0]).item() == math.inf


@pytest.mark.parametrize(
    ("chip", "expected"), [("", 2048), ("M1", 2048), ("M2", 2050), ("M4", 2050), ("M5", 2050), ("M6", 2050)]
)
def test_ties(chip: str, expected: float) -> None:
    assert on_ane(lambda a, b: mb.add(x=a, y=b), [2048.0], [1.0], chip=chip).item() == expected


def test_ties_away_changes_nothing_but_ties() -> None:
    values = torch.from_numpy(np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 300)
    away, even = neural_engine.rounding("M4")(values), neural_engine.rounding(None)(values)
    np.testing.assert_array_equal(away, even)
    exact = torch.tensor([1.0, -2.0, 0.0, 65504.0, 3.5, -math.inf, math.inf])
    np.testing.assert_array_equal(neural_engine.rounding("M4")(exact), exact)
    ties = torch.tensor([2049.0, 2051.0, -2049.0])
    np.testing.assert_array_equal(neural_engine.rounding("M4")(ties), [2050.0, 2052.0, -2050.0])


def test_no_nan_comes_out() -> None:
    assert on_ane(lambda a, b: mb.sub(x=a, y=b), [math.inf], [math.inf]).item() == 0
    assert on_ane(lambda a, b: mb.mul(x=a, y=b), [math.inf], [0.0]).item() == 0
    assert on_ane(lambda a: mb.relu(x=a), [math.nan]).item() == math.inf
    assert on_ane(lambda a: mb.sqrt(x=a), [-1.0]).item() == 0
    row = on_ane(lambda a: mb.softmax(x=a, axis=-1), [1.0, -math.inf])
    np.testing.assert_array_equal(row, [1.0, 0.0])


REFERENCES: dict[str, tuple[Any, Any, float]] = {
    "sigmoid": (lambda a: mb.sigmoid(x=a), torch.sigmoid, 3.4e-3),
    "tanh": (lambda a: mb.tanh(x=a), torch.tanh, 1.7e-3),
    "gelu": (lambda a: mb.gelu(x=a, mode="EXACT"), torch.nn.functional.gelu, 6.2e-3),
    "silu": (lambda a: mb.silu(x=a), torch.nn.functional.silu, 1.5e-2),
    "erf": (lambda a: mb.erf(x=a), torch.erf, 8.6e-4),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_activations_are_as_far_off_as_was_measured(name: str) -> None:
    build, exact, error = REFERENCES[name]
    x = np.linspace(-12, 12, 20001).astype(np.float16)
    rounding = 2.0**-11 * 12  # of results of the size of the input
    off = np.abs(on_ane(build, x) - exact(torch.from_numpy(x).float()).numpy())
    small = np.abs(x) < 2
    assert 0.8 * error < off.max() < error + rounding
    assert off[small].max() < error + 2.0**-11 * 2
    assert off.max() > 0


HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
FINITE = HALVES[np.isfinite(HALVES)]


def steps_apart(a: Any, b: Any) -> Any:
    """How many numbers of fp16 lie between two."""
    bits = [np.asarray(v, np.float16).view(np.int16).astype(int) for v in (a, b)]
    ordered = [np.where(n < 0, -(n & 0x7FFF), n) for n in bits]
    return np.abs(ordered[0] - ordered[1])


@pytest.mark.parametrize(
    ("build", "points", "exact"),
    [
        (lambda a: mb.sigmoid(x=a), np.linspace(-8, 8, 33), lambda v: 1 / (1 + np.exp(-v))),
        (lambda a: mb.tanh(x=a), np.linspace(-4, 4, 65), np.tanh),
    ],
    ids=["sigmoid", "tanh"],
)
def test_on_m1_the_points_of_the_tables_are_exact(build: Any, points: Any, exact: Any) -> None:
    found = on_ane(build, points, chip="M1")
    np.testing.assert_array_equal(found, exact(points).astype(np.float16).astype(np.float32))


def test_on_m1_tanh_is_off_by_as_much_as_was_published() -> None:
    """11 units in the last place at most, over all numbers, and no more than measured."""
    found = on_ane(lambda a: mb.tanh(x=a), FINITE, chip="M1")
    exact = np.tanh(FINITE.astype(np.float64)).astype(np.float16)
    assert steps_apart(found, exact).max() == 11
    assert np.abs(found - exact).max() < 1.7e-3


def test_on_m1_sigmoid_is_off_by_as_much_as_was_published() -> None:
    inside = FINITE[np.abs(FINITE) <= 8]
    found = on_ane(lambda a: mb.sigmoid(x=a), inside, chip="M1")
    exact = 1 / (1 + np.exp(-inside.astype(np.float64)))
    assert np.abs(found - exact).max() == pytest.approx(3.4e-3, abs=1e-4)
    ends = on_ane(lambda a: mb.sigmoid(x=a), [8.3203125, 100.0, -9.9453125, -100.0], chip="M1")
    np.testing.assert_array_equal(ends, [1, 1, 0, 0])


def test_the_published_units_of_sigmoid_are_those_of_its_arguments_from_minus_2_on() -> None:
    """25 units in the last place were published, over the arguments of one model.

    Between points half apart a straight line is off by more further left, however it is rounded: by a 32nd
    of the value, which is 1024 to 2047 units.
    """

    def exact(x: Any) -> Any:
        return 1 / (1 + np.exp(-np.asarray(x, np.float64)))

    inside = FINITE[np.abs(FINITE) <= 8].astype(np.float64)
    left = np.floor(np.clip(inside, -8, 7.99) * 2) / 2
    line = exact(left) + (exact(left + 0.5) - exact(left)) * (inside - left) * 2
    found = on_ane(lambda a: mb.sigmoid(x=a), inside, chip="M1")
    for made in (line, found):
        off = steps_apart(made, exact(inside))
        assert off[inside >= -2].max() == 25
        assert off.max() >= 60


def test_the_rounding_between_points_is_ties_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong versions: ties to even, and one rounding in place of two."""
    x = np.linspace(-4, 4, 4001).astype(np.float16)
    right = on_ane(lambda a: mb.tanh(x=a), x, chip="M1")
    for wrong in (neural_engine._ties_even, lambda value: value):
        monkeypatch.setattr(neural_engine, "_ties_away", wrong)
        assert (on_ane(lambda a: mb.tanh(x=a), x, chip="M1") != right).any()


def test_products_on_m2_lie_on_a_grid() -> None:
    tiny = 2.0**-9
    for chip, expected in (("M2", [2.0**-16, 0.0]), ("M4", [2.0**-17, 2.0**-18])):
        column = [[2.0**-8], [tiny]]
        found = on_ane(lambda a, b: mb.matmul(x=a, y=b), column, [[tiny]], chip=chip)
        np.testing.assert_array_equal(found.ravel(), expected)


@pytest.mark.parametrize(
    ("row", "chip"),
    [("measured_tables", "M1"), ("grid", "M2"), ("code_ties", "M5"), ("cast_ties", "M5"), ("code_scale", "M5")],
)
def test_what_one_chip_was_measured_for_is_not_told_of_others(row: str, chip: str) -> None:
    applied = [c for c in (None, *properties.CHIPS) if properties.applies(row, c)]
    assert applied == [chip]


def test_slices_inside_the_last_axis() -> None:
    def part(a: Var) -> Var:
        return mb.slice_by_index(x=a, begin=[1], end=[4])

    def first(a: Var) -> Var:
        return mb.slice_by_index(x=a, begin=[0], end=[3])

    def halves(a: Var) -> Var:
        return mb.split(x=a, num_splits=2, axis=0)[1]

    x = [4096.0, 4094.0, -4096.0, 4096.0]
    inf = math.inf
    for chip in ("M1", "M2"):
        np.testing.assert_array_equal(on_ane(part, x, chip=chip), [4094.0, -inf, inf])
        np.testing.assert_array_equal(on_ane(first, x, chip=chip), x[:3])
        np.testing.assert_array_equal(on_ane(halves, x, chip=chip), [-inf, inf])
    for chip in ("", "M5"):
        np.testing.assert_array_equal(on_ane(part, x, chip=chip), x[1:])


def test_m1_flushes_small_operands_of_products() -> None:
    x, y = [[2.0**-15, 1.0]], [[1.0], [2.0**-13]]
    assert on_ane(lambda a, b: mb.matmul(x=a, y=b), x, y).item() == 2.0**-15 + 2.0**-13
    assert on_ane(lambda a, b: mb.matmul(x=a, y=b), x, y, chip="M1").item() == 2.0**-13


def codes(x: Var, scale: float = 1.0, name: str | None = None) -> Var:
    """A value quantized and dequantized."""
    half = np.float16(scale)
    code = mb.quantize(input=x, scale=half, output_dtype="int8")
    return mb.dequantize(input=code, scale=half, **({"name": name} if name else {}))


def test_codes_of_all_numbers_on_m5_are_rounded_away_from_zero() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    x = bits[np.isfinite(bits)]
    assert x.size == 63488
    found, wide = on_ane(codes, x, chip="M5"), x.astype(np.float64)
    away = np.clip(np.sign(wide) * np.floor(np.abs(wide) + 0.5), -128, 127)
    np.testing.assert_array_equal(found, away)
    even = on_ane(codes, x, chip="M4")
    assert (even != found).any()
    np.testing.assert_array_equal(even, np.clip(np.round(wide), -128, 127))


def quantized_product(result: float, between: Any = lambda product: product, factors: int = 1) -> Any:
    """a * DQ(Q(b)), quantized by the scale of the result; both factors are quantized where `factors` is 2."""

    def build(a: Var, b: Var) -> Var:
        first = codes(a, 1 / 16) if factors == 2 else a
        return codes(between(mb.mul(x=first, y=codes(b, 1 / 16))), result)

    return build


@pytest.mark.parametrize(("result", "expected"), [(1 / 16, 1), (1 / 8, 2), (1 / 4, 4), (1 / 2, 8)])
def test_products_that_are_quantized_take_the_wrong_scale_on_m5(result: float, expected: float) -> None:
    assert on_ane(quantized_product(result), [1.0], [1.0], chip="M5").item() == expected
    assert on_ane(quantized_product(result), [1.0], [1.0], chip="M4").item() == 1


@pytest.mark.parametrize(
    "build",
    [
        quantized_product(
            0.5, lambda product: mb.clip(x=product, alpha=np.float16(-64), beta=np.float16(63.5))
        ),
        quantized_product(0.5, factors=2),
        lambda a, b: mb.add(x=(y := mb.mul(x=a, y=codes(b, 1 / 16))), y=mb.sub(x=codes(y, 0.5), y=y)),
    ],
    ids=["clipped", "two factors, which is not modelled", "read elsewhere"],
)
def test_other_products_have_the_scale_that_they_should(build: Any) -> None:
    assert on_ane(build, [1.0], [1.0], chip="M5").item() == 1


def test_programs_of_fp32_are_computed_in_fp16() -> None:
    found = on_ane(lambda a: mb.add(x=a, y=np.float32(1e-4)), [1.0], half=False)
    assert found.dtype == np.float32
    assert found.item() == 1.0


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(InterpretError, match="nothing is known of the arithmetic of chip 'M9'; known: M1"):
        on_ane(lambda a: mb.relu(x=a), [1.0], chip="M9")
    with pytest.raises(InterpretError, match="precision='fp8'; it may be"):
        run(program_of(lambda a: mb.relu(x=a), (1,)), {"a": np.ones(1)}, precision="fp8")


def test_every_row_has_a_source_and_names_measured_chips() -> None:
    text = properties.describe()
    for row in properties.PROPERTIES:
        assert row.name in text
        assert set(row.chips) <= set(properties.CHIPS)
        assert row.source
        assert bool(row.chips) == (row.grade == "measured")
        assert not row.everywhere or row.modelled


def test_integer_products_have_no_ceiling() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 2), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.matmul(x=x, y=np.array([[300], [300]], np.int32), name="y")

    made = run(program, {"x": np.array([[200, 200]], np.int32)}, precision="ane")
    assert made["y"].item() == 120000


def test_only_the_columns_that_may_overflow_are_looked_at_twice() -> None:
    weight = np.ones((64, 256), np.float16)
    weight[7] = 4.0
    x = np.full((3, 256), 40.0, np.float16)
    found = on_ane(lambda a: mb.linear(x=a, weight=weight), x)
    assert np.isinf(found).nonzero()[1].tolist() == [7, 7, 7]
    assert found[0, 0] == 10240

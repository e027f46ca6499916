"""The measures, on differences that are known; and inputs that a model can run on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.checking.comparison import compare
from anesurgery.checking.grades import Grade
from anesurgery.checking.output_comparison import compare_arrays
from anesurgery.errors import InterfaceError, ProofError
from anesurgery.interpret.sampling import sample_inputs
from anesurgery.mil import Array, Program, Var, ct, mb, types
from anesurgery.show.console import as_text
from anesurgery.show.surgeries import comparison_report
from anesurgery.surgery import apply

A = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32)


def test_equal_arrays() -> None:
    row = compare_arrays("y", A, A.copy())
    assert (row.psnr, row.max_abs, row.kl, row.top_k, row.bad) == (math.inf, 0, 0, 1, 0)


def test_an_output_of_rank_0_is_compared() -> None:
    one, other = np.array(2.0, np.float32), np.array(2.5, np.float32)
    assert compare_arrays("y", one, one.copy()).psnr == math.inf
    assert compare_arrays("y", one, other).psnr == pytest.approx(20 * math.log10(2 / 0.5))


@pytest.mark.parametrize(
    "change",
    [lambda a: a * 1.01, lambda a: np.roll(a, 1), lambda a: 0 * a, lambda a: -a],
    ids=["scaled by 1.01", "shifted by one", "zeros", "negated"],
)
def test_wrong_outputs_miss_60_dB(change: Callable[[Array], Array]) -> None:  # noqa: N802
    assert compare_arrays("y", A, change(A)).psnr < 60


def test_the_measures_are_what_they_say() -> None:
    b = A.copy()
    b[0, 0] += 0.5
    row, peak = compare_arrays("y", A, b), float(np.abs(A).max())
    assert math.isclose(row.max_abs, 0.5, rel_tol=1e-6)
    assert math.isclose(row.max_rel, 0.5 / peak, rel_tol=1e-6)
    assert math.isclose(row.psnr, 20 * math.log10(peak / (0.5 / math.sqrt(200))), rel_tol=1e-6)
    p, q = (np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(-1, keepdims=True) for x in (A, b))
    assert row.kl is not None
    assert math.isclose(row.kl, float((p * np.log(p / q)).sum(-1).mean()), rel_tol=1e-5)


def test_top_k_counts_rows_whose_best_is_found() -> None:
    a, b = np.zeros((2, 20)), np.zeros((2, 20))
    a[:, 7] = 1
    b[0, 7] = 1
    b[1] = np.arange(20)[::-1]
    b[1, 7] = -1
    assert compare_arrays("y", a, b).top_k == 0.5


def test_undefined_numbers_on_one_side_count() -> None:
    b = A.copy()
    b[0, 0], b[1, 1] = np.nan, np.inf
    assert compare_arrays("y", A, b).bad == 2
    assert compare_arrays("y", b, b.copy()).bad == 0


def undefined(value: float) -> Program:
    """Adds NaN or an infinity to whatever comes in."""

    return mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)(
        lambda x: mb.add(x=x, y=np.float32(value), name="y")
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_finite_compared_is_a_failure(value: float) -> None:
    row = compare_arrays("y", A * value, A * value)
    assert (row.bad, row.compared, row.is_vacuous) == (0, 0, True)
    found = compare(undefined(value), undefined(value))
    assert not found.ok
    by_design = "no output holds a number: nothing was compared"  # fp64 gives the infinities, too
    words = "y: no finite value was compared" if math.isnan(value) else by_design
    assert found.verdict == words
    assert f"FAILED: {words}" in as_text(comparison_report(found))
    with pytest.raises(ProofError, match=words):
        apply(undefined(value), "negate_subtract", prove="both", quiet=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_undefined_on_both_sides_is_no_success_and_is_said_first(value: float) -> None:
    """The wrong version: both sides are NaN in one place, and the rest is equal: PSNR inf, ok."""
    row = compare_arrays("y", np.array([value, 2.0]), np.array([value, 2.0]))
    assert (row.bad, row.undefined, row.compared, row.psnr) == (0, 1, 1, math.inf)
    assert row.failure == "y: 1 element is NaN or infinite on both sides, which shows nothing"
    shift = np.full((2, 3), 0, np.float32)
    shift[0, 0] = value
    found = compare(shifted(shift), shifted(shift))
    assert found.ok is (value == math.inf)  # an infinite constant is meant: fp64 gives the same
    said = "y: 1 element is NaN or infinite on both sides, which shows nothing"
    assert found.verdict == (said if math.isnan(value) else "identical")


def shifted(shift: Array) -> Program:
    """Adds an array to whatever comes in."""

    return mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)(
        lambda x: mb.add(x=x, y=shift, name="y")
    )


def test_noise_is_not_thinned_out_by_what_is_undefined() -> None:
    """The wrong version: the mean square counts 999 elements that were not compared, which adds 30 dB."""
    a, b = np.full(1000, math.nan), np.full(1000, math.nan)
    a[0], b[0] = 1.0, 1.01
    assert math.isclose(compare_arrays("y", a, b).psnr, 40, abs_tol=0.01)


def large(dtype: Any, factor: float = 300.0) -> Program:
    """The squares of large numbers, in one half of the row: infinite in fp16 and not in fp32."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4), dtype=dtype)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        scales = np.array([1, 1, factor, factor], mb_numbers(dtype))
        return mb.square(x=mb.add(x=mb.mul(x=x, y=scales), y=scales), name="y")

    return program


def mb_numbers(dtype: Any) -> Any:
    return np.float16 if dtype == types.fp16 else np.float32


def test_an_overflow_on_both_sides_is_no_success() -> None:
    inputs = {"x": np.ones((2, 4), np.float16)}
    found = compare(large(types.fp16), large(types.fp16), inputs, precision="fp16")
    assert [o.undefined for o in found.outputs] == [4]
    assert not found.ok
    assert found.verdict.startswith("y: 4 elements are NaN or infinite on both sides")
    assert compare(large(types.fp16), large(types.fp16), inputs).ok  # in fp32 it is finite


def test_an_overflow_of_fp32_is_no_success() -> None:
    inputs = {"x": np.ones((2, 4), np.float32)}
    assert not compare(large(types.fp32, 1e30), large(types.fp32, 1e30), inputs).ok


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_mask_that_is_given_back_may_be_infinite(precision: str) -> None:
    """The wrong version: every infinity fails. And the other one: one with another sign passes."""

    def masked(fill: float) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((2, 4))], opset_version=ct.target.iOS16)
        def program(x: Var) -> Any:
            hidden = np.array([[0, 0, fill, fill]] * 2, np.float32)
            return mb.tanh(x=x, name="y"), mb.add(x=mb.mul(x=x, y=np.float32(0)), y=hidden, name="mask")

        return program

    found = compare(masked(-math.inf), masked(-math.inf), precision=precision)
    assert found.ok
    assert [o.undefined for o in found.outputs] == [0, 0]
    assert not compare(masked(-math.inf), masked(math.inf), precision=precision).ok


def test_an_output_without_elements_shows_nothing_by_itself() -> None:
    assert compare_arrays("y", np.zeros((0, 3)), np.zeros((0, 3))).failure == ""


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.bool_])
def test_integers_are_equal_or_not(dtype: Any) -> None:
    """The wrong version: token 50,000 for token 50,001 is 94 dB."""
    a = np.array([50_000]).astype(dtype)
    b = np.array([0 if dtype is np.bool_ else 50_001]).astype(dtype)
    assert compare_arrays("y", a, b).psnr == 0
    assert compare_arrays("y", a, a).psnr == math.inf
    many = np.arange(100_000)
    other = many.copy()
    other[7] += 1
    assert math.isclose(compare_arrays("y", many, other).psnr, 50)
    near = np.array([2**60]), np.array([2**60 + 1])  # equal as floats
    assert compare_arrays("y", *near).psnr == 0


def test_top_k_says_nothing_where_it_could_not_fail() -> None:
    """The wrong versions: rows of five, of which each has its best among five, and rows with no best entry."""
    rows = np.random.default_rng(0).standard_normal((3, 5))
    assert compare_arrays("y", rows, -rows).top_k is None
    flat = np.ones((3, 9))
    assert compare_arrays("y", flat, flat).top_k is None
    assert compare_arrays("y", np.eye(3, 9), flat[:, :9]).top_k == 0


@pytest.mark.parametrize(
    ("a", "b"), [(math.nan, 1), (1, math.inf), (math.nan, math.inf), (math.inf, -math.inf)]
)
def test_undefined_on_one_side_only_fails_and_says_so(a: float, b: float) -> None:
    row = compare_arrays("y", np.array([1.0, a]), np.array([1.0, b]))
    assert row.failure == "y: 1 element is NaN or infinite on one side only"
    found = compare(undefined(a), undefined(b))
    assert not found.ok
    assert "y: 6 elements are NaN or infinite on one side only" in found.verdict


def test_other_shapes_are_an_error() -> None:
    with pytest.raises(InterfaceError, match="shape .4, 50. in one model and .4, 49. in the other"):
        compare_arrays("y", A, A[:, 1:])


def chain(third: float) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)
    def program(x: Var) -> Var:
        first = mb.mul(x=x, y=np.float32(3), name="first")
        second = mb.add(x=first, y=np.float32(third), name="second")
        return mb.tanh(x=second, name="y")

    return program


def test_the_first_diverging_op_is_named() -> None:
    found = compare(chain(1.0), chain(1.1))
    assert not found.ok
    assert found.first_divergence is not None
    assert found.first_divergence.startswith("add second: PSNR")
    assert compare(chain(1.0), chain(1.0)).ok


def test_other_outputs_are_an_error() -> None:
    other = mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)(
        lambda x: mb.tanh(x=x, name="z")
    )

    with pytest.raises(InterfaceError, match="the outputs .'y'. became .'z'."):
        compare(chain(1.0), other)


def test_ids_are_drawn_from_their_table_and_masks_mask_the_end(converted: Callable[..., Any]) -> None:
    program = converted("gpt2", mask=True)
    from anesurgery.loading import load

    found = sample_inputs(load(program.model).program)
    assert found["input_ids"].max() < 101
    assert found["input_ids"].max() > 2
    np.testing.assert_array_equal(found["attention_mask"], [[1] * 12 + [0] * 4])


def test_symbolic_dimensions_get_a_length() -> None:
    from coremltools.converters.mil.mil import get_new_symbol

    program = mb.program(
        input_specs=[mb.TensorSpec((1, get_new_symbol()), dtype=types.fp16)], opset_version=ct.target.iOS16
    )(lambda x: mb.relu(x=x))

    assert sample_inputs(program, length=7)["x"].shape == (1, 7)
    assert sample_inputs(program, shapes={"x": (1, 2)})["x"].shape == (1, 2)


def classifier(factor: float, labels: Sequence[str] = "abc") -> Program:
    from coremltools.converters.mil.mil import mil_list

    @mb.program(input_specs=[mb.TensorSpec((3,))])
    def program(x: Var) -> Any:
        scores = mb.softmax(x=mb.mul(x=x, y=np.float32(factor)), axis=-1)
        return mb.classify(probabilities=scores, classes=mb.const(val=mil_list(list(labels))), name="class")

    return program


def test_labels_and_their_probabilities() -> None:
    inputs = {"x": np.array([3, 2, 1], np.float32)}
    same = compare(classifier(1), classifier(1), inputs, gate=math.inf)
    assert same.ok
    other = compare(classifier(1), classifier(-1), inputs)
    assert not other.ok
    assert [o.max_abs > 0.5 for o in other.outputs] == [True, True]


def test_a_classifier_is_proved_with_its_labels() -> None:
    same = compare(classifier(1), classifier(1), prove=True)
    assert same.proof is not None
    assert (same.proof.grade, same.proof.proved) == (Grade.BITS, True)
    other = compare(classifier(1), classifier(1, "abd"), {"x": np.array([3, 2, 1], np.float32)}, prove=True)
    assert other.proof is not None
    assert not other.proof.proved


def test_dynamic_sizes_are_told_apart() -> None:
    rows, columns = get_new_symbol(), get_new_symbol()

    def size(axis: int) -> Program:
        return mb.program(input_specs=[mb.TensorSpec((rows, columns))], opset_version=ct.target.iOS17)(
            lambda x: mb.slice_by_index(x=mb.shape(x=x), begin=[axis], end=[axis + 1], name="y")
        )

    assert compare(size(0), size(0), prove=True).ok
    wrong = compare(size(0), size(1), prove=True)
    assert not wrong.ok
    assert wrong.proof is not None
    assert not wrong.proof.proved


def test_sizes_that_have_to_be_equal_are_equal() -> None:
    one, other = get_new_symbol(), get_new_symbol()

    program = mb.program(
        input_specs=[mb.TensorSpec((one, 4)), mb.TensorSpec((4, other))], opset_version=ct.target.iOS17
    )(lambda x, y: mb.add(x=x, y=mb.transpose(x=y, perm=[1, 0]), name="y"))

    assert compare(program, program).ok


def test_lists_can_be_compared_and_proved() -> None:
    def rows(order: list[int]) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((2, 4))], opset_version=ct.target.iOS17)
        def program(x: Var) -> Var:
            ls = mb.make_list(init_length=2, dynamic_length=True, elem_shape=(4,), dtype="fp32")
            for i in range(2):
                row = mb.squeeze(x=mb.slice_by_index(x=x, begin=[i, 0], end=[i + 1, 4]), axes=[0])
                ls = mb.list_write(ls=ls, index=np.int32(i), value=row)
            return mb.tanh(x=mb.list_gather(ls=ls, indices=np.array(order, np.int32)), name="y")

        return program

    for other, same in (([0, 1], True), ([1, 0], False)):
        proof = compare(rows([0, 1]), rows(other), prove=True).proof
        assert proof is not None
        assert proof.proved is same


@pytest.mark.parametrize(("factor", "same"), [(1.0, True), (1.1, False)])
def test_what_is_nan_for_inputs_of_any_sign_is_compared_on_magnitudes(factor: float, same: bool) -> None:
    def rooted(factor: float) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((4, 8))])
        def program(x: Var) -> Var:
            least = mb.reduce_min(x=x, axes=[1], keep_dims=True)
            return mb.mul(x=mb.sqrt(x=least), y=np.float32(factor), name="y")

        return program

    found = compare(rooted(1.0), rooted(factor))
    assert found.ok == same
    assert found.psnr == np.inf if same else 15 < found.psnr < 25


X, HALF, STATE = (types.fp32, (1, 4)), (types.fp16, (1, 4)), (types.fp16, (1, 4), "state")


def one(body: Callable[..., Any], *inputs: tuple[Any, ...]) -> Program:
    """A program of one function."""
    specs = [
        (mb.StateTensorSpec if state else mb.TensorSpec)(shape, dtype=dtype)
        for dtype, shape, *state in inputs or [X]
    ]
    made: Program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(body)
    return made


def several(**functions: Program) -> Program:
    """A program of several functions, each the `main` of another."""
    program, *rest = functions.items()
    for name, other in rest:
        program[1].add_function(name, other.functions["main"])
    return program[1]


def doubled(x: Var) -> Var:
    return mb.mul(x=x, y=np.float32(2), name="y")


def both(x: Var, z: Var) -> Var:
    return mb.add(x=x, y=z, name="y")


def kept(x: Var, s: Var) -> Var:
    return mb.add(x=mb.read_state(input=s), y=x, name="y")


DECODE: dict[str, Callable[[], Program]] = {
    "doubled": lambda: one(doubled),
    "other output": lambda: one(lambda x: mb.mul(x=x, y=np.float32(2), name="z")),
    "other shape": lambda: one(doubled, (types.fp32, (1, 8))),
    "integers": lambda: one(lambda x: mb.cast(x=x, dtype="fp32", name="y"), (types.int32, (1, 4))),
    "two inputs": lambda: one(both, X, X),
    "a state": lambda: one(kept, HALF, STATE),
    "a larger state": lambda: one(
        lambda x, s: mb.add(x=mb.read_state(input=s), y=x, name="y"), HALF, (types.fp16, (2, 4), "state")
    ),
}
CALLED: list[tuple[str, str, list[str]]] = [
    ("doubled", "", ["the second model has no function decode"]),
    ("", "doubled", ["only the second model has a function decode"]),
    (
        "doubled",
        "other output",
        ["output y is only in the first model", "output z is only in the second model"],
    ),
    ("doubled", "other shape", ["input x is 1x4 in the first model and 1x8 in the second", "output y is 1x4"]),
    ("doubled", "integers", ["input x is 1x4 in the first model and 1x4xint32 in the second"]),
    ("doubled", "two inputs", ["input z is only in the second model"]),
    ("two inputs", "doubled", ["input z is only in the first model"]),
    ("doubled", "a state", ["state s is only in the second model"]),
    ("a state", "a larger state", ["state s is state<1x4xfp16> in the first model and state<2x4xfp16>"]),
]


@pytest.mark.parametrize(("first", "second", "words"), CALLED)
@pytest.mark.parametrize("prove", [False, True])
def test_functions_that_are_called_differently(first: str, second: str, words: list[str], prove: bool) -> None:
    a, b = (several(main=one(doubled), **({"decode": DECODE[n]()} if n else {})) for n in (first, second))
    found = compare(a, b, prove=prove)
    assert not found.ok
    assert found.outputs_agree
    assert found.first_divergence is None
    written = found.to_json()
    for part in words:
        assert part in found.verdict
        assert any(part in line for line in written["called_differently"])
    assert found.proof is None or not found.proof.proved
    assert found.proof is None or any(words[0] in line for line in found.proof.lines)
    assert compare(a, b, function="main", prove=prove).ok


def test_a_state_of_the_only_function_that_one_lacks() -> None:
    given = one(lambda x: mb.add(x=mb.mul(x=x, y=np.float16(0)), y=x, name="y"), HALF)
    assert not compare(given, one(kept, HALF, STATE)).ok


@pytest.mark.parametrize("name", DECODE)
def test_equal_functions_are_ok(name: str) -> None:
    a, b = (several(main=one(doubled), decode=DECODE[name]()) for _ in range(2))
    found = compare(a, b)
    assert found.ok
    assert found.called == ()


def test_the_name_of_an_only_function_does_not_matter() -> None:
    other = one(doubled)
    other.functions["decode"] = other.functions.pop("main")
    assert compare(one(doubled), other).ok


def test_an_output_of_infinities_by_design_is_equal() -> None:
    mask = np.full((2, 2), -np.inf)
    row = compare_arrays("mask", mask, mask.copy(), mask)
    assert (row.failure, row.psnr, row.compared) == ("", math.inf, 0)
    assert "NaN or infinite on one side" in compare_arrays("mask", mask, -mask, mask).failure
    assert "no finite value" in compare_arrays("mask", mask, mask.copy()).failure


def test_a_mask_of_infinities_beside_numbers_is_compared() -> None:
    """The wrong version: the mask fails as an output without finite values."""

    def outputs(x: Var) -> tuple[Var, Var]:
        mask = mb.add(x=x, y=np.float32(-math.inf), name="mask")
        return mask, mb.mul(x=x, y=np.float32(2), name="y")

    model = mb.program(input_specs=[mb.TensorSpec((2, 3))], opset_version=ct.target.iOS16)(lambda x: outputs(x))
    found = compare(model, model)
    assert (found.ok, found.verdict) == (True, "identical")

"""fp32 becomes fp16, but for overflow, vanishing guards and large integers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pass_cases import rewrites, table

import anesurgery as ane
from anesurgery.errors import ProofError
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, dtype_name, mb, new_symbol, quiet_host, types, walk_ops
from anesurgery.network_editing.upgrade import NOTES
from anesurgery.passes.compute_fp16 import ComputeFp16
from anesurgery.testing import apply_pass, assert_same_numbers, reasons
from anesurgery.text import to_text

with quiet_host():
    from coremltools.models import datatypes
    from coremltools.models.neural_network import NeuralNetworkBuilder

Body = Callable[..., Any]


def program_of(body: Body, shape: tuple[int, ...] = (2, 4), dtype: Any = types.fp32) -> Program:
    def one(a: Var) -> Any:
        return body(a)

    built: Program = mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)], opset_version=ct.target.iOS15)(
        one
    )
    return built


def types_made(program: Program) -> dict[str, str]:
    """Op type -> element type of its result; casts and constants are left out."""
    ops = [op for op in walk_ops(program) if op.op_type not in ("const", "cast")]
    return {op.op_type: dtype_name(op.outputs[0]) for op in ops}


def there_and_back() -> Any:
    """A network of layers that adds 1000 and takes it away again, which fp16 cannot."""
    builder = NeuralNetworkBuilder([("x", datatypes.Array(8))], [("y", None)], disable_rank5_shape_mapping=True)
    builder.add_activation("up", "LINEAR", "x", "sum", params=[1, 1000])
    builder.add_activation("down", "LINEAR", "sum", "y", params=[1, -1000])
    return ct.models.MLModel(builder.spec, skip_model_load=True)


def guarded(x: Var) -> Var:
    return mb.add(x=x, y=np.float32(1e-9), name="sum")


STAYS: dict[str, tuple[Body, set[str], str]] = {
    "a constant overflows": (
        lambda a: mb.tanh(x=mb.relu(x=mb.mul(x=a, y=np.float32(1e5), name="large"))),
        {"mul", "relu", "tanh"},
        "holds 1e+05, above 65504",
    ),
    "a result overflows": (
        lambda a: mb.softmax(x=mb.reduce_sum(x=mb.exp(x=mb.relu6(x=mb.mul(x=a, y=1.0))), axes=[0])),
        {"reduce_sum", "softmax"},
        "can reach 8.262e+05, above 65504",
    ),
    "a logarithm of zero": (
        lambda a: mb.relu(x=mb.log(x=mb.add(x=mb.square(x=a), y=np.float32(1e-10)))),
        {"square", "add", "log"},
        "the logarithm shows errors",
    ),
    "a root of zero": (lambda a: mb.relu(x=mb.rsqrt(x=a)), {"rsqrt"}, "may be 0 in fp16"),
    "a guarded division": (
        lambda a: mb.relu(x=mb.real_div(x=a, y=mb.maximum(x=mb.abs(x=a), y=np.float32(1e-9), name="floor"))),
        {"maximum", "real_div"},
        "it divides by %floor, which may be 0 in fp16",
    ),
    "a product of two guarded norms": (
        lambda a: mb.real_div(x=mb.relu(x=a), y=mb.mul(x=guarded(mb.abs(x=a)), y=guarded(mb.sigmoid(x=a)))),
        {"add", "mul", "real_div"},
        "%sum, which it reads, may be 0 in fp16",
    ),
    "a root that is a power": (
        lambda a: mb.real_div(x=a, y=mb.pow(x=guarded(mb.abs(x=a)), y=np.float32(0.5))),
        {"add", "pow"},
        "%sum, which it reads, may be 0 in fp16",
    ),
    "a guard for each column": (
        lambda a: mb.real_div(x=a, y=mb.add(x=mb.abs(x=a), y=np.full(4, 1e-9, np.float32))),
        {"add", "real_div"},
        "the guard 1e-09 is 0 in fp16",
    ),
    "a guard that is chosen": (
        lambda a: mb.real_div(x=a, y=mb.select(cond=mb.equal(x=a, y=0.0), a=np.float32(1e-9), b=a)),
        {"select", "real_div"},
        "the guard 1e-09 is 0 in fp16",
    ),
    "positions": (
        lambda a: mb.sin(x=mb.add(x=a, y=np.arange(4096, 4100, dtype=np.float32))),
        {"add", "sin"},
        "above 2048",
    ),
    "a recurrent op": (
        lambda a: mb.lstm(
            x=mb.expand_dims(x=mb.relu(x=a), axes=[1]),
            initial_h=np.zeros((1, 3), np.float32),
            initial_c=np.zeros((1, 3), np.float32),
            weight_ih=np.ones((12, 4), np.float32),
            weight_hh=np.ones((12, 3), np.float32),
        )[0],
        {"lstm"},
        "lstm takes no fp16 as",
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_fp16_breaks_stays(name: str) -> None:
    body, stays, why = STAYS[name]
    shape = (2048, 4) if "result" in name else (2, 4)
    program = program_of(body, shape)
    after, session = apply_pass(ComputeFp16(), program)
    assert {op for op, kind in types_made(after).items() if kind == "fp32"} == stays, to_text(after)
    assert any(why in r for r in reasons(session)), reasons(session)
    assert [v.dtype for v in after.functions["main"].outputs] == [types.fp32]
    assert not apply_pass(ComputeFp16(), after)[1].changes


def counted(a: Var) -> Var:
    steps = mb.cast(x=a, dtype="fp32")
    return mb.sigmoid(x=mb.mul(x=mb.add(x=steps, y=np.float32(1)), y=np.float32(1e-3)))


def test_integers_stay_unless_they_are_known_to_be_small() -> None:
    program = program_of(counted, dtype=types.int32)
    after, session = apply_pass(ComputeFp16(), program)
    assert types_made(after) == {"add": "fp32", "mul": "fp16", "sigmoid": "fp16"}
    assert any("%a holds integers of unknown range; fp16 counts to 2048" in r for r in reasons(session))
    after, session = apply_pass(ComputeFp16(ranges={"a": (0, 2000)}), program)
    assert set(types_made(after).values()) == {"fp16"}, reasons(session)
    values = {"a": np.arange(8, dtype=np.int32).reshape(2, 4) * 250}
    assert_same_numbers(program, after, values, rtol=2e-3)


def test_ranges_that_were_observed_decide() -> None:
    program = program_of(lambda a: mb.relu(x=mb.square(x=a, name="power")))
    after, session = apply_pass(ComputeFp16(ranges={"power": (0.0, 1e6)}), program)
    assert types_made(after) == {"square": "fp32", "relu": "fp32"}
    assert any("%power can reach 1e+06" in r for r in reasons(session))


def test_fills_and_epsilons_that_fp16_cannot_hold_are_replaced() -> None:
    keep = np.tril(np.ones((4, 4), bool))

    def masked(a: Var) -> Var:
        scores = mb.select(cond=keep, a=a, b=np.float32(np.finfo(np.float32).min))
        return mb.layer_norm(x=mb.softmax(x=scores, axis=-1), axes=[-1], epsilon=np.float32(1e-12))

    program = program_of(masked, (4, 4))
    after, session = apply_pass(ComputeFp16(), program)
    assert set(types_made(after).values()) == {"fp16"}, reasons(session)
    assert "-30000" in to_text(after)
    assert "1.19209e-07" in to_text(after)
    assert any("masks scores with -3.403e+38" in c.bindings for c in session.changes)
    assert_same_numbers(program, after, rtol=3e-3)


BELOW: dict[str, Body] = {
    "below": lambda size: mb.less(x=size, y=np.float32(1e-10)),
    "below, in each column": lambda size: mb.less(x=size, y=np.full(4, 1e-9, np.float32)),
    "not above": lambda size: mb.logical_not(x=mb.greater_equal(x=size, y=np.float32(2e-8))),
    "the limit first": lambda size: mb.greater(x=np.float32(1e-12), y=size),
    "the negative above": lambda size: mb.greater(x=mb.mul(x=size, y=np.float32(-1)), y=np.float32(-1e-9)),
    "a limit that fp16 holds": lambda size: mb.less(x=size, y=np.float32(0.5)),
}


@pytest.mark.parametrize("name", BELOW)
def test_a_limit_of_a_comparison_stays_above_0(name: str) -> None:
    def body(x: Var) -> Var:
        size = mb.abs(x=x)
        return mb.real_div(x=x, y=mb.select(cond=BELOW[name](size), a=np.float32(1), b=size))

    after, _ = apply_pass(ComputeFp16(), program_of(body))
    assert set(types_made(after).values()) == {"fp16", "bool"}
    values = np.array([[0, 1, -2, 0], [3, 0, 5, -6]], np.float32)
    (found,) = run(after, {"a": values}).values()
    np.testing.assert_array_equal(found, np.sign(values))


def test_a_scale_factor_stays_fp32_beside_a_value_in_fp16() -> None:
    def enlarged(a: Var) -> Var:
        factor = np.float32(2.0)
        picture = mb.expand_dims(x=a, axes=[0, 1])
        return mb.relu(x=mb.upsample_bilinear(x=picture, scale_factor_height=factor, scale_factor_width=factor))

    program = program_of(enlarged)
    after, session = apply_pass(ComputeFp16(), program)
    assert set(types_made(after).values()) == {"fp16"}, reasons(session)
    assert_same_numbers(program, after, rtol=2e-3)
    assert not apply_pass(ComputeFp16(), after)[1].changes


@pytest.mark.parametrize("fill", [-1e4, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("shown", [False, True])
def test_an_integer_that_only_masks_scores_is_taken_for_a_bit(fill: float, shown: bool) -> None:
    @mb.program(
        input_specs=[mb.TensorSpec((1, 4, 4)), mb.TensorSpec((1, 4), dtype=types.int32)],
        opset_version=ct.target.iOS15,
    )
    def program(a: Var, mask: Var) -> Any:
        kept = mb.cast(x=mb.expand_dims(x=mask, axes=[1]), dtype="fp32")
        filled = mb.mul(x=mb.sub(x=np.float32(1), y=kept), y=np.float32(fill))
        weights = mb.softmax(x=mb.add(x=a, y=filled))
        return (weights, mb.add(x=kept, y=np.float32(1))) if shown else weights

    after, session = apply_pass(ComputeFp16(), program)
    kinds = types_made(after)
    assert (kinds["sub"], kinds["softmax"]) == (("fp32", "fp16") if shown else ("fp16", "fp16")), kinds
    assert any("holds integers of unknown range" in r for r in reasons(session)) == shown
    assert any("is taken to hold 0 and 1" in words for words in session.notes) != shown
    values = {"a": np.ones((1, 4, 4), np.float32), "mask": np.array([[1, 1, 0, 0]], np.int32)}
    assert_same_numbers(program, after, values, rtol=2e-3)


LEAST = float(np.finfo(np.float32).min)
ONE = np.float32(1)


def complement(mask: Var) -> Var:
    return mb.sub(x=ONE, y=mb.cast(x=mb.expand_dims(x=mask, axes=[1]), dtype="fp32"))


def expanded(mask: Var) -> Var:
    return mb.tile(x=mask, reps=[1, 4, 1])


MASKINGS: dict[str, Callable[[Var, Var], Var]] = {
    "a product": lambda a, m: mb.add(x=a, y=mb.mul(x=complement(m), y=np.float32(LEAST))),
    "a product, copied": lambda a, m: mb.add(x=a, y=expanded(mb.mul(x=complement(m), y=np.float32(LEAST)))),
    "copies, filled": lambda a, m: mb.add(
        x=a,
        y=mb.select(
            cond=mb.cast(x=(bits := expanded(complement(m))), dtype="bool"), a=np.float32(LEAST), b=bits
        ),
    ),
    "less 1": lambda a, m: mb.add(
        x=a,
        y=mb.mul(
            x=mb.sub(x=mb.cast(x=mb.expand_dims(x=m, axes=[1]), dtype="fp32"), y=ONE), y=np.float32(-LEAST)
        ),
    ),
    "taken away": lambda a, m: mb.sub(x=a, y=mb.mul(x=complement(m), y=np.float32(-LEAST))),
    "both sides": lambda a, m: mb.add(
        x=a,
        y=mb.mul(
            x=mb.sub(
                x=ONE,
                y=mb.cast(
                    x=mb.mul(x=mb.expand_dims(x=m, axes=[1]), y=mb.reshape(x=m, shape=[1, 4, 1])), dtype="fp32"
                ),
            ),
            y=np.float32(LEAST),
        ),
    ),
    "a choice of a full tensor": lambda a, m: mb.select(
        cond=expanded(mb.equal(x=mb.expand_dims(x=m, axes=[1]), y=types.nptype_from_builtin(m.dtype)(0))),
        a=mb.fill(shape=[1, 4, 4], value=np.float32(LEAST)),
        b=a,
    ),
}


def masking(body: Callable[[Var, Var], Var], dtype: Any) -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((1, 4, 4)), mb.TensorSpec((1, 4), dtype=dtype)],
        opset_version=ct.target.iOS17,
    )(lambda a, mask: mb.softmax(x=body(a, mask)))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("dtype", [types.int32, types.fp32])
@pytest.mark.parametrize("name", MASKINGS)
def test_masks_of_the_least_number_of_fp32_are_computed_in_fp16(name: str, dtype: Any) -> None:
    program = masking(MASKINGS[name], dtype)
    after, session = apply_pass(ComputeFp16(), program)
    assert "fp32" not in types_made(after).values(), (to_text(after), reasons(session))
    scores = np.random.default_rng(0).uniform(-7, 7, (1, 4, 4)).astype(np.float32)
    for seen in ([1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]):
        values = {"a": scores, "mask": np.array([seen], types.nptype_from_builtin(dtype))}
        before, found = (run(p, values, precision=how) for p, how in ((program, "fp32"), (after, "fp16")))
        (x,), (y,) = before.values(), found.values()
        assert ((x == 0) == (y == 0)).all(), "masked shares are exactly 0 in both"
        np.testing.assert_allclose(y, x, atol=2e-3)


def test_that_rows_keep_something_is_said_where_it_is_taken() -> None:
    for name, said in (("a product", True), ("a choice of a full tensor", False)):
        _, session = apply_pass(ComputeFp16(), masking(MASKINGS[name], types.int32))
        assert any("is assumed to keep one of them" in words for words in session.notes) == said, name


def test_a_constant_that_masks_a_whole_row_by_sums_stays() -> None:
    """The wrong version: beside -3e4 scores above 8 do not vanish, so that the row shares otherwise."""
    fills = np.array([[0, 0, 0, 0], [LEAST] * 4, [0, 0, LEAST, LEAST], [0, LEAST, 0, 0]], np.float32)
    program = program_of(lambda a: mb.softmax(x=mb.add(x=a, y=fills)), (4, 4))
    after, _ = apply_pass(ComputeFp16(), program)
    assert types_made(after)["add"] == "fp32"
    assert_same_numbers(program, after, {"a": np.arange(16, dtype=np.float32).reshape(4, 4) * 9}, rtol=2e-3)
    kept = program_of(lambda a: mb.softmax(x=mb.add(x=a, y=np.delete(fills, 1, 0))), (3, 4))
    assert types_made(apply_pass(ComputeFp16(), kept)[0])["add"] == "fp16"


def test_what_raises_scores_is_no_mask() -> None:
    """The wrong version: limited to 3e4, what was raised no longer hides the score beside it."""
    program = masking(lambda a, m: mb.add(x=a, y=mb.mul(x=complement(m), y=np.float32(-LEAST))), types.int32)
    assert types_made(apply_pass(ComputeFp16(), program)[0])["add"] == "fp32"


def test_an_island_between_casts_disappears() -> None:
    def island(a: Var) -> Var:
        inner = mb.cast(x=mb.cast(x=a, dtype="fp16"), dtype="fp32")
        return mb.tanh(x=mb.cast(x=mb.sigmoid(x=inner), dtype="fp16"))

    after, _ = apply_pass(ComputeFp16(), program_of(island))
    assert sum(op.op_type == "cast" for op in walk_ops(after)) == 1, to_text(after)


@pytest.mark.parametrize(
    "body",
    [
        lambda a: mb.sigmoid_hard(x=a, alpha=np.float32(1 / 6), beta=np.float32(0.5)),
        lambda a: mb.leaky_relu(x=a, alpha=np.float32(0.1)),
        lambda a: mb.l2_norm(x=a, epsilon=np.float32(1e-6)),
    ],
)
def test_options_in_fp32_stay_as_exact_as_they_are(body: Body) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 2, 4, 4), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(a: Var) -> Any:
        return body(a)

    before = to_text(program)
    after, session = apply_pass(ComputeFp16(), program)
    assert not session.changes
    assert to_text(after) == before


def test_a_real_model_keeps_its_numbers_and_reaches_the_engine(corpus: Path) -> None:
    path = str(corpus / "basic_pitch_nmp.mlpackage")
    surgery = ane.apply(path, "compute_fp16", prove="model", quiet=True)
    assert surgery.proof is not None
    assert surgery.proof.ok
    before, after = (ane.inspect(m, target="M4/macOS 15") for m in (path, surgery.program))
    legal = [sum(row.legal is True for row in found.ops) for found in (before, after)]
    assert legal[0] == 0
    assert legal[1] >= 50


def test_without_its_guards_the_same_model_would_break(corpus: Path) -> None:
    """The wrong version: told that the guarded powers are large, it converts what a logarithm reads."""
    name = "StatefulPartitionedCall_model_1_normalized_log_1_add"
    lie = ComputeFp16(ranges={name: (1.0, 10.0), name.replace("_add", "_Square"): (1.0, 10.0)})
    with pytest.raises(ProofError, match="PSNR"):
        ane.apply(str(corpus / "basic_pitch_nmp.mlpackage"), lie, prove="model", quiet=True)


def test_an_upgrade_computes_in_fp16_where_outputs_keep_60_db(corpus: Path) -> None:
    model = ane.upgrade(corpus / "mlt_es2en_char_decoder16.mlmodel")
    assert "it computes in fp16" in model.user_defined_metadata[NOTES]
    network = there_and_back()
    kept = re.search(
        r"it stays fp32: fp16 keeps (-?[\d.]+) dB of 60", ane.upgrade(network).user_defined_metadata[NOTES]
    )
    assert kept is not None
    assert float(kept[1]) < 60
    asked = ane.upgrade(network, precision="fp16")
    assert "it computes in fp16; outputs were not compared" in asked.user_defined_metadata[NOTES]
    with pytest.raises(ane.SurgeryError, match="precision='fp8'; it may be None, 'fp16', 'fp32'"):
        ane.upgrade(network, precision="fp8")


def test_an_output_whose_type_stays_keeps_its_name() -> None:
    """Of integers, and of numbers that were fp16 already beside an operand of fp32."""
    sorted_ = program_of(lambda x: mb.argsort(x=x, axis=-1, name="y"))

    mixed = mb.program(input_specs=[mb.TensorSpec((2, 4), dtype=types.fp16)], opset_version=ct.target.iOS17)(
        lambda x: mb.matmul(x=x, y=np.ones((4, 10), np.float32), name="y")
    )

    for program in (sorted_, mixed):
        surgery = ane.apply(program, "compute_fp16", quiet=True)
        assert surgery.changes
        assert [v.name for v in surgery.program.functions["main"].outputs] == ["y"]


DYNAMIC = {
    "sizes that meet": lambda x, y: mb.mul(x=x, y=y, name="z"),
    "a slice": lambda x, y: mb.slice_by_index(x=x, begin=[0, 0], end=mb.shape(x=y), name="z"),
    "repetitions": lambda x, y: mb.tile(x=x, reps=mb.shape(x=y), name="z"),
    "a choice": lambda x, y: mb.cast(x=mb.non_zero(x=x), dtype="fp32", name="z"),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_sizes_that_an_op_makes_anew(name: str) -> None:
    """An op of fp16 infers dynamic sizes of its own, which are those of the old one."""
    sizes = [mb.TensorSpec((new_symbol(), new_symbol())) for _ in range(2)]
    program = mb.program(input_specs=sizes, opset_version=ct.target.iOS17)(lambda x, y: DYNAMIC[name](x, y))
    surgery = ane.apply(program, "compute_fp16", prove="model", quiet=True)
    assert surgery.changes
    (before,), (after,) = (p.functions["main"].outputs for p in (program, surgery.program))
    assert before.shape == after.shape or name == "a choice"


def what_stays_in_fp32_is_not_rounded_to_infinity(a: Var, m: Var) -> Var:
    counted = mb.expand_dims(x=mb.cast(x=mb.mul(x=m, y=np.int32(3)), dtype="fp32"), axes=[1])
    return mb.add(x=a, y=mb.select(cond=mb.equal(x=counted, y=np.float32(0)), a=np.float32(LEAST), b=counted))


test_cases, test_surroundings = table(
    ComputeFp16(),
    # A fill beside a number of unknown range: a cast to fp16 would make it infinite, and the row NaN.
    rewrites(
        masking,
        what_stays_in_fp32_is_not_rounded_to_infinity,
        types.int32,
        rtol=0.002,
        inputs={"a": np.ones((1, 4, 4), np.float32), "mask": np.zeros((1, 4), np.int32)},
    ),
)

"""Raising a program to a newer opset: what every op means stays, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry
from statement import op

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.files.interface import new_spec
from anesurgery.files.package import Loaded
from anesurgery.files.sub_byte import pack
from anesurgery.mil import Program, ct, mb, op_types, types, walk_ops
from anesurgery.rewriting import newer_opsets
from anesurgery.rewriting.newer_opsets import DIFFERENCES, Difference, changes, raised, why_not

NEWEST = 9
TABLE = np.arange(20, dtype=np.float32).reshape(5, 4)
IDS = np.array([[0, -1, 4], [-5, 2, -3]], np.int32)
PICTURE = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)
ROW = np.array([[-3.0, -0.5, 0.0, 0.0, 0.5, 3.0]], np.float32)


def weight(*shape: int) -> Any:
    """Small numbers that every run draws alike."""
    return np.linspace(-0.5, 0.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def program(build: Callable[..., Any], *inputs: Any, opset: Any = ct.target.iOS15) -> Program:
    """One op over inputs of the shapes and types of these arrays."""
    kinds = {"f": types.fp32, "i": types.int32}
    specs = [mb.TensorSpec(x.shape, dtype=kinds[x.dtype.kind]) for x in inputs]
    arguments = [f"x{i}" for i in range(len(inputs))]
    code = f"lambda {', '.join(arguments)}: build({', '.join(arguments)})"
    made: Program = mb.program(input_specs=specs, opset_version=opset)(eval(code, {"build": build}))
    return made


def run(model: Any, *inputs: Any) -> list[Any]:
    """Its outputs, in order."""
    given = dict(zip(next(iter(model.functions.values())).inputs, inputs, strict=True))
    return list(ane.run(model, given).values())


I15, I16, I17 = ct.target.iOS15, ct.target.iOS16, ct.target.iOS17
Case = tuple[Any, Callable[..., Any], tuple[Any, ...]]

LOOKUPS: dict[str, Case] = {
    "gather": (I15, lambda i: mb.gather(x=TABLE, indices=i, axis=0), (IDS,)),
    "gather of the last axis": (I15, lambda i: mb.gather(x=TABLE, indices=i, axis=-1), (IDS.clip(-4, 3),)),
    "gather of 16 bits": (I16, op("gather", indices=np.array([-1, 2], np.int16), axis=0), (TABLE,)),
    "gather with batches": (
        I16,
        lambda x, i: mb.gather(x=x, indices=i, axis=1, batch_dims=1),
        (TABLE[:2], IDS.clip(-4, 3)),
    ),
    "gather_along_axis": (
        I15,
        lambda x, i: mb.gather_along_axis(x=x, indices=i, axis=1),
        (TABLE[:2], IDS.clip(-4, 3)),
    ),
    "gather_nd": (
        I15,
        lambda i: mb.gather_nd(x=TABLE, indices=i),
        (np.array([[-1, -4], [2, 3], [-5, 0]], np.int32),),
    ),
    "gather_nd of constants": (I15, op("gather_nd", indices=np.array([[-1, -4], [2, 3]], np.int32)), (TABLE,)),
    "gather_nd of one coordinate": (
        I15,
        lambda i: mb.gather_nd(x=TABLE, indices=i),
        (np.array([[-1], [2]], np.int32),),
    ),
    "gather_nd with batches": (
        I16,
        lambda x, i: mb.gather_nd(x=x, indices=i, batch_dims=1),
        (TABLE[:2], np.array([[[-1]], [[1]]], np.int32)),
    ),
    "scatter": (
        I15,
        lambda x, i: mb.scatter(data=x, indices=i, updates=weight(2, 4), axis=0, mode="add"),
        (TABLE, np.array([-1, 1], np.int32)),
    ),
    "scatter_along_axis": (
        I15,
        lambda x, i: mb.scatter_along_axis(data=x, indices=i, updates=weight(2, 3), axis=1, mode="update"),
        (TABLE[:2], np.array([[-1, 0, 1], [2, -4, 1]], np.int32)),
    ),
    "scatter_nd": (
        I15,
        lambda x, i: mb.scatter_nd(data=x, indices=i, updates=weight(2), mode="add"),
        (TABLE, np.array([[-1, -1], [0, 2]], np.int32)),
    ),
}

PALETTE = np.array([1.0, -2.0, 3.0, 0.5], np.float32)


def palette(x: Any) -> Any:
    """Three indices of two bits and one more, over two bytes."""
    packed = np.array([0b01101100, 0b10], np.uint8)
    w = mb.constexpr_lut_to_dense(indices=packed, lut=PALETTE, shape=np.array([1, 5], np.uint32))
    return mb.mul(x=x, y=w)


def sparse(x: Any) -> Any:
    """Two numbers of five."""
    w = mb.constexpr_sparse_to_dense(
        nonzero_data=PALETTE[:2], mask=np.array([0b10010], np.uint8), shape=np.array([1, 5], np.uint32)
    )
    return mb.mul(x=x, y=w)


def recurrent(op: str, gates: int, **more: Any) -> Callable[..., Any]:
    """A recurrent op of 2 numbers over 3 steps."""

    def build(x: Any) -> Any:
        state = {
            "initial_h": weight(1, 2),
            "weight_ih": weight(2 * gates, 2),
            "weight_hh": weight(2 * gates, 2),
        }
        return getattr(mb, op)(x=x, **state, bias=weight(2 * gates), output_sequence=True, **more)[0]

    return build


STEPS = weight(3, 1, 2)
OTHERS: dict[str, Case] = {
    "clip with equal limits": (I15, op("clip", alpha=0.25, beta=0.25), (ROW,)),
    "clip with exchanged limits": (I15, op("clip", alpha=1.0, beta=-1.0), (ROW,)),
    "clip": (I15, op("clip", alpha=-1.0, beta=1.0), (ROW,)),
    "constexpr_lut_to_dense": (I16, palette, (weight(1, 5),)),
    "constexpr_sparse_to_dense": (I16, sparse, (weight(1, 5),)),
    "constexpr_cast": (
        I16,
        lambda x: mb.mul(
            x=x, y=mb.constexpr_cast(source_val=weight(1, 6).astype(np.float16), output_dtype="fp32")
        ),
        (ROW,),
    ),
    "clamped_relu": (I15, op("clamped_relu", alpha=0.5, beta=1.0), (ROW,)),
    "elu": (I15, op("elu", alpha=0.5), (ROW,)),
    "leaky_relu": (I15, op("leaky_relu", alpha=0.5), (ROW,)),
    "linear_activation": (I15, op("linear_activation", alpha=0.5, beta=1.0), (ROW,)),
    "prelu": (I15, op("prelu", alpha=weight(2)), (PICTURE,)),
    "scaled_tanh": (I15, op("scaled_tanh", alpha=0.5, beta=2.0), (ROW,)),
    "sigmoid_hard": (I15, op("sigmoid_hard", alpha=0.5, beta=0.1), (ROW,)),
    "softplus_parametric": (
        I15,
        op("softplus_parametric", alpha=np.array([1, 2], np.float32), beta=np.array([2, 1], np.float32)),
        (PICTURE,),
    ),
    "thresholded_relu": (I15, op("thresholded_relu", alpha=0.5), (ROW,)),
    "conv": (I15, op("conv", weight=weight(2, 2, 3, 3), pad_type="same"), (PICTURE,)),
    "conv_transpose": (I15, op("conv_transpose", weight=weight(2, 2, 3, 3)), (PICTURE,)),
    "linear": (I15, op("linear", weight=weight(3, 6)), (ROW,)),
    "matmul": (I15, op("matmul", y=weight(6, 3)), (ROW,)),
    "batch_norm": (I15, op("batch_norm", mean=weight(2), variance=np.array([1, 2], np.float32)), (PICTURE,)),
    "instance_norm": (I15, op("instance_norm"), (PICTURE,)),
    "l2_norm": (I15, op("l2_norm"), (PICTURE,)),
    "layer_norm": (I15, op("layer_norm", axes=[-1]), (PICTURE,)),
    "local_response_norm": (I15, op("local_response_norm", size=3), (PICTURE,)),
    "inverse": (I15, op("inverse"), (ROW,)),
    "log": (I15, op("log"), (abs(ROW) + 1,)),
    "rsqrt": (I15, op("rsqrt"), (abs(ROW),)),
    "cast": (I15, op("cast", dtype="int32"), (ROW,)),
    "reshape_like": (
        I16,
        lambda x, y: mb.reshape_like(
            x=x, ref_tensors=(y,), begins=(np.int32(0),), ends=(np.int32(2),), end_masks=(False,)
        ),
        (ROW, ROW.reshape(2, 3)),
    ),
    "expand_dims": (I15, op("expand_dims", axes=[0]), (ROW,)),
    "squeeze": (I15, op("squeeze"), (ROW,)),
    "reverse": (I15, op("reverse"), (ROW,)),
    "reverse_sequence": (
        I15,
        op("reverse_sequence", lengths=np.array([2, 3], np.int32), seq_axis=1, batch_axis=0),
        (ROW.reshape(2, 3),),
    ),
    "sliding_windows": (I15, op("sliding_windows", axis=1, size=3), (ROW,)),
    "transpose": (I15, op("transpose", perm=[1, 0]), (ROW,)),
    "slice_by_index": (I15, op("slice_by_index", begin=[0, -2], end=[1, -5], stride=[1, -1]), (ROW,)),
    "slice_by_size": (I15, op("slice_by_size", begin=[0, 2], size=[1, -1]), (ROW,)),
    "lstm": (I15, recurrent("lstm", 4, initial_c=weight(1, 2)), (STEPS,)),
    "rnn": (I15, recurrent("rnn", 1), (STEPS,)),
    "gru": (I15, recurrent("gru", 3), (STEPS,)),
    "gru of iOS 17": (I17, recurrent("gru", 3), (STEPS,)),
    "reduce_argmax": (I15, op("reduce_argmax", axis=1), (ROW,)),
    "reduce_argmin": (I15, op("reduce_argmin", axis=1), (ROW,)),
    "upsample_bilinear, corners": (
        I15,
        op("upsample_bilinear", scale_factor_height=2.0, align_corners=True),
        (PICTURE,),
    ),
    "upsample_bilinear": (
        I15,
        op("upsample_bilinear", scale_factor_height=2.0, align_corners=False),
        (PICTURE,),
    ),
    "reshape with zeros": (I15, op("reshape", shape=[0, 0, -1, 2]), (PICTURE,)),
    "reshape in a shape made at run time": (
        I15,
        lambda x, shape: mb.reshape(x=x, shape=shape),
        (PICTURE, np.array([0, 1, 0, -1], np.int32)),
    ),
    "resample": (
        I15,
        op(
            "resample",
            coordinates=np.linspace(-1.2, 1.2, 18, dtype=np.float32).reshape(1, 3, 3, 2),
            sampling_mode="bilinear",
            padding_mode="constant",
            padding_value=0.0,
            coordinates_mode="normalized_minus_one_to_one",
            align_corners=True,
        ),
        (PICTURE,),
    ),
    "topk with ties": (I15, op("topk", k=4, axis=1), (ROW,)),
    "topk with ties, ascending": (I15, op("topk", k=4, axis=1, ascending=True), (ROW,)),
    "crop_resize of iOS 15, raised to iOS 16": (
        I15,
        op(
            "crop_resize",
            roi=np.array([-1, -1, 5, 5], np.float32).reshape(1, 1, 4, 1, 1),
            target_height=3,
            target_width=3,
            sampling_mode="ALIGN_CORNERS",
        ),
        (PICTURE,),
    ),
}
CASES = LOOKUPS | OTHERS


@pytest.mark.parametrize("name", CASES)
def test_every_op_computes_the_same_in_the_newer_opset(name: str) -> None:
    opset, build, inputs = CASES[name]
    old = program(build, *inputs, opset=opset)
    before = run(old, *inputs)
    new = raised(old, 7 if name.endswith("iOS 16") else NEWEST)
    forms = {op.op_type: op for op in walk_ops(new)}
    kind = name.partition(" ")[0].rstrip(",")
    if kind in forms:
        form = SSAOpRegistry.core_ops[kind]
        assert type(forms[kind]) is form[next(iter(new.functions.values())).opset_version]
    for was, now in zip(before, run(new, *inputs), strict=True):
        assert np.asarray(was).dtype == np.asarray(now).dtype
        np.testing.assert_array_equal(was, now)
    np.testing.assert_array_equal(before[0], run(old, *inputs)[0])  # and the old program is as it was


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8])
def test_palettes_of_every_width_decode_to_the_same_numbers(bits: int) -> None:
    draw = np.random.default_rng(bits)
    indices = draw.integers(0, 2**bits, (3, 5, 1), dtype=np.uint8)
    table = draw.standard_normal(2**bits).astype(np.float16)

    def build(x: Any) -> Any:
        w = mb.constexpr_lut_to_dense(
            indices=pack(indices, bits), lut=table, shape=np.array(indices.shape, np.uint32)
        )
        return mb.mul(x=x, y=mb.cast(x=w, dtype="fp32"))

    old = program(build, weight(3, 5, 1), opset=I16)
    for model in (old, raised(old, NEWEST)):
        np.testing.assert_array_equal(run(model, weight(3, 5, 1))[0], weight(3, 5, 1) * table[indices])


def test_every_row_of_the_table_is_run() -> None:
    refused = {t for t, rows in DIFFERENCES.items() for r in rows if r.refused}
    assert {name.partition(" ")[0].rstrip(",") for name in CASES} | refused == set(DIFFERENCES)


def naively(old: Program, version: int, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Raised as coremltools does it: the same op, in the newer opset."""
    rows = {t: tuple(Difference(r.since, r.what) for r in found) for t, found in DIFFERENCES.items()}
    with monkeypatch.context() as patched:
        patched.setattr(newer_opsets, "DIFFERENCES", rows)
        return raised(old, version)


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_that_is_only_read_anew_gives_other_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opset, build, inputs = LOOKUPS[name]
    old = program(build, *inputs, opset=opset)
    new = naively(old, NEWEST, monkeypatch)
    assert not np.array_equal(run(old, *inputs)[0], run(new, *inputs)[0])


def test_a_clip_that_is_only_read_anew_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    old = program(op("clip", alpha=1.0, beta=1.0), ROW)
    with pytest.raises(ane.errors.LoadError, match="alpha"):
        naively(old, NEWEST, monkeypatch)


def test_indices_that_cannot_be_negative_get_no_guard() -> None:
    old = program(lambda x: mb.gather(x=TABLE, indices=mb.reduce_argmax(x=x, axis=1), axis=0), ROW[:, :5])
    assert "select" not in {op.op_type for op in walk_ops(raised(old, NEWEST))}


def test_the_length_of_a_flexible_axis_is_asked_at_run_time() -> None:
    old = mb.program(
        input_specs=[
            mb.TensorSpec((ct.converters.mil.mil.get_new_symbol(), 4)),
            mb.TensorSpec((2,), dtype=types.int32),
        ],
        opset_version=I15,
    )(lambda x, i: mb.gather(x=x, indices=i, axis=0, name="y"))

    given = {"x": TABLE, "i": np.array([-1, -5], np.int32)}
    np.testing.assert_array_equal(ane.run(old, given)["y"], TABLE[[-1, -5]])
    np.testing.assert_array_equal(ane.run(raised(old, NEWEST), given)["y"], TABLE[[-1, -5]])


def test_ops_in_nested_blocks_are_raised_too() -> None:
    def build(x: Any, i: Any) -> Any:
        def look() -> Any:
            return mb.gather(x=TABLE, indices=i, axis=0)

        def other() -> Any:
            return mb.gather(x=TABLE, indices=np.array([[-1, 0, 0]], np.int32), axis=0)

        first = mb.reduce_max(x=x, axes=[0, 1], keep_dims=False)
        return mb.cond(pred=mb.greater(x=first, y=np.float32(0)), _true_fn=look, _false_fn=other)

    for x in (ROW, -abs(ROW)):
        ids = np.array([[-1, 2, -5]], np.int32)
        old = program(build, x, ids)
        np.testing.assert_array_equal(run(old, x, ids)[0], run(raised(old, NEWEST), x, ids)[0])


def test_names_of_inputs_and_outputs_stay() -> None:
    old = mb.program(input_specs=[mb.TensorSpec((1, 6))], opset_version=I15)(
        op("clip", alpha=0.5, beta=0.5, name="clipped")
    )

    (function,) = raised(old, NEWEST).functions.values()
    assert list(function.inputs) == ["x"]
    assert [v.name for v in function.outputs] == ["clipped"]
    assert [v.name for f in old.functions.values() for v in f.outputs] == ["clipped"]
    assert {op.op_type for op in walk_ops(old)} == {"const", "clip"}  # it is not edited


# -- the table is complete ---------------------------------------------------------------------------------


def test_every_newer_form_of_every_op_has_a_row() -> None:
    several = {t: changes(t) for t in op_types() if changes(t)}
    assert len(several) > 40
    assert {t: tuple(r.since for r in rows) for t, rows in DIFFERENCES.items()} == several


def accepted(form: Any, name: str) -> set[str]:
    """The types that an input of an op may have."""
    kind = form.input_spec.input_types[name]
    domain = getattr(kind, "_type_domain", ()) or form.type_domains.get(
        getattr(kind, "_type_domain_id", None), ()
    )
    return {types.builtin_to_string(t) for t in domain}


def test_rows_that_do_nothing_are_of_forms_that_only_take_more() -> None:
    looked_at = 0
    for op_type, rows in DIFFERENCES.items():
        forms = SSAOpRegistry.core_ops[op_type]
        for row in rows:
            if row.rewrite is not None or row.recode is not None or row.refused:
                continue
            old, new = (forms[ct.target(v)].input_spec.input_types for v in (row.since - 1, row.since))
            assert old.keys() <= new.keys(), op_type
            assert all(new[name].optional for name in new.keys() - old.keys()), op_type
            for name, kind in old.items():
                assert kind.optional == new[name].optional, (op_type, name)
                assert accepted(forms[ct.target(row.since - 1)], name) <= accepted(
                    forms[ct.target(row.since)], name
                ), (op_type, name)
                looked_at += 1
    assert looked_at > 100


def test_a_form_that_has_no_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = program(op("elu", alpha=0.5), ROW)
    rows = {t: r for t, r in DIFFERENCES.items() if t != "elu"}
    monkeypatch.setattr(newer_opsets, "DIFFERENCES", rows)
    with pytest.raises(SurgeryError, match="what elu means from iOS 17 on is not known here"):
        raised(old, NEWEST)


def test_what_has_no_equal_is_refused_with_the_op() -> None:
    old = program(*CASES["crop_resize of iOS 15, raised to iOS 16"][1:2], PICTURE)
    with pytest.raises(
        SurgeryError, match=r"is of iOS 15 and cannot become one of iOS 18: crop_resize_\d+: its boxes"
    ):
        raised(old, NEWEST)
    boxes, scores = np.zeros((1, 3, 4), np.float32), np.zeros((1, 3, 2), np.float32)

    def suppress(b: Any, s: Any) -> Any:
        return mb.non_maximum_suppression(
            boxes=b, scores=s, iou_threshold=0.5, score_threshold=0.5, max_boxes=2, per_class_suppression=False
        )

    refusal = why_not(program(suppress, boxes, scores), NEWEST)
    assert refusal is not None
    assert "score_threshold" in str(refusal)


def test_an_opset_is_never_lowered() -> None:
    new = program(op("relu"), ROW, opset=I17)
    with pytest.raises(SurgeryError, match="an opset is never lowered"):
        raised(new, 6)


# -- every door that writes --------------------------------------------------------------------------------


def lookup(opset: Any) -> Program:
    """Rows of a table by ids that may count from its end."""

    @mb.program(input_specs=[mb.TensorSpec((1, 3), dtype=types.int32)], opset_version=opset)
    def made(ids: Any) -> Any:
        rows = mb.gather(x=TABLE, indices=ids, axis=0, name="rows")
        return mb.relu(x=mb.add(x=rows, y=weight(1, 3, 4), name="sum"), name="y")

    return made


WANTED = TABLE[[[0, -1, -5]]] + weight(1, 3, 4)
GIVEN = {"ids": np.array([[0, -1, -5]], np.int32)}


def old_in_newer_file() -> Loaded:
    """A function of iOS 15 in a file of iOS 17: a file may be newer than its functions."""
    made = lookup(I15)
    return Loaded(made, new_spec(made, 8))


@pytest.fixture(scope="module", name="old")
def _old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from anesurgery.files.package import save

    return save(old_in_newer_file(), tmp_path_factory.mktemp("old") / "old.mlpackage")


def check(model: Any, **more: Any) -> None:
    """It reads the rows that the first one reads."""
    np.testing.assert_array_equal(ane.run(model, GIVEN, **more)["y"], np.maximum(WANTED, 0))


@pytest.mark.parametrize("second", ["the same", "iOS 15", "iOS 16", "iOS 18"])
def test_merge_keeps_what_ids_mean(second: str, old: Path, tmp_path: Path) -> None:
    others: dict[str, Any] = {"the same": old, "iOS 15": lookup(I15), "iOS 16": lookup(I16)}
    newer = program(op("elu", alpha=0.5), ROW, opset=ct.target.iOS18)
    both = ane.merge({"one": old, "two": others.get(second, newer)}, tmp_path / "both.mlpackage")
    check(both, function="one")
    if second in others:
        check(both, function="two")
    spec = ct.utils.load_spec(str(both))
    assert {f.opset for f in spec.mlProgram.functions.values()} == {"CoreML8"}
    check(ane.extract(both, "one", tmp_path / "one.mlpackage"))


def test_merge_refuses_what_would_mean_something_else(old: Path, tmp_path: Path) -> None:
    crops = program(*CASES["crop_resize of iOS 15, raised to iOS 16"][1:2], PICTURE)
    with pytest.raises(SurgeryError, match="function 'two' is of iOS 15 and cannot become one of iOS 18"):
        ane.merge({"one": old, "two": crops}, tmp_path / "both.mlpackage")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_newer_than_its_function_is_kept_so(old: Path, tmp_path: Path) -> None:
    check(old)
    check(ane.apply(old, []).save(tmp_path / "same.mlpackage"))
    spec = ct.utils.load_spec(str(tmp_path / "same.mlpackage"))
    assert (spec.specificationVersion, spec.mlProgram.functions["main"].opset) == (8, "CoreML5")


@pytest.mark.parametrize("name", ["chunks", "chunks.mlpackage"])
def test_chunks_keep_what_ids_mean(old: Path, tmp_path: Path, name: str) -> None:
    check(ane.split(old, 2).save(tmp_path / name))


def test_a_pass_that_needs_a_newer_opset_keeps_what_ids_mean() -> None:
    halves = ane.passes.InterfaceFp16(newer_opset=True)
    found = ane.apply(lookup(I15), [halves], prove=None)
    check(found.program)
    (function,) = found.program.functions.values()
    assert function.opset_version == I16

"""Block scales: decompressed exactly, kept where they agree, or rounded within a stated error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, stays, table

import anesurgery as ane
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.passes import channel_scales
from anesurgery.passes.channel_scales import ChannelScales
from anesurgery.testing import apply_pass, assert_refuses, assert_same_numbers

INT4 = types.np_int4_dtype
RNG = np.random.default_rng(0)
DATA = {
    kind: RNG.integers(-8, 8, (32, 64)).astype(dtype) for kind, dtype in (("int4", INT4), ("int8", np.int8))
}
SCALES = (RNG.random((32, 4)) / 8 + 0.01).astype(np.float16)


def program(build: Callable[[Var], Any], *shape: int) -> Program:
    made: Program = mb.program(
        input_specs=[mb.TensorSpec(shape, dtype=types.fp16)], opset_version=ct.target.iOS18
    )(build)
    return made


def blocks(data: Any, scale: Any, **more: Any) -> Var:
    return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, **more)


def linear(data: Any = DATA["int4"], scale: Any = SCALES, **more: Any) -> Program:
    return program(lambda x: mb.linear(x=x, weight=blocks(data, scale, **more)), 2, 64)


def affine(x: Var) -> Var:
    """Weights of iOS 16 with a scale for each input."""
    weight = mb.constexpr_affine_dequantize(
        quantized_data=DATA["int8"], scale=SCALES.ravel()[:64], zero_point=np.zeros(64, np.int8), axis=1
    )
    return mb.linear(x=x, weight=weight)


def sparse(x: Var) -> Var:
    """Block scales of the numbers that are not zero."""
    mask = (np.arange(2048).reshape(32, 64) % 2).astype(types.np_uint1_dtype)
    kept = DATA["int8"][np.asarray(mask, bool)]
    mask, data = mb.constexpr_sparse_blockwise_shift_scale(data_mask=mask, nonzero_data=kept, scale=SCALES)
    return mb.linear(x=x, weight=mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "linear": linear,
    "linear, fp16 offsets": lambda: linear(scale=SCALES[:, :1], offset=RNG.random((32, 1)).astype(np.float16)),
    "linear, offsets": lambda: linear(offset=RNG.integers(-3, 3, (32, 4)).astype(INT4)),
    "conv": lambda: program(
        lambda x: mb.conv(x=x, weight=blocks(DATA["int4"].reshape(32, 64, 1, 1), SCALES.reshape(32, 4, 1, 1))),
        1,
        64,
        4,
        4,
    ),
    "matmul": lambda: program(
        lambda x: mb.matmul(x=x, y=blocks(DATA["int8"].T.copy(), SCALES.T.copy())), 2, 64
    ),
    "affine by input": lambda: program(affine, 2, 64),
    "sparse": lambda: program(sparse, 2, 64),
}


def legal(made: Program) -> set[bool | None]:
    return {row.legal for row in ane.inspect(made, "M2/macOS 15").ops}


@pytest.mark.parametrize("name", PROGRAMS)
def test_plain_numbers_keep_every_bit(name: str) -> None:
    before = PROGRAMS[name]()
    after, session = apply_pass(ChannelScales(), before)
    assert [change.proof is not None for change in session.changes] == [True]
    assert legal(before) == {None if name == "linear, fp16 offsets" else False}
    assert legal(after) == {True}
    assert_same_numbers(before, after, rtol=0.0)
    assert not [op for op in walk_ops(after) if op.op_type.startswith("constexpr_")]


EQUAL = {"groups of outputs": SCALES[:16, :1], "equal blocks": np.repeat(SCALES[:, :1], 4, 1)}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("form", ["plain", "int8", "palette"])
def test_scales_that_agree_are_kept(name: str, form: str) -> None:
    """Nothing is decompressed or rounded where the blocks of a channel share one scale."""
    before = linear(scale=EQUAL[name])
    after, session = apply_pass(ChannelScales(form=form), before)
    assert [change.proof is not None for change in session.changes] == [True]
    weights = [op for op in walk_ops(after) if op.op_type == "constexpr_blockwise_shift_scale"]
    assert [tuple(op.scale.shape) for op in weights] == [(32, 1)]
    assert weights[0].data.val.dtype == INT4
    assert_same_numbers(before, after, rtol=0.0)
    assert legal(after) == {True}


def stated(notes: list[str]) -> str:
    """The error in a note."""
    (found,) = re.findall(r"off by up to ([\d.]+%)", " ".join(notes))
    return str(found)


@pytest.mark.parametrize("form", ["int8", "palette"])
@pytest.mark.parametrize("by_output", [True, False])
def test_rounded_weights_state_their_error(form: str, by_output: bool) -> None:
    """Rows of the identity read the weights one by one."""
    data, scale = (DATA["int4"], SCALES) if by_output else (DATA["int4"].T.copy(), SCALES.T.copy())
    rows = np.eye(64, dtype=np.float16)

    def build(x: Var) -> Var:
        weight = blocks(data, scale)
        return mb.linear(x=x, weight=weight) if by_output else mb.matmul(x=x, y=weight)

    before = program(build, 64, 64)
    if form == "palette":  # one for all channels: those with small weights are off by more of theirs
        assert_refuses(ChannelScales(form=form, most_error=1e-3), before, "the limit is 0.10%")
    after, session = apply_pass(ChannelScales(form=form, most_error=0.2), before)
    assert "compare whole models" in session.changes[0].unchecked
    assert legal(after) == {True}
    old, new = (next(iter(ane.run(made, {"x": rows}).values())) for made in (before, after))
    off = (np.abs(new - old) / np.abs(old).max(0)).max()
    assert off > 0
    assert f"{off:.2%}" == stated(session.notes)


def test_few_values_make_an_exact_palette() -> None:
    before = linear(scale=np.repeat(SCALES[:1], 32, 0))
    after, session = apply_pass(ChannelScales(form="palette"), before)
    assert stated(session.notes) == "0.00%"
    assert_same_numbers(before, after, rtol=0.0)


@pytest.mark.parametrize(("target", "acts"), [("A16", False), ("M4", True)])
def test_plain_weights_must_fit_into_a_program(
    target: str, acts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_scales, "decompressed_bytes", lambda function: 3 << 29)
    surgery = ane.apply(linear(), [ChannelScales()], target=target, quiet=True)
    assert bool(surgery.changes) is acts
    assert any("decompressed, the weights take 1.61 GB" in str(why) for _, why in surgery.refusals) is not acts
    assert ane.apply(linear(), [ChannelScales(form="int8")], target=target, quiet=True).changes


def test_a_tied_weight_is_stored_once() -> None:
    def tied(x: Var) -> Any:
        weight = blocks(DATA["int8"], SCALES)
        return mb.linear(x=x, weight=weight), mb.matmul(x=x, y=weight, transpose_y=True)

    after, session = apply_pass(ChannelScales(), program(tied, 2, 64))
    assert len(session.changes) == 2
    assert len({(op.inputs.get("weight") or op.y) for op in walk_ops(after) if op.op_type != "const"}) == 1


@pytest.mark.parametrize("form", ["plain", "int8", "palette"])
def test_ops_that_read_a_weight_along_two_axes_do_not_share_its_scales(form: str) -> None:
    """The blocks of each output of the second op agree, so that its scales are kept; not so for the first."""
    data, scale = DATA["int8"][:, :32].copy(), np.repeat(SCALES[:, :1], 4, 1)

    def both(x: Var) -> Any:
        weight = blocks(data, scale)
        return mb.matmul(x=x, y=weight), mb.matmul(x=x, y=weight, transpose_y=True)

    before = program(both, 2, 32)
    after, session = apply_pass(ChannelScales(form=form, most_error=0.9), before)
    assert [change.proof is not None for change in session.changes] == [form == "plain", True]
    assert len({op.y for op in walk_ops(after) if op.op_type == "matmul"}) == 2
    assert [("scales are kept" in note) for note in session.notes] == [False, True]
    if form == "plain":
        assert_same_numbers(before, after, rtol=0.0)


@pytest.mark.parametrize(("form", "weights"), [("plain", 1), ("int8", 2), ("palette", 1)])
def test_scales_that_depend_on_the_axis_are_stored_for_each(form: str, weights: int) -> None:
    """Each op is changed once: the second is not rounded from numbers that the first one rounded."""
    data = DATA["int8"][:, :32].copy()

    def both(x: Var) -> Any:
        weight = blocks(data, (RNG.random((4, 4)) / 8 + 0.01).astype(np.float16))
        return mb.matmul(x=x, y=weight), mb.matmul(x=x, y=weight, transpose_y=True)

    after, session = apply_pass(ChannelScales(form=form, most_error=0.9), program(both, 2, 32))
    assert len(session.changes) == 2
    assert len({op.y for op in walk_ops(after) if op.op_type == "matmul"}) == weights
    assert legal(after) == {True}


test_cases, test_surroundings = table(
    ChannelScales(form="int8", most_error=0.0001),
    refuses("off by up to", linear),
    refuses("need iOS 18", program, affine, 2, 64, step=ChannelScales(form="palette")),
    refuses("holds", linear, scale=np.full((32, 4), 60000, np.float16), step=ChannelScales()),
    stays(linear, scale=SCALES[:, :1], step=ChannelScales()),
    stays(linear, scale=SCALES[:1, :1], step=ChannelScales()),
)

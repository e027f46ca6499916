"""Sequences channels first: which regions go, what stays at their ends, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pass_cases import refuses, rewrites, table
from transformer_blocks import BLOCKS, block

from anesurgery.checking.grades import Grade
from anesurgery.mil import Program, Var, ct, mb, new_symbol, types, walk_ops
from anesurgery.passes.channels_first import ChannelsFirst, channel_regions
from anesurgery.placement.target import Target
from anesurgery.regions.channel_steps import MOVES_NOTHING
from anesurgery.testing import apply_pass, assert_same_numbers

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return RNG.standard_normal(shape).astype(np.float32)


def built(build: Callable[[Var], Any], shape: tuple[Any, ...] = (1, 8, 16)) -> Program:
    return mb.program(input_specs=[mb.TensorSpec(shape)], opset_version=ct.target.iOS17)(lambda x: build(x))


def linear(x: Var, outputs: int, bias: bool = True) -> Var:
    weight = RNG.standard_normal((outputs, int(x.shape[-1]))).astype(np.float32)
    extra = {"bias": RNG.standard_normal(outputs).astype(np.float32)} if bias else {}
    return mb.linear(x=x, weight=weight, **extra)


def mlp(x: Var) -> Var:
    return mb.add(x=linear(mb.silu(x=linear(x, 24)), int(x.shape[-1])), y=x)


def kinds(program: Program) -> Counter[str]:
    return Counter(op.op_type for op in walk_ops(program) if op.op_type != "const")


@pytest.mark.parametrize("shape", [(8, 16), (1, 8, 16), (2, 8, 16), (2, 3, 5, 16)])
def test_a_hidden_layer_of_any_rank(shape: tuple[int, ...]) -> None:
    program = built(mlp, shape)
    after, session = apply_pass(ChannelsFirst(), program)
    found = kinds(after)
    assert (found["linear"], found["conv"], found["transpose"]) == (0, 2, 2)
    assert [c.proof.grade for c in session.changes if c.proof] == [Grade.BITS]
    assert_same_numbers(program, after, rtol=1e-5)


def interleaved(x: Var) -> Var:
    """Heads that are taken apart, turned, and put together in another order."""
    heads = mb.reshape(x=linear(x, 24), shape=[1, 8, 4, 6])
    turned = mb.reshape(x=mb.transpose(x=heads, perm=[0, 1, 3, 2]), shape=[1, 8, 24])
    gamma = RNG.standard_normal(24).astype(np.float32)
    return linear(mb.layer_norm(x=turned, axes=[-1], gamma=gamma), 16)


@pytest.mark.parametrize("largest", [2, 3, 5])
def test_a_region_in_parts_is_the_same_region(monkeypatch: pytest.MonkeyPatch, largest: int) -> None:
    program = built(lambda x: mlp(mlp(mlp(x))))
    monkeypatch.setattr("anesurgery.passes.channels_first.channel_regions.LARGEST", largest)
    after, session = apply_pass(ChannelsFirst(), program)
    assert len(session.changes) > 1
    assert kinds(after) == {"conv": 6, "silu": 3, "add": 3, "transpose": 2, "expand_dims": 1, "squeeze": 1}
    assert_same_numbers(program, after, rtol=1e-5)


def quantized(outputs: int, inputs: int) -> Var:
    """A scale for each output, as iOS 16 has it."""
    data = RNG.integers(-9, 9, (outputs, inputs)).astype(np.int8)
    ones = RNG.uniform(0.1, 0.2, outputs).astype(np.float32)
    return mb.constexpr_affine_dequantize(quantized_data=data, zero_point=np.int8(1), scale=ones, axis=-2)


def palette(outputs: int, inputs: int) -> Var:
    """Packed indices into one table, as iOS 16 has it."""
    shape = np.array([outputs, inputs], np.uint32)
    indices = RNG.integers(0, 256, outputs * inputs // 2).astype(np.uint8)
    return mb.constexpr_lut_to_dense(indices=indices, lut=floats(16), shape=shape)


def sparse(outputs: int, inputs: int) -> Var:
    """Half of the numbers, with a packed mask."""
    bits = np.arange(outputs * inputs) % 2
    shape = np.array([outputs, inputs], np.uint32)
    packed = np.packbits(bits.astype(np.uint8), bitorder="little")
    return mb.constexpr_sparse_to_dense(nonzero_data=floats(int(bits.sum())), mask=packed, shape=shape)


def in_blocks(outputs: int, inputs: int) -> Var:
    """A scale and an offset for each block, of four bits."""
    data = RNG.integers(-8, 8, (outputs, inputs)).astype(types.np_int4_dtype)
    offset = RNG.integers(-8, 8, (outputs // 2, inputs // 8)).astype(types.np_int4_dtype)
    return mb.constexpr_blockwise_shift_scale(data=data, scale=floats(*offset.shape), offset=offset)


def quantized_palette(outputs: int, inputs: int) -> Var:
    """A table for each group of outputs, which is quantized itself."""
    table = RNG.integers(-90, 90, (outputs // 4, 1, 16, 1)).astype(np.int8)
    lut = mb.constexpr_blockwise_shift_scale(data=table, scale=floats(1, 1, 1, 1))
    indices = RNG.integers(0, 16, (outputs, inputs)).astype(types.np_uint4_dtype)
    return mb.constexpr_lut_to_dense(indices=indices, lut=lut)


def sparse_palette(outputs: int, inputs: int) -> Var:
    """Numbers of a table where a mask is set."""
    mask = (np.arange(outputs * inputs) % 3 == 0).reshape(outputs, inputs).astype(types.np_uint1_dtype)
    numbers = RNG.integers(0, 4, int((mask != 0).sum())).astype(types.np_uint2_dtype)
    mask, data = mb.constexpr_lut_to_sparse(
        indices_mask=mask, indices_nonzero_data=numbers, lut=floats(1, 1, 4, 1)
    )
    return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask)


def sparse_blocks(outputs: int, inputs: int) -> Var:
    """Quantized numbers where a mask is set."""
    mask = (np.arange(outputs * inputs) % 3 == 0).reshape(outputs, inputs).astype(types.np_uint1_dtype)
    numbers = RNG.integers(-8, 8, int((mask != 0).sum())).astype(np.int8)
    mask, data = mb.constexpr_sparse_blockwise_shift_scale(
        data_mask=mask, nonzero_data=numbers, scale=floats(outputs, 1)
    )
    return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask)


COMPRESSED = [quantized, palette, sparse, in_blocks, quantized_palette, sparse_palette, sparse_blocks]


def squeezed(weight: Callable[[int, int], Var]) -> Program:
    """A hidden layer of compressed weights."""
    opset = ct.target.iOS16 if weight in COMPRESSED[:3] else ct.target.iOS18

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 16))], opset_version=opset)
    def program(x: Var) -> Var:
        hidden = mb.relu(x=mb.linear(x=x, weight=weight(32, 16)))
        return mb.add(x=mb.linear(x=hidden, weight=weight(16, 32)), y=x)

    return program


@pytest.mark.parametrize("weight", COMPRESSED)
def test_compressed_weights_stay_compressed(weight: Callable[[int, int], Var]) -> None:
    after, session = apply_pass(ChannelsFirst(), program := squeezed(weight))
    stored = {k: n for k, n in kinds(program).items() if k.startswith("constexpr")}
    assert {k: n for k, n in kinds(after).items() if k.startswith("constexpr")} == stored
    assert (kinds(after)["linear"], kinds(after)["conv"]) == (0, 2)
    assert all(c.proof and c.proof.grade >= Grade.PROVED for c in session.changes)
    assert_same_numbers(program, after, rtol=1e-5)


def test_auto_may_try_it_only_where_it_was_measured_to_help() -> None:
    tried = {text: bool(ChannelsFirst.variants(Target.parse(text))) for text in ("M1", "M1-M3", "M4", "any")}
    assert tried == {"M1": True, "M1-M3": False, "M4": False, "any": False}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_a_transformer(name: str) -> None:
    """All its products are convolutions but those of attention, and transpositions stand at the ends only."""
    after, session = apply_pass(ChannelsFirst(), block(name))
    found = kinds(after)
    assert found["linear"] == 0
    assert found["matmul"] == 2  # scores, and weighted values
    assert found["transpose"] <= 2
    assert all(c.proof and c.proof.grade >= Grade.PROVED for c in session.changes)
    assert not apply_pass(ChannelsFirst(), after, prove=False)[1].changes


@pytest.mark.slow
def test_regions_are_renewed_as_they_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each edit; regions of views alone, which are never rebuilt, do not count."""
    renew, times = channel_regions._Finder.update, []

    def both(self: Any) -> None:
        renew(self)
        anew = channel_regions._Finder(self.block)
        renew(anew)
        sides = [
            [r.ops for r in finder.regions if not {op.op_type for op in r.steps} <= MOVES_NOTHING]
            for finder in (self, anew)
        ]
        assert sides[0] == sides[1]
        times.append(len(self.regions))

    monkeypatch.setattr(channel_regions._Finder, "update", both)
    for name in ("bert", "llama"):
        apply_pass(ChannelsFirst(), block(name, 2), prove=False)
    assert len(times) > 4
    assert not channel_regions._FINDERS


def rows_of_an_image(x: Var) -> Var:
    """Images that go channels last for two products and come back: no transposition is left."""
    rows = mb.transpose(x=x, perm=[0, 2, 3, 1])
    rows = mb.layer_norm(x=rows, axes=[-1], gamma=np.arange(1, 17, dtype=np.float32))
    return mb.transpose(x=mlp(rows), perm=[0, 3, 1, 2])


def with_constants(x: Var) -> Var:
    """Of the shapes that models hold them in: by channel, by token, of both, by head."""
    y = mlp(x)
    for shape in ((16,), (8, 1), (8, 16), (1, 1, 16)):
        y = mb.mul(x=y, y=RNG.standard_normal(shape).astype(np.float32))
    heads = mb.reshape(x=y, shape=[1, 8, 4, 4])
    for shape in ((4,), (4, 1), (8, 1, 1), (8, 1, 4)):
        heads = mb.add(x=heads, y=RNG.standard_normal(shape).astype(np.float32))
    return linear(mb.reshape(x=heads, shape=[1, 8, 16]), 16)


def parts_of_channels_and_tokens(x: Var) -> Var:
    first, second = mb.split(x=linear(x, 32), num_splits=2, axis=-1)
    y = mb.mul(x=first, y=mb.sigmoid(x=second))
    start = mb.slice_by_index(x=y, begin=[0, 0, 0], end=[1, 3, 16])
    y = mb.concat(values=[start, y, RNG.standard_normal((1, 1, 16)).astype(np.float32)], axis=1)
    y = mb.mul(x=y, y=mb.rsqrt(x=mb.reduce_mean(x=mb.square(x=y), axes=[-1], keep_dims=True)))
    heads = mb.reshape(x=y, shape=[1, 12, 4, 4])
    half = [
        mb.slice_by_index(x=heads, begin=[0, 0, 0, i], end=[1, 12, 4, i + 2], end_mask=[True] * 3 + [False])
        for i in (2, 0)
    ]
    heads = mb.layer_norm(x=mb.concat(values=half, axis=-1), axes=[-1])
    return linear(mb.reshape(x=heads, shape=[1, 12, 16]), 16)


def with_fixed_size(x: Var) -> Var:
    """A sum of a fixed shape, though one operand has none."""
    return linear(mb.add(x=x, y=floats(1, 8, 16)), 16)


test_cases, test_surroundings = table(
    ChannelsFirst(),
    *(
        refuses(reason, built, build, shape)
        for build, shape, reason in [
            (lambda x: linear(x, 16), (1, 8, 16), "it would only add transpositions at its ends"),
            (mlp, (1, 1, 16), "has no axis of several tokens beside its channels"),
            (with_fixed_size, (1, new_symbol(), new_symbol()), "it would only add transpositions at its ends"),
        ]
    ),
    refuses("has the dynamic shape", built, mlp, (1, new_symbol(), 16)),
    rewrites(built, interleaved, rtol=1e-5),
    rewrites(built, rows_of_an_image, (2, 16, 3, 5), rtol=1e-5),
    rewrites(built, with_constants, rtol=1e-5),
    rewrites(built, parts_of_channels_and_tokens, rtol=1e-5),
    # What leaves is transposed before a long head and not after it.
    rewrites(built, lambda x: linear(mlp(x), 1000), rtol=1e-5, id="a head longer than its operand"),
)

"""Numbers encoded in the form of another weight: each form holds what it can, and says what it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from anesurgery.checking.output_comparison import psnr
from anesurgery.errors import Refused
from anesurgery.files import sub_byte
from anesurgery.mil import Array, Program, Var, ct, is_compressed, mb, types
from anesurgery.regions import clusters, reencoding
from anesurgery.regions.clusters import nearest, tables_of
from anesurgery.regions.compressed_weights import decoded, edit_weight
from anesurgery.regions.reencoding import encoded, numbers_of, stored_bytes
from anesurgery.regions.weight_edits import Edit
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.session import Session

SHAPE = (8, 12, 2)


def numbers(seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(SHAPE)


def halves(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def whole(seed: int, most: int, shape: tuple[int, ...] = SHAPE) -> Array:
    return np.random.default_rng(seed).integers(0, most, shape).astype(np.uint8)


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float16)


def affine(dtype: type, zero: int) -> Var:
    data: Array = whole(1, 100).astype(dtype)
    point: Array = np.full(12, zero, dtype)
    return mb.constexpr_affine_dequantize(
        quantized_data=data, zero_point=point, scale=ones(12), axis=np.int32(1)
    )


def packed_palette() -> Var:
    indices = sub_byte.pack(whole(1, 64), 6)
    return mb.constexpr_lut_to_dense(indices=indices, lut=halves(2, 64), shape=np.array(SHAPE, np.uint32))


def packed_sparse() -> Var:
    mask = whole(1, 2)
    data, shape = halves(2, int(mask.sum())), np.array(SHAPE, np.uint32)
    return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=sub_byte.pack(mask, 1), shape=shape)


def blocks(kind: str, offset: bool) -> Var:
    dtype = types.nptype_from_builtin(types.string_to_builtin(kind))
    more = {"offset": whole(3, 7, (4, 3, 1)).astype(dtype)} if offset else {}
    return mb.constexpr_blockwise_shift_scale(data=whole(1, 7).astype(dtype), scale=ones(4, 3, 1), **more)


def palette(groups: tuple[int, ...], vector: int = 1) -> Var:
    shape = (SHAPE[0], SHAPE[1] // vector, SHAPE[2])
    more = {"vector_axis": np.int32(1)} if vector > 1 else {}
    indices = whole(1, 16, shape).astype(types.np_uint4_dtype)
    return mb.constexpr_lut_to_dense(indices=indices, lut=halves(2, *groups, 16, vector), **more)


def sparse(build: Callable[[Array], tuple[Var, Var]]) -> Var:
    mask, data = build(whole(1, 2).astype(types.np_uint1_dtype))
    return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask)


def sparse_palette(mask: Array) -> tuple[Var, Var]:
    indices = whole(4, 16, (int(mask.sum()),)).astype(types.np_uint4_dtype)
    made: tuple[Var, Var] = mb.constexpr_lut_to_sparse(
        indices_mask=mask, indices_nonzero_data=indices, lut=halves(2, 4, 1, 1, 16, 1)
    )
    return made


def sparse_blocks(mask: Array) -> tuple[Var, Var]:
    data = whole(4, 90, (int(mask.sum()),)).astype(np.int8)
    made: tuple[Var, Var] = mb.constexpr_sparse_blockwise_shift_scale(
        data_mask=mask, nonzero_data=data, scale=ones(4, 3, 1)
    )
    return made


def quantized_table() -> Var:
    table = mb.constexpr_blockwise_shift_scale(
        data=whole(1, 99, (4, 1, 1, 16, 1)).astype(np.int8), scale=ones(1, 1, 1, 1, 1)
    )
    return mb.constexpr_lut_to_dense(indices=whole(2, 16).astype(types.np_uint4_dtype), lut=table)


def scaled_palette() -> Var:
    return mb.constexpr_blockwise_shift_scale(data=palette((1, 4, 1)), scale=ones(8, 1, 1))


FORMS: dict[str, tuple[Callable[[], Var], bool, float]] = {
    "affine": (lambda: affine(np.int8, 0), False, 40),
    "affine, unsigned": (lambda: affine(np.uint8, 128), False, 40),
    "affine with zero points": (lambda: affine(np.int8, 5), False, 40),
    "one table": (packed_palette, False, 35),
    "sparse": (packed_sparse, False, 70),
    "blocks": (lambda: blocks("int8", False), True, 45),
    "blocks of 4 bits": (lambda: blocks("int4", False), True, 20),
    "blocks of 4 bits with offsets": (lambda: blocks("uint4", True), True, 22),
    "tables of groups": (lambda: palette((8, 1, 1)), True, 35),
    "vectors": (lambda: palette((1, 1, 1), 2), True, 15),
    "sparse palette": (lambda: sparse(sparse_palette), True, 20),
    "sparse blocks": (lambda: sparse(sparse_blocks), True, 45),
    "quantized table": (quantized_table, True, 20),
    "palette with scales": (scaled_palette, True, 20),
}
"""Form -> what makes it, is it of iOS 18, and the dB at which it holds normal numbers at least."""


def weight_of(make: Callable[[], Var], new: bool) -> tuple[Program, Var]:
    """A program that decodes a weight, and the weight."""
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec((1,))], opset_version=ct.target.iOS18 if new else ct.target.iOS16)
    def program(x: Var) -> Var:
        made.append(make())
        return mb.mul(x=x, y=mb.cast(x=mb.reduce_sum(x=made[0]), dtype="fp32"))

    return program, made[0]


def held(weight: Var, wanted: Array) -> float:
    """How well a form holds some numbers, in dB."""
    found = numbers_of(encoded(weight, wanted)).astype(np.float64)
    assert found.shape == wanted.shape
    return psnr(float(np.abs(wanted).max()), math.sqrt(float(np.mean((found - wanted) ** 2))))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_holds_new_numbers(form: str) -> None:
    make, new, least = FORMS[form]
    _, weight = weight_of(make, new)
    wanted = numbers()
    if "sparse" in form:
        wanted[wanted < 0.3] = 0
    assert held(weight, wanted) > least


@pytest.mark.parametrize("form", [name for name in FORMS if "sparse" not in name])
def test_each_form_holds_its_own_numbers_times_a_power_of_two(form: str) -> None:
    make, new, _ = FORMS[form]
    _, weight = weight_of(make, new)
    own = decoded(weight).astype(np.float64)
    assert held(weight, own / 4) > (50 if form == "quantized table" else 90)


def test_k_means_is_better_than_the_nearest_entries_of_the_old_table() -> None:
    _, weight = weight_of(packed_palette, False)
    wanted = 3 * numbers()
    table = halves(2, 64).astype(np.float64)
    nearest = table[np.abs(wanted[..., None] - table).argmin(-1)]
    off = psnr(float(np.abs(wanted).max()), math.sqrt(float(np.mean((nearest - wanted) ** 2))))
    assert held(weight, wanted) > off + 10


def test_a_wrong_zero_point_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version: numbers of blocks are rounded without their zero points."""
    real = reencoding._quantized

    def wrong(*given: Any) -> reencoding._Quantized:
        quantized = real(*given)
        return replace(quantized, zero=quantized.zero + 1)

    _, weight = weight_of(lambda: affine(np.int8, 5), False)
    right = held(weight, numbers())
    monkeypatch.setattr(reencoding, "_quantized", wrong)
    monkeypatch.setattr(reencoding, "_rescaled_or_new", lambda cells, old, new: new)
    assert held(weight, numbers()) < right - 6


def test_few_values_are_found_exactly_and_many_by_their_means(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.repeat([[0.5], [-2.0], [7.0]], 5, axis=0)
    (table,) = tables_of([rows], 4)
    np.testing.assert_array_equal(table[nearest(rows, table)], rows)
    few = np.array([[0.0], [1], [2], [10], [11], [30], [30]])
    assert _off(few, 3) == 2.5  # 0 1 2 | 10 11 | 30 30: no cut of the sorted values in three is better
    spread = np.random.default_rng(1).standard_normal((500, 2))
    good = _off(spread)
    monkeypatch.setattr(clusters, "ROUNDS", 0)  # the wrong version: the values stay where they began
    assert good < 0.9 * _off(spread)


@pytest.mark.slow
def test_many_numbers_are_found_by_means_of_near_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers with long tails, where the wrong version, parts of one width, is too coarse in the middle."""
    numbers = np.random.default_rng(2).standard_t(3, (20000, 1))
    few = _off(numbers, 256)
    monkeypatch.setattr(clusters, "_merged_neighbours", _evenly_merged)
    even = _off(numbers, 256)
    monkeypatch.setattr(clusters, "LEAST_MEANS", len(numbers))
    assert few <= 1.002 * _off(numbers, 256)
    assert even > 1.01 * few


def _evenly_merged(known: Any, counts: Any, parts: int) -> Any:
    places = ((known - known[0]) / (known[-1] - known[0]) * (parts - 1)).astype(int)
    total = np.bincount(places, counts)
    return (np.bincount(places, counts * known)[total > 0] / total[total > 0])[:, None], total[total > 0]


@pytest.mark.parametrize("size", [1.0, 2.0**-20, 2.0**100])
def test_very_many_numbers_are_counted_by_what_they_are_near(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong version takes the numbers of fp16 for those that are near them, or for all that there are."""
    rng = np.random.default_rng(4)
    half = rng.standard_normal(500).astype(np.float16).astype(np.float32).astype(np.float64)
    few = np.concatenate([half, [0.0, -0.0]]) * size
    many = rng.standard_normal(2000) * size
    weights = rng.random(len(many))
    exact = [
        clusters.distinct_with_weights(few[:, None], weights[: len(few)]),
        clusters.distinct_with_weights(many[:, None], weights),
    ]
    monkeypatch.setattr(clusters, "MOST_ROWS", 100)
    for values, known in zip((few, many), exact, strict=True):
        near = clusters.distinct_with_weights(values[:, None], weights[: len(values)])
        assert (np.diff(near.known[:, 0]) > 0).all()
        sums = [float(each.known[:, 0] @ each.weights) for each in (known, near)]
        assert sums[1] == pytest.approx(sums[0], rel=1e-12)
        off = [
            float(((values[:, None] - clusters.weighted(e, 16)[:, 0]) ** 2).min(1) @ weights[: len(values)])
            for e in (known, near)
        ]
        assert off[1] <= 1.001 * off[0]
    np.testing.assert_allclose(
        clusters.distinct_with_weights(few[:, None], weights[: len(few)]).known, exact[0].known, rtol=1e-12
    )


@pytest.mark.parametrize("factor", [2.0**-14, 2.0**20])
@pytest.mark.parametrize("width", [1, 2])
def test_a_common_factor_of_the_weights_changes_no_table(
    width: int, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong version divides by 1 where the weights of an entry are less together."""
    monkeypatch.setattr(clusters, "_kmeans1d", None)
    rng = np.random.default_rng(5)
    vectors, weights = rng.standard_normal((500, width)), rng.random(500)
    tables = [
        clusters.weighted(clusters.distinct_with_weights(vectors, w), 16) for w in (weights, factor * weights)
    ]
    np.testing.assert_array_equal(tables[0], tables[1])


def _off(rows: Array, entries: int = 8) -> float:
    (table,) = tables_of([rows], entries)
    return float(((table[nearest(rows, table)] - rows) ** 2).sum())


def test_negative_numbers_are_refused_where_none_can_be() -> None:
    make = lambda: mb.constexpr_blockwise_shift_scale(data=whole(1, 7), scale=ones(1, 1, 1))  # noqa: E731
    _, weight = weight_of(make, True)
    with pytest.raises(Refused, match="holds no negative numbers"):
        encoded(weight, numbers())
    with pytest.raises(Refused, match="became"):
        encoded(weight, numbers()[0])


@pytest.mark.parametrize("how", ["keep", "decode", "reencode"])
def test_an_edit_that_the_form_cannot_hold(how: str) -> None:
    """256 entries, all used, none of them 0: padding needs one."""
    table, indices = (
        np.linspace(1, 2, 256).astype(np.float16),
        np.resize(np.arange(256, dtype=np.uint8), (32, 8)),
    )
    shape = np.array([32, 8], np.uint32)
    program, weight = weight_of(
        lambda: mb.constexpr_lut_to_dense(indices=indices.ravel(), lut=table, shape=shape), False
    )
    function, session = program.functions["main"], Session(compressed=how)
    root, edit = list(function.operations)[-1], Edit.of((32, 8)).padded(0, 64)
    with function:
        if how == "keep":
            with pytest.raises(Refused, match='none is 0; compressed="reencode"'):
                edit_weight(Builder(session, function, "test", root), weight, edit, "padded")
            return
        made = edit_weight(Builder(session, function, "test", root), weight, edit, "padded")
    assert made.shape == (64, 8)
    assert is_compressed(made) == (how == "reencode")
    (found,) = session.recoded.values()
    assert (found.before, found.after) == (stored_bytes(weight), stored_bytes(made))
    assert 60 < found.psnr < 100 if how == "reencode" else found.psnr == math.inf


def test_a_number_far_from_all_others_takes_one_entry() -> None:
    """The wrong version gives it so many of the means that the others have too few left."""
    rows = 0.01 * np.random.default_rng(6).standard_normal((20000, 1))
    error = _off(rows, 256)
    for far in (1e2, 1e4, 1e6):
        assert tables_of([np.append(rows, [[far]], axis=0)], 256).shape == (1, 256, 1)
        assert _off(np.append(rows, [[far]], axis=0), 256) <= 1.02 * error


def test_a_sparse_form_without_zeros_takes_other_numbers() -> None:
    def make() -> Var:
        data: Array = np.arange(1, 17).astype(np.int8)
        bits = np.ones((4, 4), np.uint8).view(types.np_uint1_dtype)
        mask, kept = mb.constexpr_sparse_blockwise_shift_scale(
            data_mask=bits, nonzero_data=data, scale=ones(1, 1)
        )
        return mb.constexpr_sparse_to_dense(nonzero_data=kept, mask=mask)

    _, weight = weight_of(make, True)
    wanted = 2 * np.asarray(decoded(weight), np.float64)
    np.testing.assert_allclose(numbers_of(encoded(weight, wanted)), wanted, rtol=1e-3)


FULL: dict[str, Callable[[], Var]] = {
    "plain": lambda: mb.const(val=halves(1, *SHAPE)),
    "packed palette": packed_palette,
    "packed sparse": packed_sparse,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FULL)
def test_numbers_beyond_the_type_are_refused(name: str) -> None:
    _, weight = weight_of(FULL[name], False)
    with pytest.raises(Refused, match=r"1e\+05 is beyond float16"):
        encoded(weight, np.full(SHAPE, 1e5))
    infinite = np.where(numbers() > 0, np.inf, numbers())
    if name != "packed palette":
        assert np.isinf(numbers_of(encoded(weight, infinite))).sum() == np.isinf(infinite).sum()

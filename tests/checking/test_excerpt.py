"""Two rows of a large edit: what they may refute, and that what they refute is wrong as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from anesurgery.checking import proofs
from anesurgery.checking.edit_sites import constants_among, on_fewer_rows, row_axes, site_of
from anesurgery.checking.grades import REASSOCIATED, Grade, Promise, SiteCheck
from anesurgery.checking.lengths import drawn_shape
from anesurgery.checking.site import check_site
from anesurgery.interpret.arithmetic.symbolic import Symbolic
from anesurgery.mil import Var, mb, types

MASK = np.triu(np.full((8, 8), -1e4, np.float32), 1)
UNEVEN = np.arange(6, dtype=np.float32).reshape(1, 6, 1, 1)
HALVES = {"num_splits": 2, "axis": 1}

SAME: dict[str, tuple[Any, Any]] = {
    "an addition swapped": (
        lambda x: mb.softmax(x=mb.add(x=x, y=MASK), axis=-1),
        lambda x: mb.softmax(x=mb.add(x=MASK, y=x), axis=-1),
    ),
    "a transpose moved": (
        lambda x: mb.transpose(x=mb.tanh(x=x), perm=[0, 1, 3, 2]),
        lambda x: mb.tanh(x=mb.transpose(x=x, perm=[0, 1, 3, 2])),
    ),
    "two halves": (
        lambda x: mb.concat(values=[mb.tanh(x=v) for v in mb.split(x=x, **HALVES)], axis=1),
        lambda x: mb.tanh(x=x),
    ),
    "a reshape": (
        lambda x: mb.reshape(x=mb.tanh(x=mb.reshape(x=x, shape=[6, 64])), shape=[1, 6, 8, 8]),
        lambda x: mb.tanh(x=x),
    ),
    "a reshape across rows": (
        lambda x: mb.reshape(x=mb.tanh(x=mb.reshape(x=x, shape=[4, 96])), shape=[1, 6, 8, 8]),
        lambda x: mb.tanh(x=x),
    ),
}
WRONG: dict[str, tuple[Any, Any]] = {
    "another mask": (
        lambda x: mb.softmax(x=mb.add(x=x, y=MASK), axis=-1),
        lambda x: mb.softmax(x=mb.add(x=x, y=MASK.T), axis=-1),
    ),
    "another axis": (lambda x: mb.softmax(x=x, axis=-1), lambda x: mb.softmax(x=x, axis=-2)),
    "rows that differ": (lambda x: mb.add(x=x, y=UNEVEN), lambda x: mb.add(x=x, y=UNEVEN[:, ::-1].copy())),
}


def both(old: Any, new: Any) -> Any:
    """The site at which `new` replaces `old`, over six rows of 8x8."""
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec((1, 6, 8, 8), dtype=types.fp32)])
    def program(x: Var) -> Any:
        made.extend([old(x), new(x)])
        return made

    a, b = made
    ops = [op for op in program.functions["main"].operations if op.op_type != "const"]
    return site_of([(a, b)], ops[ops.index(a.op) + 1 :], [])


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every site is large; the shapes of what the ops of each run read from outside."""
    monkeypatch.setattr(proofs, "LARGE", 0)
    seen: list[tuple[int, ...]] = []
    run = proofs._run

    def watched(ops: Any, images: Any, wanted: Any, arithmetic: Symbolic) -> Any:
        seen.extend(tuple(image.shape) for image in images.values())
        return run(ops, images, wanted, arithmetic)

    monkeypatch.setattr(proofs, "_run", watched)
    return seen


@pytest.mark.parametrize("name", SAME)
def test_what_is_right_is_proved_on_all_rows(name: str, shapes: list[tuple[int, ...]]) -> None:
    proof = proofs.prove(both(*SAME[name]))
    assert isinstance(proof, proofs.Proof)
    assert (proof.grade, proof.elements) == (Grade.BITS, 6 * 64)
    assert (1, 6, 8, 8) in shapes


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refuted_on_two_rows(name: str, shapes: list[tuple[int, ...]]) -> None:
    assert not proofs.prove(both(*WRONG[name]))
    assert shapes
    assert (1, 6, 8, 8) not in shapes


def test_what_the_loosest_arithmetic_of_bits_refutes_the_others_do_not_run(
    shapes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs, "_prove_over_field", lambda site, seed: proofs.APART)
    assert not proofs.prove(both(*WRONG["another mask"]), finite=True)
    assert len(shapes) == 2, "each side once"


def test_rows_are_followed_through_both_sides() -> None:
    site = both(*SAME["a transpose moved"])
    axes = row_axes(site)
    assert axes is not None
    assert {axes[v] for v in site.drawn} <= {2, 3}
    assert axes[site.replaced[0][0]] != axes[site.drawn[0]]


def test_a_constant_is_cut_with_the_rows(shapes: list[tuple[int, ...]]) -> None:
    site = both(*SAME["an addition swapped"])
    axes = row_axes(site)
    assert axes is not None
    assert {axes[v] for v in site.drawn} == {2}
    masks = constants_among(axes)
    assert masks
    assert set(masks.values()) == {0}, "the mask has no heads: its rows come first"
    proofs.prove(site)
    assert (1, 6, 2, 8) in shapes


@pytest.mark.parametrize("name", ["two halves", "a reshape across rows", "rows that differ"])
def test_rows_that_are_mixed_cannot_be_cut(name: str) -> None:
    axes = row_axes(both(*(SAME | WRONG)[name]))
    assert axes is None or set(axes.values()) <= {2, 3}


def test_a_value_read_whole_elsewhere_is_not_cut() -> None:
    """Each row of the result reads one row of x, and the sum of all."""
    whole = both(
        lambda x: mb.add(x=x, y=mb.reduce_sum(x=x, axes=[1, 2, 3], keep_dims=True)),
        lambda x: mb.add(x=mb.reduce_sum(x=x, axes=[1, 2, 3], keep_dims=True), y=x),
    )
    assert row_axes(whole) is None
    assert proofs.prove(whole) is not None


def heads(mask: Any) -> Any:
    """The site of a masked softmax of twelve heads, whose scores are divided in one of two ways."""
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec((1, 12, 256, 256), dtype=types.fp32)])
    def program(x: Var) -> Any:
        for divide, factor in ((mb.real_div, 8.0), (mb.mul, 0.125)):
            flat = mb.reshape(x=mb.add(x=divide(x=x, y=factor), y=mask), shape=[12, 256, 256])
            made.append(mb.softmax(x=flat, axis=-1))
        return made

    old, new = made
    ops = [op for op in program.functions["main"].operations if op.op_type != "const"]
    return site_of([(old, new)], ops[ops.index(old.op) + 1 :], [])


def test_of_a_large_site_a_few_heads_are_looked_at() -> None:
    site = heads(np.triu(np.full((1, 1, 256, 256), -1e4, np.float32), 1))
    with on_fewer_rows(site, ()) as cut:
        assert cut
        assert drawn_shape(site.drawn[0]) == (1, 4, 256, 256)
        proof = proofs.prove(site)
        assert isinstance(proof, proofs.Proof)
        assert proof.elements == 12 * 256 * 256, "it holds for all"
    assert drawn_shape(site.drawn[0]) == (1, 12, 256, 256)


def test_rows_for_which_a_constant_differs_are_all_looked_at() -> None:
    uneven = np.zeros((1, 12, 256, 256), np.float32)
    uneven[0, 11] = -1e4
    with on_fewer_rows(heads(uneven), ()) as cut:
        assert not cut


WEIGHT = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
KERNEL = np.random.default_rng(0).standard_normal((8, 4, 3, 3)).astype(np.float32)
LARGE: dict[str, tuple[tuple[int, ...], Any, Any, Any]] = {
    "heads": (
        (1, 12, 256, 256),
        lambda x: mb.softmax(x=mb.real_div(x=x, y=8.0)),
        lambda x: mb.softmax(x=mb.mul(x=x, y=0.125)),
        lambda x: mb.softmax(x=mb.mul(x=x, y=0.12625)),
    ),
    "tokens": (
        (1, 16384, 32),
        lambda x: mb.linear(x=mb.mul(x=x, y=2.0), weight=WEIGHT),
        lambda x: mb.linear(x=mb.add(x=x, y=x), weight=WEIGHT),
        lambda x: mb.linear(x=mb.mul(x=x, y=2.02), weight=WEIGHT),
    ),
    "images": (
        (128, 4, 32, 32),
        lambda x: mb.conv(x=mb.mul(x=x, y=2.0), weight=KERNEL),
        lambda x: mb.conv(x=mb.add(x=x, y=x), weight=KERNEL),
        lambda x: mb.mul(x=mb.conv(x=x, weight=KERNEL), y=0.0),
    ),
    "rows of a norm": (
        (8, 1024, 64),
        lambda x: mb.layer_norm(x=mb.mul(x=x, y=2.0), axes=[-1], epsilon=1e-5),
        lambda x: mb.layer_norm(x=mb.add(x=x, y=x), axes=[-1], epsilon=1e-5),
        lambda x: mb.real_div(x=mb.layer_norm(x=x, axes=[-1], epsilon=1e-5), y=mb.mul(x=x, y=0.0)),
    ),
}
"""Shape, and an old side, a new one that is right, and one that is 1 % off, zero or no number."""


def large(shape: tuple[int, ...], *sides: Any, dtype: Any = types.fp32) -> tuple[list[Var], list[Any]]:
    """The results of several sides of one input, and all ops but constants."""
    made: list[Var] = []

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=dtype)])
    def program(x: Var) -> Any:
        made.extend(side(x) for side in sides)
        return made

    return made, [op for op in program.functions["main"].operations if op.op_type != "const"]


def checked(kind: str, right: bool) -> Any:
    shape, old, new, wrong = LARGE[kind]
    (a, b), ops = large(shape, old, new if right else wrong)
    return check_site(
        [(a, b)], ops[ops.index(a.op) + 1 :], lambda var, rng: None, promise=Promise(REASSOCIATED)
    )


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_site_that_is_right_is_checked_on_few_rows(kind: str) -> None:
    result = checked(kind, right=True)
    assert result.within(REASSOCIATED)
    shape, old, new, _ = LARGE[kind]
    (a, b), ops = large(shape, old, new)
    with on_fewer_rows(site_of([(a, b)], ops[ops.index(a.op) + 1 :], []), ()) as cut:
        assert cut


QUICK = "rows of a norm"
"""A counterexample of this kind is made smaller in a second; the others take ten times as long."""


@pytest.mark.parametrize(
    "kind", [QUICK, *(pytest.param(k, marks=pytest.mark.slow) for k in LARGE if k != QUICK)]
)
def test_a_large_site_that_is_wrong_is_refuted(kind: str) -> None:
    result = checked(kind, right=False)
    assert isinstance(result, SiteCheck)
    assert not result.within(REASSOCIATED)


MIXED: dict[str, tuple[Any, Any]] = {
    "a running sum": (lambda x: mb.cumsum(x=x, axis=0), lambda x: mb.mul(x=mb.cumsum(x=x, axis=0), y=1.0)),
    "a sum over all": (
        lambda x: mb.sub(x=x, y=mb.reduce_sum(x=x, axes=[0, 1], keep_dims=True)),
        lambda x: mb.add(x=x, y=mb.mul(x=mb.reduce_sum(x=x, axes=[0, 1], keep_dims=True), y=-1.0)),
    ),
    "rows in another order": (lambda x: mb.reverse(x=x, axes=[0]), lambda x: mb.reverse(x=x, axes=[0])),
}


@pytest.mark.parametrize("kind", MIXED)
def test_along_an_axis_that_is_mixed_nothing_is_cut(kind: str) -> None:
    (a, b), ops = large((4096, 128), *MIXED[kind])
    site = site_of([(a, b)], ops[ops.index(a.op) + 1 :], [])
    with on_fewer_rows(site, ()):
        assert drawn_shape(site.drawn[0])[0] == 4096


def test_each_place_of_a_table_is_looked_up_as_often_as_before() -> None:
    """One row of 2,048 is wrong, which 64 ids of 512 would rarely meet."""
    table = np.random.default_rng(0).standard_normal((2048, 64)).astype(np.float32)
    wrong = table.copy()
    wrong[2000] += 1
    (a, b), ops = large(
        (1, 512),
        lambda x: mb.gather(x=table, indices=x, axis=0),
        lambda x: mb.matmul(
            x=mb.one_hot(indices=x, one_hot_vector_size=2048, on_value=1.0, off_value=0.0), y=wrong
        ),
        dtype=types.int32,
    )
    site = site_of([(a, b)], ops[ops.index(a.op) + 1 :], [])
    with on_fewer_rows(site, set(site.drawn)) as cut:
        assert not cut

    def ids(var: Var, rng: np.random.Generator) -> Any:
        return rng.integers(0, 2048, (1, 512)).astype(np.int32)

    for seed in range(4):
        result = check_site([(a, b)], ops[ops.index(a.op) + 1 :], ids, seed, promise=Promise(REASSOCIATED))
        assert isinstance(result, SiteCheck)
        assert not result.within(REASSOCIATED)

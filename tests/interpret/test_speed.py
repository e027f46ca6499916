"""What makes the interpreter fast changes no numbers: constants kept ready, attention computed at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from closeness import assert_close
from coremltools.converters.mil.mil import get_new_symbol

from anesurgery.errors import InterpretError
from anesurgery.files.package import save
from anesurgery.interpret import Executable, Listener, Predictor, attentions
from anesurgery.interpret.arithmetic import constant_memory
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb

LENGTH, WIDTH = 6, 8


def attention(mask: Any = None, *, scale: bool = True, form: str = "add", again: bool = False) -> Program:
    """Attention written out, in one of its forms."""
    shape = (1, 2, LENGTH, WIDTH)

    @mb.program(input_specs=[mb.TensorSpec(shape)] * 3, opset_version=ct.target.iOS16)
    def made(q: Var, k: Var, v: Var) -> Any:
        key = mb.transpose(x=k, perm=[0, 1, 3, 2]) if form == "turned" else mb.relu(x=k)
        query = mb.relu(x=q)
        scores = mb.matmul(x=query, y=key, transpose_y=form != "turned")
        early = mb.exp(x=query) if form == "early" else None
        scores = mb.mul(x=np.float32(0.35), y=scores) if scale else scores
        if form == "select":
            scores = mb.select(cond=mask, a=scores, b=np.float32(-np.inf))
        elif mask is not None:
            scores = mb.add(x=scores, y=mask)
        weights = mb.softmax(x=scores, axis=-1)
        y = mb.matmul(x=weights, y=v)
        rest = ((mb.exp(x=weights),) if again else ()) + ((early,) if early is not None else ())
        return (y, *rest) if rest else y

    return made


CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
HIDDEN = np.where(CAUSAL, 0, -np.inf).astype(np.float32)
NOTHING = np.full((1, 1, LENGTH, LENGTH), -np.inf, np.float32)
FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"scale": False}, True),
    "scaled": ({}, True),
    "key turned": ({"form": "turned"}, True),
    "mask": ({"mask": HIDDEN}, True),
    "mask of one row": ({"mask": HIDDEN[2:3]}, True),
    "select": ({"mask": CAUSAL[None, None], "form": "select"}, True),
    "a mask that hides all": ({"mask": NOTHING}, True),
    "a selection that hides all": ({"mask": NOTHING == 0, "form": "select"}, True),
    "a mask that enlarges": ({"mask": np.zeros((3, 1, 1, 1), np.float32)}, False),
    "weights read again": ({"again": True}, False),
    "a query freed before": ({"form": "early"}, False),
}


@pytest.mark.parametrize("name", FORMS)
def test_attention_at_once_is_the_same_sum(name: str) -> None:
    options, fused = FORMS[name]
    executable = Executable(attention(**options))
    assert (len(executable.plan.fused_steps) < len(executable.plan.steps)) is fused
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal(v.shape).astype(np.float32) for n, v in executable.function.inputs.items()}
    found, expected = executable(values), executable(values, listener=Listener())
    hides_all = "hides all" in name
    for n in expected:
        if hides_all:
            assert np.isnan(found[n]).all()
            assert np.isnan(expected[n]).all()
        else:
            assert_close(found[n], expected[n], rtol=1e-5)


def grouped(rows: int, mask: tuple[int, ...], interleaved: bool = False) -> Program:
    """Six heads of queries, of which each three share keys and values (or each second: these stay repeated)."""
    specs = [
        mb.TensorSpec((1, 6, rows, WIDTH)),
        *[mb.TensorSpec((1, 2, LENGTH, WIDTH))] * 2,
        mb.TensorSpec(mask),
    ]

    def repeated(x: Var) -> Var:
        if interleaved:
            return mb.tile(x=x, reps=[1, 3, 1, 1])
        wide = mb.tile(x=mb.expand_dims(x=x, axes=[2]), reps=[1, 1, 3, 1, 1])
        return mb.reshape(x=wide, shape=[1, 6, LENGTH, WIDTH])

    @mb.program(input_specs=specs, opset_version=ct.target.iOS16)
    def made(q: Var, k: Var, v: Var, mask: Var) -> Var:
        scores = mb.matmul(x=q, y=repeated(mb.relu(x=k)), transpose_y=True)
        return mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=mask), axis=-1), y=repeated(v))

    return made


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("heads", [(), (1,), (6,), (1, 6)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_groups_are_computed_at_once(rows: int, heads: tuple[int, ...], interleaved: bool) -> None:
    executable = Executable(grouped(rows, (*heads, rows, LENGTH), interleaved))
    ops = {step.op.op_type for step in executable.plan.fused_steps}
    assert ("tile" in ops) == interleaved
    assert "softmax" not in ops
    rng = np.random.default_rng(0)
    values = {n: rng.standard_normal(v.shape).astype(np.float32) for n, v in executable.function.inputs.items()}
    (found,), (expected,) = executable(values).values(), executable(values, listener=Listener()).values()
    assert_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("precision", ["fp16", "ane"])
def test_arithmetics_that_round_compute_op_by_op(precision: str) -> None:
    plan = Executable(attention(), precision=precision).plan
    assert plan.fused_steps is plan.steps


def test_an_error_in_attention_names_its_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(attentions, "attend", fails)
    executable = Executable(attention())
    values = {n: np.ones(v.shape, np.float32) for n, v in executable.function.inputs.items()}
    with pytest.raises(InterpretError, match=r"op matmul_\d+ failed: ValueError: no"):
        executable(values)


def linear(kind: Any) -> Program:
    """A product with a matrix that is not small, and rows of the same matrix."""
    matrix = np.random.default_rng(0).standard_normal((300, 400)).astype(kind)

    @mb.program(input_specs=[mb.TensorSpec((2, 400))], opset_version=ct.target.iOS16)
    def made(x: Var) -> Any:
        table = mb.const(val=matrix)
        rows = mb.cast(x=mb.gather(x=table, indices=[7, 3], axis=0), dtype="fp32")
        x = mb.cast(x=mb.add(x=x, y=rows), dtype="fp16" if kind == np.float16 else "fp32")
        return mb.cast(x=mb.linear(x=x, weight=table), dtype="fp32")

    return made


@pytest.mark.parametrize("room", [constant_memory.CACHE_LIMIT, 0])
@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_constants_kept_ready_change_nothing(
    kind: Any, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constant_memory, "CACHE_LIMIT", room)
    predictor = Predictor(save(load(linear(kind)), tmp_path / "linear.mlpackage"))
    values = {"x": np.random.default_rng(1).standard_normal((2, 400)).astype(np.float32)}
    plan, found = predictor.executables[0].plan, []
    for run in range(4):
        (made,) = predictor(values).values()
        found.append(made)
        assert len(plan.widened) == (1 if run and room else 0)
    assert all(np.array_equal(made, found[0]) for made in found)
    matrix = np.random.default_rng(0).standard_normal((300, 400)).astype(kind).astype(np.float32)
    assert_close(found[0], (values["x"] + matrix[[7, 3]]) @ matrix.T, rtol=1e-5)


def test_only_mapped_files_are_given_back(tmp_path: Path) -> None:
    stored = np.arange(1 << 16, dtype=np.float32)
    np.save(tmp_path / "a.npy", stored)
    for mode in ("r", "c"):
        mapped = np.load(tmp_path / "a.npy", mmap_mode=mode)
        changed = mapped
        if mode == "c":
            changed[5000] = 1
        constant_memory.release_pages(changed[100:60000].reshape(2, -1))
        assert changed[5000] == (1 if mode == "c" else 5000)
    constant_memory.release_pages(stored)
    constant_memory.release_pages(None)
    assert torch.equal(torch.from_numpy(stored), torch.arange(1 << 16, dtype=torch.float32))


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_a_square_is_the_rounded_power(kind: Any) -> None:
    """Also beyond the largest number, below the smallest, and at -0; other exponents are powers still."""

    powers = mb.program(input_specs=[mb.TensorSpec((1000,))], opset_version=ct.target.iOS16)(
        lambda x: (mb.pow(x=x, y=np.float32(2)), mb.pow(x=x, y=np.float32(3)), mb.pow(x=np.float32(2), y=x))
    )

    rng = np.random.default_rng(0)
    x = (rng.standard_normal(1000) * 10.0 ** rng.uniform(-30, 30, 1000)).astype(np.float32)
    x[:4] = [0.0, -0.0, np.inf, 1e-30]
    with np.errstate(over="ignore", under="ignore"):
        wide = x.astype(kind).astype(np.float64)
        square, cube, power = Executable(powers)({"x": wide.astype(np.float32)}).values()
        for found, wanted in ((square, wide**2), (cube, wide**3), (power, 2**wide)):
            np.testing.assert_array_equal(found, wanted.astype(np.float32))


@pytest.mark.parametrize(
    "where",
    [
        {"begin": [0, 1], "end": [0, 3], "end_mask": [True, False]},
        {"begin": [0, -2], "end": [0, 0], "squeeze_mask": [True, False], "end_mask": [True, True]},
        {"begin": [0, -1], "end": [2, 0], "stride": [1, -1]},
    ],
    ids=str,
)
def test_places_of_a_slice_are_those_of_each_shape(where: dict[str, Any]) -> None:
    """They are worked out once for a shape, and anew for another."""

    slices = mb.program(
        input_specs=[mb.TensorSpec((get_new_symbol(), get_new_symbol()))], opset_version=ct.target.iOS16
    )(lambda x: mb.slice_by_index(x=x, **where))

    run = Executable(slices)
    for rows, columns in ((2, 4), (3, 5), (2, 4), (2, 7)):
        x = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
        (found,) = run({"x": x}).values()
        (heard,) = run({"x": x}, listener=Listener()).values()
        np.testing.assert_array_equal(found, heard)

"""Norms that take up what the weights in front of them have lost, where the outputs lose less by that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anesurgery as ane
from anesurgery.compressing.balancing import CorrectedNorm, Norm, Norms, judging, norms_of
from anesurgery.interpret.core import Executable
from anesurgery.mil import Operation, Program, Var, ct, mb, types

WIDTH, WORDS, LENGTH = 32, 48, 24
FEW = ("palette4", "palette2")


def layer_norm(x: Var, numbers: np.random.Generator) -> Var:
    gain, shift = ((1 + numbers.standard_normal(WIDTH) / 4).astype(np.float16) for _ in range(2))
    return mb.layer_norm(x=x, axes=[-1], gamma=gain, beta=shift, epsilon=np.float16(1e-5), name="norm")


def root_norm(x: Var, numbers: np.random.Generator) -> Var:
    mean = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
    gain = (1 + numbers.standard_normal(WIDTH) / 4).astype(np.float16)
    return mb.mul(x=mb.mul(x=x, y=mb.rsqrt(x=mean, epsilon=np.float16(1e-5))), y=gain, name="norm")


Make = Callable[[Var, np.random.Generator], Var]


def language_model(norm: Make, seed: int, own: bool = False, length: int = LENGTH) -> Program:
    """A table that is looked up and is the head; or a head of its own."""
    numbers = np.random.default_rng(seed)
    words = numbers.standard_normal((WORDS, WIDTH)).astype(np.float16)
    inner = (numbers.standard_normal((WIDTH, WIDTH)) / 4).astype(np.float16)

    @mb.program(input_specs=[mb.TensorSpec((1, length), dtype=types.int32)], opset_version=ct.target.iOS18)
    def program(ids: Var) -> Var:
        table = mb.const(val=words, name="table")
        x = mb.gather(x=table, indices=ids, axis=0)
        x = mb.add(x=x, y=mb.relu(x=mb.linear(x=x, weight=inner)))
        head = words[::-1].copy() if own else table
        return mb.linear(x=norm(x, numbers), weight=head, name="logits")

    return program


def texts(seed: int, count: int = 32) -> list[dict[str, Any]]:
    numbers = np.random.default_rng(100 + seed)
    return [{"ids": numbers.integers(0, WORDS, (1, LENGTH)).astype(np.int32)} for _ in range(count)]


def compressed(program: Any, seed: int, **options: Any) -> ane.Compression:
    given: dict[str, Any] = {"forms": "palette2", "smallest": 64, "for_": "size", **options}
    return ane.compress(program, inputs=texts(seed), **given)


def loss(program: Program, seed: int, monkeypatch: pytest.MonkeyPatch, kept: bool | None) -> Any:
    """On samples that no correction saw, with a gate that always, or never, keeps."""
    with monkeypatch.context() as patch:
        if kept is not None:
            patch.setattr(CorrectedNorm, "kept", kept)
        found = compressed(program, seed)
    assert found.loss is not None
    return found.loss.kl, found.norms


@pytest.mark.parametrize(("norm", "seed"), [(root_norm, 1), (layer_norm, 9)])
def test_a_norm_by_which_the_outputs_lose_less_is_kept(
    norm: Make, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On texts that no correction saw. The wrong version leaves each norm."""
    program = language_model(norm, seed)
    right, (found,) = loss(program, seed, monkeypatch, None)
    assert found.kept
    assert found.loss[1] < found.loss[0]
    wrong, _ = loss(program, seed, monkeypatch, False)
    assert right < 0.97 * wrong


@pytest.mark.parametrize("seed", [0, 3])
def test_less_squared_error_but_more_loss_is_dropped(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong version keeps what takes away squared error."""
    program = language_model(layer_norm, seed)
    right, (found,) = loss(program, seed, monkeypatch, None)
    assert found.error[1] < 0.99 * found.error[0]
    assert not found.kept
    wrong, _ = loss(program, seed, monkeypatch, True)
    assert right < 0.97 * wrong
    assert right == loss(program, seed, monkeypatch, False)[0]


def test_the_report_says_how_many_and_the_program_holds_them(tmp_path: Path) -> None:
    found = compressed(language_model(root_norm, 1), 1)
    assert "1 of 1 norms corrected" in str(found)
    assert found.to_json()["norms"][0]["kept"]
    old = np.asarray(norm_of(language_model(root_norm, 1)).op.y.val)
    (new,) = [op for op in found.subject.loaded.program.functions["main"].operations if op.name == "norm"]
    assert new.y.val.dtype == np.float16
    assert 0 < np.abs(new.y.val / old - 1).max() < 0.5
    again = ane.compare(language_model(root_norm, 1), found.save(tmp_path / "a.mlpackage"), texts(1)[3], gate=0)
    assert again.ok
    dropped = compressed(language_model(layer_norm, 0), 0)
    assert "norms unchanged, since the outputs would not lose less: 1" in str(dropped)


def stored(place: Path, **options: Any) -> bytes:
    path = compressed(language_model(root_norm, 1), 1, **options).save(place)
    return next(path.rglob("weight.bin")).read_bytes()


def test_a_run_that_goes_on_makes_the_same_bytes(tmp_path: Path) -> None:
    work = tmp_path / "work"
    alone = stored(tmp_path / "alone.mlpackage", work=work)
    next(work.iterdir()).unlink()
    assert alone == stored(tmp_path / "again.mlpackage", work=work)


@pytest.mark.slow  # two processes start, which takes longer than all else here
def test_processes_make_the_same_bytes(tmp_path: Path) -> None:
    alone = stored(tmp_path / "alone.mlpackage")
    assert alone == stored(tmp_path / "two.mlpackage", jobs=2)


def test_a_weight_of_its_own_takes_it_up() -> None:
    assert not compressed(language_model(root_norm, 1, own=True), 1).norms


def test_no_more_bytes_than_there_is_room_for() -> None:
    assert compressed(language_model(layer_norm, 9), 9, max_bytes=1800, forms=FEW).bytes[1] <= 1800


def test_every_function_gets_the_same_norm(tmp_path: Path) -> None:
    """The wrong version corrects the norm of the function that ran alone."""
    parts = {
        name: ane.save(ane.load(language_model(root_norm, 1, length=length)), tmp_path / f"{name}.mlpackage")
        for name, length in (("long", LENGTH), ("short", 1))
    }
    both = ane.merge(parts, tmp_path / "both.mlpackage")
    found = compressed(both, 1, function="long")
    assert [one.kept for one in found.norms] == [True]
    gains = [norms_of(found.subject.loaded.program, name, ()).norms for name in ("long", "short")]
    (one,), (other,) = gains
    assert np.array_equal(one.y.val, other.y.val)


def twice() -> Program:
    """Two norms with the same numbers, of which a twin in another function could be either."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4, WIDTH))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        ones = np.ones(WIDTH, np.float32)
        return mb.layer_norm(x=mb.layer_norm(x=x, axes=[2], gamma=ones), axes=[2], gamma=ones.copy())

    return program


def odd(name: str) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((2, 4, WIDTH))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        wide = np.ones((4, WIDTH), np.float32)
        shared = mb.const(val=wide[0], name="shared")
        return {
            "two axes": lambda: mb.layer_norm(x=x, axes=[1, 2], gamma=wide, beta=wide),
            "no gain": lambda: mb.layer_norm(x=x, axes=[2]),
            "no norm": lambda: mb.mul(x=mb.mul(x=x, y=x), y=wide[0]),
            "a gain for each place": lambda: mb.mul(x=mb.l2_norm(x=x), y=wide),
            "a gain that something else reads": lambda: mb.add(
                x=mb.layer_norm(x=x, axes=[2], gamma=shared), y=shared
            ),
        }[name]()

    return program


@pytest.mark.parametrize(
    "name", ["two axes", "no gain", "no norm", "a gain for each place", "a gain that something else reads"]
)
def test_other_ops_stay(name: str) -> None:
    alone: list[Operation] = []
    assert not norms_of(odd(name), "main", alone).norms


def channels(kind: str) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 8, 4, 4))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        gain, shift = np.linspace(0.5, 2, 8, dtype=np.float32), np.linspace(-1, 1, 8, dtype=np.float32)
        if kind == "instance_norm":
            return mb.instance_norm(x=x, gamma=gain, beta=shift, epsilon=1e-5)
        mean, variance = np.zeros(8, np.float32), np.ones(8, np.float32)
        return mb.batch_norm(x=x, mean=mean, variance=variance, gamma=gain, beta=shift, epsilon=1e-5)

    return program


def norm_of(program: Program) -> Norm:
    (norm,) = norms_of(program, "main", ()).norms.values()
    return norm


def taken(program: Program, off: Callable[[dict[str, Any]], dict[str, Any]], count: int = 6) -> Any:
    """The constants that a norm is given whose inputs are off."""
    executable, norm, numbers = Executable(program, fuse=False), norm_of(program), np.random.default_rng(5)
    step = next(step for step in executable.plan.steps if step.op is norm.op)
    shape = tuple(norm.op.x.shape)
    values = [torch.from_numpy(numbers.standard_normal(shape).astype(np.float32)) for _ in range(count)]
    plain = [{**step.fixed, "x": x} for x in values]
    both = Norms({norm.op: norm})
    both.step(step, [off(one) for one in plain], plain, lambda _, other: (1.0, 0.5))
    return both


@pytest.mark.parametrize("kind", ["instance_norm", "batch_norm"])
def test_what_is_known_comes_back(kind: str) -> None:
    """A norm that was scaled and moved away from its constants is given them back."""
    program = channels(kind)
    both = taken(program, lambda one: {**one, "gamma": one["gamma"] / 2, "beta": one["beta"] - 1})
    (constants,) = both.constants.values()
    np.testing.assert_allclose(constants["gamma"], 2 * norm_of(program).op.gamma.val, rtol=2e-3)


def test_what_does_not_differ_or_cannot_be_judged_is_not_tried() -> None:
    program, noise = channels("batch_norm"), torch.Generator().manual_seed(3)
    assert not taken(program, lambda one: one).fitted
    assert not taken(program, lambda one: {**one, "beta": one["beta"] - 1}, count=1).fitted
    both = taken(
        program, lambda one: {**one, "x": one["x"] + torch.randn(one["x"].shape, generator=noise) / 50}
    )
    assert not both.constants


def test_judges_are_not_fitted_to() -> None:
    assert (judging(1), judging(2), judging(9)) == ([], [1], [3, 7])
    assert len(judging(100)) == 4


def test_norms_with_the_same_numbers_stay() -> None:
    assert not norms_of(twice(), "main", ()).norms


def test_a_list_beside_the_norms_is_passed_over() -> None:
    """The wrong version asks each value for its shape, which a list has not."""

    @mb.program(input_specs=[mb.TensorSpec((2, 4, WIDTH))], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        kept = mb.make_list(init_length=1, elem_shape=(2, 4, WIDTH), dtype="fp32")
        return mb.list_read(ls=mb.list_write(ls=kept, index=0, value=x), index=0)

    assert not norms_of(program, "main", ()).norms

"""The gate of a recipe: a step that loses something on the target is undone and reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from small_rewrites import small_rewrite

import anesurgery as ane
from anesurgery import loading
from anesurgery.errors import SurgeryWarning
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.passes.embedding_matmul import EmbeddingMatmul
from anesurgery.passes.split_head import SplitHead
from anesurgery.placement.target import Target
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.surgery import Recipe

TanhToSinh = small_rewrite("tanh_to_sinh", lambda op: op.tanh(), lambda mb, m: mb.sinh(x=m.root.x))
"""What is legal becomes illegal."""
CumsumToExp = small_rewrite("cumsum_to_exp", lambda op: op.cumsum(), lambda mb, m: mb.exp(x=m.root.x))
"""What is illegal becomes legal."""
ExpToTanh = small_rewrite("exp_to_tanh", lambda op: op.exp(), lambda mb, m: mb.tanh(x=m.root.x))
"""One legal op for another."""
ExpToSinh = small_rewrite("exp_to_sinh", lambda op: op.exp(), lambda mb, m: mb.sinh(x=m.root.x))
"""Another legal op becomes illegal."""


RECIPE = Recipe("two_steps", (TanhToSinh(), CumsumToExp()))


def program() -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((32, 512, 64, 64), dtype=types.fp16)], opset_version=ct.target.iOS17
    )(lambda x: mb.tanh(x=mb.cumsum(x=mb.tanh(x=x), axis=-1), name="y"))


def kinds(surgery: ane.Surgery) -> list[str]:
    return [op.op_type for op in walk_ops(surgery.program) if op.op_type != "const"]


def test_a_step_that_loses_is_undone_and_the_others_stay() -> None:
    surgery = ane.apply(program(), RECIPE, target="M4/macOS 15", prove=None, quiet=True)
    assert kinds(surgery) == ["tanh", "exp", "tanh"]
    assert {change.pass_name for change in surgery.changes} == {"cumsum_to_exp"}
    (said,) = [str(r) for name, r in surgery.refusals if name == "tanh_to_sinh"]
    assert "undone: " in said
    assert "would no longer be legal on the ANE" in said


@dataclass(frozen=True)
class TanhToCumsum(Rewrite):
    """What is legal becomes illegal, on request."""

    name: ClassVar[str] = "tanh_to_cumsum"
    exclusive: bool = False

    def pattern(self, op: Ops) -> OpPattern:
        return op.tanh()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.cumsum(x=m.root.x, axis=2, exclusive=self.exclusive)


ASKED = Recipe("asked", (TanhToCumsum(), ExpToTanh()))


@pytest.mark.parametrize("target", ["M4/macOS 15", None])
@pytest.mark.parametrize(
    "options", [{"exclusive": True}, {"exclusive": False}, {"tanh_to_cumsum": True}], ids=str
)
def test_what_was_asked_for_is_kept_with_a_warning(options: dict[str, Any], target: str | None) -> None:
    recipe = ASKED.with_options(**options)
    with pytest.warns(SurgeryWarning, match="tanh_to_cumsum was asked for, and is kept although") as caught:
        surgery = ane.apply(program(), recipe, target=target, prove=None, quiet=True)
    assert kinds(surgery) == ["cumsum"] * 3
    assert not surgery.refusals
    (said,) = [note for note in surgery.notes if note.startswith("tanh_to_cumsum was asked for")]
    assert "would no longer be legal on the ANE" in said
    assert [(Path(w.filename).name, str(w.message)) for w in caught] == [(Path(__file__).name, said)]


@pytest.mark.parametrize("options", [{}, {"exp_to_tanh": True}, {"tanh_to_cumsum": False}], ids=str)
def test_what_was_not_asked_for_is_undone(options: dict[str, Any]) -> None:
    surgery = ane.apply(program(), ASKED.with_options(**options), target="M4", prove=None, quiet=True)
    assert kinds(surgery) == ["tanh", "cumsum", "tanh"]


def test_of_several_steps_the_one_asked_for_is_kept_and_another_undone() -> None:
    recipe = Recipe("both", (TanhToSinh(), ExpToSinh())).with_options(exp_to_sinh=True)
    exp = ane.apply(program(), CumsumToExp(), prove=None, quiet=True).program
    with pytest.warns(SurgeryWarning, match="exp_to_sinh was asked for"):
        surgery = ane.apply(exp, recipe, target="M4/macOS 15", prove=None, quiet=True)
    assert kinds(surgery) == ["tanh", "sinh", "tanh"]
    assert [name for name, _ in surgery.refusals] == ["tanh_to_sinh"]


def test_without_a_target_legality_and_flop_count_on_all_chips_at_once() -> None:
    assert kinds(ane.apply(program(), RECIPE, prove=None, quiet=True)) == ["tanh", "exp", "tanh"]


def test_for_passes_by_name_there_is_no_gate() -> None:
    steps = list(RECIPE.steps)
    with pytest.warns(SurgeryWarning, match="^tanh_to_sinh, cumsum_to_exp: asked for, and done although %tanh"):
        surgery = ane.apply(program(), steps, target="M4", prove=None, quiet=True)
    assert kinds(surgery) == ["sinh", "exp", "sinh"]


def test_a_recipe_that_loses_nothing_is_run_once() -> None:
    surgery = ane.apply(program(), Recipe("one", (CumsumToExp(),)), target="M4", prove=None, quiet=True)
    assert kinds(surgery) == ["tanh", "exp", "tanh"]
    assert not surgery.refusals


def test_a_package_is_read_once_whatever_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    load_path = loading._load_path

    def reading(path: Path, *given: Any, **named: Any) -> Any:
        reads.append(path)
        return load_path(path, *given, **named)

    monkeypatch.setattr(loading, "_load_path", reading)
    path = ane.save(ane.load(program()), tmp_path / "m.mlpackage")
    kept = ane.apply(path, Recipe("one", (CumsumToExp(),)), prove=None, quiet=True)
    assert len(reads) == 1
    undone = ane.apply(path, RECIPE, prove=None, quiet=True)
    assert len(reads) == 2
    assert {change.pass_name for change in undone.changes} == {"cumsum_to_exp"}
    assert (undone.before, undone.after) == (kept.before, kept.after)


def test_a_network_that_would_stand_worse_as_a_program_stays_one(tmp_path: Path) -> None:
    """The wrong version: a program in fp32 of layers that the ANE ran in fp16."""
    layers = [make_layer("unary", ["x"], ["y"], type="EXP")]
    path = tmp_path / "network.mlmodel"
    path.write_bytes(make_network({"x": (1, 2, 4, 4)}, layers, ["y"]).SerializeToString())
    one = Recipe("one", (ExpToTanh(),), chosen=frozenset({"exp_to_tanh"}))
    kept = ane.apply(path, one, target="M4", prove=None, quiet=True)
    assert not kept.changes
    assert kept.after == {"unary": 1}
    assert "share of the ops that the ANE can run would fall 100.0% -> 0.0%" in kept.refusals[0][1].reason
    by_name = ane.apply(path, ExpToTanh(), target="M4", prove=None, quiet=True)
    assert by_name.changes
    assert any("anesurgery.upgrade" in note for note in by_name.notes)


def tied(words: int = 20003, width: int = 64) -> Program:
    """A decoder without layers whose head is the table of its tokens."""
    rng = np.random.default_rng(0)
    table = (0.1 * rng.standard_normal((words, width))).astype(np.float16)
    maps = [(0.1 * rng.standard_normal((width, width))).astype(np.float16) for _ in range(2)]

    @mb.program(input_specs=[mb.TensorSpec((1, 64), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(ids: Var) -> Var:
        x = mb.gather(x=table, indices=ids, axis=0)
        for weight in maps:
            x = mb.gelu(x=mb.linear(x=x, weight=weight))
        return mb.linear(x=x, weight=table, name="logits")

    return program


@pytest.mark.filterwarnings("ignore:embedding_matmul, split_head. asked for")
def test_a_tied_head_is_split_and_its_table_is_not_multiplied() -> None:
    """The wrong version: the product with the whole table stays, which the split makes useless."""
    recipe = Recipe("tied", (EmbeddingMatmul(nonnegative_ids=True), SplitHead()))
    surgery = ane.apply(tied(), recipe, target="M1/macOS 14", prove=None, quiet=True)
    assert {change.pass_name for change in surgery.changes} == {"split_head"}
    assert [name for name, r in surgery.refusals if r.reason.startswith("undone: ")] == ["embedding_matmul"]
    both, one = (
        MLProgram.read(ane.apply(tied(), steps, target="M1/macOS 14", prove=None, quiet=True).program).score(
            Target.parse("M1/macOS 14")
        )
        for steps in (list(recipe.steps), [SplitHead()])
    )
    assert one.estimate < both.estimate
    assert one.flop < both.flop
    assert one.moved < both.moved


SumsToThree = small_rewrite(
    "sums_to_three",
    lambda op: op.cumsum(x=op.cumsum(as_="first")),
    lambda mb, m: mb.exp(x=mb.relu(x=mb.relu(x=m.first.x))),
    precedes=("all_relu",),
)
"""Pays, and makes the model larger: two sums become three ops that are legal."""
AllRelu = small_rewrite("all_relu", lambda op: op.any("exp", "cumsum")(), lambda mb, m: mb.relu(x=m.root.x))
"""Does as much, whatever the sums have become."""


def test_a_step_that_a_later_one_makes_useless_is_taken_back() -> None:
    """The wrong version: a greedy row, in which what was kept once stays."""

    @mb.program(input_specs=[mb.TensorSpec((32, 512, 64, 64), types.fp16)], opset_version=ct.target.iOS17)
    def twice(x: Var) -> Var:
        return mb.tanh(x=mb.cumsum(x=mb.cumsum(x=mb.tanh(x=x), axis=-1), axis=-1), name="y")

    recipe = Recipe("two", (SumsToThree(), AllRelu()))
    surgery = ane.apply(twice, recipe, target="M4/macOS 15", prove=None, quiet=True)
    assert kinds(surgery) == ["tanh", "relu", "relu", "tanh"]
    (said,) = [r.reason for name, r in surgery.refusals if name == "sums_to_three"]
    assert said.startswith("undone: the other steps do as well without it (expected time ")
    asked = recipe.with_options(sums_to_three=True)
    assert len(kinds(ane.apply(twice, asked, target="M4/macOS 15", prove=None, quiet=True))) == 5


@pytest.mark.slow
@pytest.mark.parametrize("target", ["M1/macOS 14", "M4/macOS 15"])
def test_an_unrolled_recurrence_is_not_free(target: str) -> None:
    """The wrong version: 64 rounds of small ops, each of which costs next to nothing."""
    rng = np.random.default_rng(0)
    own, fed = ((0.1 * rng.standard_normal((1024, 256))).astype(np.float16) for _ in range(2))
    zeros = np.zeros((1, 256), np.float16)

    @mb.program(input_specs=[mb.TensorSpec((64, 1, 256), types.fp16)], opset_version=ct.target.iOS17)
    def recurrent(x: Var) -> Var:
        return mb.lstm(
            x=x, initial_h=zeros, initial_c=zeros, weight_ih=fed, weight_hh=own, output_sequence=True
        )[0]

    surgery = ane.apply(recurrent, "auto", target=target, prove=None, quiet=True)
    assert "lstm" in kinds(surgery)
    (said,) = [r.reason for name, r in surgery.refusals if name == "unroll_recurrent"]
    assert "and the expected time" in said
    assert "is no clear gain" in said

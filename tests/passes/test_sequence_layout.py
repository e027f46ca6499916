"""The layout as one step: its parts, its options, the targets for which recipes take it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from pass_cases import stays, table
from scores import scored
from transformer_blocks import block

import anesurgery as ane
from anesurgery import recipes
from anesurgery.errors import ProofError, Refusal
from anesurgery.mil import Array, Program, Var, ct, mb, types, walk_ops
from anesurgery.passes import split_heads
from anesurgery.passes.sequence_layout import SequenceLayout
from anesurgery.placement.rules.finds_sequence_layout import evidence
from anesurgery.placement.score import OFF
from anesurgery.placement.target import Target
from anesurgery.regions import channel_ops
from anesurgery.regions.heads import is_scalar
from anesurgery.regions.layouts import Layout
from anesurgery.testing import apply_pass

FAMILIES = ("encoder_ane", "decoder_ane", "seq2seq_ane", "whisper_ane", "vit_ane", "unet_ane")


def kinds(program: Program) -> Counter[str]:
    return Counter(op.op_type for op in walk_ops(program) if op.op_type != "const")


def test_both_steps_and_blocks_of_queries() -> None:
    after, session = apply_pass(SequenceLayout(block=8), block("bert"), prove=False)
    assert [*dict.fromkeys(c.pass_name for c in session.changes)] == [
        "channels_first",
        "split_heads",
        "tile_queries",
    ]
    assert not {"linear", "matmul"} & kinds(after).keys()
    assert kinds(after)["softmax"] == 8  # four heads, two blocks each


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("target", ["M1/macOS 14", "M4/macOS 15"])
def test_recipes_take_it_on_request(name: str, target: str) -> None:
    def layouts(**options: str) -> list[str]:
        chosen = getattr(recipes, name).with_options(**options).for_target(target)
        return [step.layout for step in chosen.steps if isinstance(step, SequenceLayout)]

    assert layouts() == ["by_evidence" if name == "encoder_ane" else "as_given"]
    assert layouts(layout="channels_first") == ["channels_first"]
    assert layouts(layout="as_given") == ["as_given"]


def test_a_recipe_with_the_layout_on_request() -> None:
    program = block("vit")
    plain = ane.apply(program, "vit_ane", target="M4/macOS 15", prove=None, quiet=True)
    chosen = recipes.vit_ane.with_options(layout="channels_first")
    turned = ane.apply(program, chosen, target="M4/macOS 15", prove=None, quiet=True)
    assert "linear" in kinds(plain.program)
    assert "linear" not in kinds(turned.program)


def test_a_report_shows_its_parts_under_it() -> None:
    recipe = recipes.vit_ane.with_options(layout="channels_first")
    lines = ane.apply(block("vit"), recipe, prove=None, quiet=True).details.splitlines()
    rows = [line.split()[0] for line in lines if line.split()]
    at = rows.index(next(row for row in rows if row.startswith("sequence_layout")))
    assert rows[at + 1 : at + 3] == ["channels_first", "split_heads"]
    assert not any("sequence_layout" in line for line in lines if line.startswith("changed nothing"))


HALF = np.float16


def encoder(
    tokens: int = 197,
    layers: int = 3,
    width: int = 192,
    *,
    causal: bool = False,
    head: int = 0,
    guarded: bool = True,
) -> Program:
    """A text encoder from ids on, guarded as conversions do; a causal one with a head gives next words."""
    heads, words = 4, 50
    rng = np.random.default_rng(0)

    def stored(*shape: int) -> Array:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(HALF)

    def linear(x: Var, outputs: int = width) -> Var:
        return mb.linear(x=x, weight=stored(outputs, int(x.shape[-1])), bias=stored(outputs))

    def norm(x: Var) -> Var:
        return mb.layer_norm(x=x, axes=[-1], gamma=stored(width), beta=stored(width), epsilon=HALF(1e-5))

    def seen(x: Var) -> Var:
        parts = [mb.reshape(x=linear(x), shape=[1, tokens, heads, width // heads]) for _ in range(3)]
        q, k, v = (mb.transpose(x=part, perm=[0, 2, 1, 3]) for part in parts)
        scores = mb.matmul(x=mb.mul(x=q, y=HALF(0.125)), y=k, transpose_y=True)
        if causal:
            scores = mb.add(x=scores, y=np.triu(np.full((tokens, tokens), -1e4, HALF), 1))
        mixed = mb.transpose(x=mb.matmul(x=mb.softmax(x=scores, axis=-1), y=v), perm=[0, 2, 1, 3])
        return linear(mb.reshape(x=mixed, shape=[1, tokens, width]))

    @mb.program(input_specs=[mb.TensorSpec((1, tokens), dtype=types.int32)], opset_version=ct.target.iOS17)
    def program(ids: Var) -> Var:
        if guarded:
            wrapped = mb.add(x=ids, y=np.int32(words))
            ids = mb.select(cond=mb.greater_equal(x=ids, y=np.int32(0)), a=ids, b=wrapped)
        x = mb.gather(x=stored(words, width), indices=ids, axis=0, validate_indices=False, batch_dims=0)
        for _ in range(layers):
            x = norm(mb.add(x=x, y=seen(x)))
            x = norm(mb.add(x=x, y=linear(mb.gelu(x=linear(x, 4 * width), mode="EXACT"))))
        return (
            mb.linear(x=x, weight=stored(head, width), name="y") if head else mb.mul(x=x, y=HALF(1), name="y")
        )

    return program


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["encoder_ane", "auto"])
@pytest.mark.parametrize("target", ["M1/macOS 14", "A15/iOS 17"])
def test_text_encoders_take_it_where_it_was_measured_to_help(recipe: str, target: str) -> None:
    """Not an op more than by hand, as when it is asked for; the interface and the numbers stay."""
    program, layers = encoder(), 3
    surgery = ane.apply(program, recipe, target=target, prove="both", quiet=True)
    found = kinds(surgery.program)
    assert not {"linear", "matmul", "reshape"} & found.keys()
    assert found["transpose"] <= layers + 2  # the keys of each layer, and both ends
    assert surgery.proof is not None
    assert surgery.proof.ok
    ends = [
        [
            (v.name, v.shape, v.dtype)
            for v in (*p.functions["main"].inputs.values(), *p.functions["main"].outputs)
        ]
        for p in (program, surgery.program)
    ]
    assert ends[0] == ends[1]
    before, after = (scored(p, Target.parse(target))[0] for p in (program, surgery.program))
    said = [note for note in surgery.notes if "DistilBERT" in note]
    assert all(("went from 55 to 8.7 ms (measured, M1 Max" in one) == target.startswith("M1") for one in said)
    overruled = any("measured, which counts more than that the expected time" in one for one in said)
    assert said
    assert not (after.loss(before, OFF) if overruled else after.loss(before))
    again = ane.apply(surgery.program, recipe, target=target, prove=None, quiet=True)
    assert not again.changes


@pytest.mark.quick_cases("M4/macOS 15-encoder_ane", "M1 Pro/macOS 14-auto")
@pytest.mark.one_of(2)
@pytest.mark.parametrize("recipe", ["encoder_ane", "auto"])
@pytest.mark.parametrize("target", ["M4/macOS 15", "M1 Pro/macOS 14", "A14/iOS 17", None])
def test_nobody_takes_it_elsewhere(recipe: str, target: str | None) -> None:
    surgery = ane.apply(encoder(tokens=64), recipe, target=target, prove=None, quiet=True)
    assert "linear" in kinds(surgery.program)
    said = [r.reason for name, r in surgery.refusals if name == "sequence_layout"]
    wanted = recipe == "encoder_ane" and target is not None
    assert [reason.startswith("no measurement says that the layout helps on") for reason in said] == [
        True
    ] * wanted


@pytest.mark.slow
def test_it_can_be_prevented() -> None:
    chosen = recipes.encoder_ane.with_options(layout="as_given")
    assert "linear" in kinds(ane.apply(encoder(), chosen, target="M1/macOS 14", prove=None, quiet=True).program)


def test_it_is_undone_where_the_products_would_leave_the_engine() -> None:
    """`auto` may take it here: by the estimate, all of so small a model is faster on the CPU."""
    program = encoder(tokens=64, layers=1)
    surgery = ane.apply(program, "encoder_ane", target="M1/macOS 14", prove=None, quiet=True)
    assert "linear" in kinds(surgery.program)
    (said,) = [r.reason for name, r in surgery.refusals if name == "sequence_layout"]
    assert re.search("the share of the work (on the ANE|that may be on the ANE) would fall", said)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["encoder_ane", "auto"])
def test_what_was_measured_counts_more_than_the_estimate_and_is_named(recipe: str) -> None:
    """Transpositions at its ends cost ops off the engine, and the estimate may rise by them."""
    surgery = ane.apply(encoder(guarded=False), recipe, target="M1/macOS 14", prove=None, quiet=True)
    assert "linear" not in kinds(surgery.program)
    assert any("DistilBERT went from 55 to 8.7 ms (measured" in note for note in surgery.notes)


@pytest.mark.parametrize(
    "build",
    [lambda: encoder(tokens=64, causal=True, head=300), lambda: block("vit"), lambda: block("whisper")],
    ids=["gpt", "vit", "sound"],
)
def test_of_other_kinds_nothing_was_measured(build: Callable[[], Program]) -> None:
    found = evidence(build(), Target.parse("M1/macOS 14"))
    assert isinstance(found, Refusal)
    assert found.reason == "the layout was measured to help text encoders, and this is none"


@pytest.mark.parametrize("kind", ["vit", "whisper"])
def test_without_a_measurement_the_layout_is_not_suggested(kind: str) -> None:
    program = block(kind)
    surgery = ane.apply(program, "auto", target="M1/macOS 14", prove=None, quiet=True)
    assert "channels_first" not in {change.pass_name for change in surgery.changes}
    findings = [f.rule for part in scored(program, Target.parse("M1"))[1] for f in part.all_findings]
    assert "rows-of-tokens" not in findings


def norms_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    right = channel_ops._split_off

    def wrong(layout: Layout, axes: Sequence[int]) -> Any:
        found = right(layout, axes)
        return found if found is None or len(layout.axes) != 3 else found._replace(axes=[3])

    monkeypatch.setattr(channel_ops, "_split_off", wrong)


def heads_permuted(monkeypatch: pytest.MonkeyPatch) -> None:
    right = split_heads._split
    monkeypatch.setattr(
        split_heads, "_split", lambda mb, x, axis: right(mb, x, axis)[:: -1 if axis == 3 else 1]
    )


def masks_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    right = split_heads._mask

    def wrong(mb: Any, var: Var, heads: int) -> list[Var]:
        found = right(mb, var, heads)
        return found if is_scalar(var) else [mb.transpose(x=v, perm=[0, 3, 2, 1]) for v in found]

    monkeypatch.setattr(split_heads, "_mask", wrong)


@pytest.mark.quick_cases("norms_of_tokens")
@pytest.mark.parametrize("wrong", [norms_of_tokens, heads_permuted, masks_turned])
def test_wrong_versions_are_caught(
    wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = encoder(tokens=64, width=64, layers=1, causal=True)
    step = SequenceLayout(layout="by_evidence")
    assert ane.apply(program, [step], target="M1/macOS 14", quiet=True).changes
    wrong(monkeypatch)
    with pytest.raises(ProofError):
        ane.apply(program, [step], target="M1/macOS 14", quiet=True)


test_cases, test_surroundings = table(SequenceLayout(layout="as_given"), stays(block, "bert"))

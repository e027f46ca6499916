"""The layout as one step: its parts, its options, the targets for which recipes take it."""

from __future__ import annotations

from collections import Counter

import pytest
from transformer_blocks import block

import anesurgery as ane
from anesurgery import recipes
from anesurgery.errors import PassError
from anesurgery.mil import Program, walk_ops
from anesurgery.passes.sequence_layout import SequenceLayout
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


def test_the_layout_as_given() -> None:
    assert not apply_pass(SequenceLayout(layout="as_given"), block("bert"), prove=False)[1].changes
    with pytest.raises(PassError, match="layout='channels_last'"):
        SequenceLayout(layout="channels_last")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("target", ["M1/macOS 14", "M4/macOS 15"])
def test_recipes_take_it_on_request(name: str, target: str) -> None:
    def layouts(**options: str) -> list[str]:
        chosen = getattr(recipes, name).with_options(**options).aimed_at(target)
        return [step.layout for step in chosen.steps if isinstance(step, SequenceLayout)]

    assert layouts() == ["as_given"]
    assert layouts(layout="channels_first") == ["channels_first"]


def test_a_recipe_with_the_layout_on_request() -> None:
    program = block("vit")
    plain = ane.apply(program, "vit_ane", target="M4/macOS 15", prove=None, quiet=True)
    chosen = recipes.vit_ane.with_options(layout="channels_first")
    turned = ane.apply(program, chosen, target="M4/macOS 15", prove=None, quiet=True)
    assert "linear" in kinds(plain.program)
    assert "linear" not in kinds(turned.program)

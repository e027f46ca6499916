"""No form is picked that published times call slower than fp16 on the target: all chips, bits and products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.compressing import weight_forms
from anesurgery.compressing.weight_forms import (
    BITS,
    COMPUTING,
    READING,
    Choice,
    Evidence,
    choose,
    choose_activations,
    evidence,
    read_form,
)
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.target import Target, family_of

COUNTS = sorted({bits for each in BITS.values() for bits in each})
BOUNDS = [frozenset(some) for some in ((READING,), (COMPUTING,), (READING, COMPUTING))]
VERSIONS = (7, 8, 9, 10)
CHIPS = Target.parse("any").chips
CASES = list(itertools.product((*CHIPS, "any", "M4+"), COUNTS, BOUNDS, VERSIONS))
Picks = Callable[..., Choice]


def against(form: str, target: Target, bounds: frozenset[str]) -> list[Evidence]:
    """What was published of a form on a generation of the target that calls it slower."""
    kind = form.rstrip("0123456789") if form.startswith("palette") else form
    return [
        one
        for one in evidence()
        if one.form == kind and one.bound in bounds and one.family in target.families and one.speed < 1
    ]


def slower(pick: Picks, purpose: str = "speed") -> Iterator[tuple[Any, ...]]:
    """The cases in which something is picked that evidence speaks against."""
    for chip, bits, bounds, version in CASES:
        target = Target.parse(chip)
        form = pick(bits, target, bounds, version, purpose).form
        if form is not None and against(form, target, bounds):
            yield chip, bits, bounds, version, form


def test_there_is_evidence_against_forms() -> None:
    """Else the tests below could not fail."""
    assert len({one.form for one in evidence() if one.speed < 1}) >= 1
    assert {one.bound for one in evidence()} == {READING, COMPUTING}
    assert len(CHIPS) > 10


def test_no_form_is_slower_by_evidence() -> None:
    assert list(slower(choose)) == []


def smallest(bits: int, target: Target, bounds: frozenset[str], version: int, purpose: str) -> Choice:
    """The wrong version: the first form of the bits, whatever is known of it."""
    return choose(bits, target, bounds, version, "size")


def of_one_bound(bits: int, target: Target, bounds: frozenset[str], version: int, purpose: str) -> Choice:
    """The wrong version: looks at products of few positions alone."""
    return choose(bits, target, frozenset((READING,)), version, purpose)


@pytest.mark.parametrize("wrong", [smallest, of_one_bound])
def test_wrong_versions_are_noticed(wrong: Picks) -> None:
    assert list(slower(wrong))


def test_what_nothing_is_known_of_is_slower_on_no_other_chip() -> None:
    for chip, bits, bounds, version in CASES:
        found = choose(bits, Target.parse(chip), bounds, version, "speed")
        if found.form is not None and found.why.startswith("no speed was published"):
            assert not against(found.form, Target.parse("any"), bounds), (chip, found)


def test_older_formats_get_what_they_hold() -> None:
    for chip, bits, bounds, version in CASES:
        for purpose in weight_forms.PURPOSES:
            form = choose(bits, Target.parse(chip), bounds, version, purpose).form
            assert form is None or version >= read_form(form).version


def test_every_choice_says_why() -> None:
    for chip, bits, bounds, version in CASES:
        found = choose(bits, Target.parse(chip), bounds, version, "speed")
        assert found.why
        assert found.form is None or int(found.form.lstrip("abcdefghijklmnopqrstuvwxyz")) >= bits


def test_inputs_of_8_bits_are_taken_only_where_they_are_as_fast_on_average() -> None:
    for chip, bounds in itertools.product(CHIPS, BOUNDS):
        target = Target.parse(chip)
        here = [
            one
            for one in weight_forms._published((weight_forms.W8A8,))
            if one.bound in bounds and one.family in target.families
        ]
        found = choose_activations(target, bounds, "speed")
        slow = [one.speed for one in here if one.speed < 1]
        assert found.inputs or slow, (chip, bounds)
        assert not (found.inputs and here and len(slow) == len(here)), (chip, bounds)


def products(rows: int) -> Program:
    """A product of so many positions, and a convolution."""
    weight = np.random.default_rng(3).standard_normal((64, 64)).astype(np.float16) / 8

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 1, rows), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        x = mb.relu(x=mb.conv(x=x, weight=weight.reshape(64, 64, 1, 1)))
        rows = mb.transpose(x=mb.squeeze(x=x, axes=[2]), perm=[0, 2, 1])
        return mb.linear(x=rows, weight=weight[::-1].copy(), name="y")

    return program


PAGE = Path(__file__).resolve().parents[2] / "docs" / "compressed-weights.md"


def chip_table() -> str:
    """A row for each generation: what speed takes of 4 and 8 bits, and in brackets where nothing is known."""
    generations: dict[int, list[str]] = {}
    for chip in CHIPS:
        generations.setdefault(family_of(chip), []).append(chip)
    rows = ["| chips | 4 bits, reading | 4 bits, computing | 8 bits, reading | 8 bits, computing |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for chips in generations.values():
        cells = [
            _cell(choose(bits, Target.parse(chips[0]), bound, 9, "speed"))
            for bits in (4, 8)
            for bound in BOUNDS[:2]
        ]
        rows.append(f"| {' | '.join([', '.join(chips), *cells])} |")
    return "\n".join(rows)


def _cell(choice: Choice) -> str:
    if choice.form is None:
        return "stays"
    return f"({choice.form})" if choice.why.startswith("no speed was published") else choice.form


def test_the_page_says_which_form_a_chip_gets() -> None:
    """The wrong version is a table that was true of older evidence."""
    assert chip_table() in PAGE.read_text(encoding="utf-8")


@pytest.mark.one_of(18)
@pytest.mark.parametrize("purpose", weight_forms.PURPOSES)
@pytest.mark.parametrize("chip", {family_of(chip): chip for chip in CHIPS}.values())
def test_no_op_leaves_the_engine(chip: str, purpose: str) -> None:
    """On a chip of each generation."""
    rng = np.random.default_rng(4)
    for rows in (1, 256):
        given = [{"x": rng.standard_normal((1, 64, 1, rows)).astype(np.float16)} for _ in range(8)]
        found = ane.compress(products(rows), 4, inputs=given, target=chip, for_=purpose, mixed=False)
        assert found.on_engine[1] >= found.on_engine[0]
        assert len(found.weights) == 2

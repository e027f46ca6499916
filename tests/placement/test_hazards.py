"""Numeric hazards: each is named, its twin is not, and what repairs it brings the numbers back."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hazard_graphs import HAZARDS, Hazard
from hazard_page import GOOD, decibels, exact, page, repaired
from published_values import PUBLISHED, Published, ours

import anesurgery as ane
from anesurgery.interpret import run
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.passes.compute_fp16 import ComputeFp16
from anesurgery.passes.padding_mask_tensor import PaddingMaskTensor
from anesurgery.placement.findings_in_words import NOT_FINITE
from anesurgery.testing import apply_pass

MOVE_THE_LIMIT = {"halve_exponent", "scale_powers"}
"""Repairs after which what is not bounded overflows later, and not never."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "hazards.md"


def named(hazard: Hazard, program: Program) -> set[str]:
    """The numeric findings of a program."""
    found = ane.inspect(program, target=hazard.target)
    return {f.rule for f in found.all_findings if f.kind == "numeric"}


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda h: h.name)
def test_it_is_named_with_its_repair(hazard: Hazard) -> None:
    found = [f for f in ane.inspect(hazard.graph, target=hazard.target).all_findings if f.rule == hazard.rule]
    assert found
    if hazard.repair and found[0].remedy:
        assert found[0].remedy == hazard.repair


def test_the_rules_of_infinities_and_nan_are_those_whose_graphs_show_them() -> None:
    """The wrong version: a report ranks a rule of lost digits with those of NaN."""
    rows = [
        [cell.strip() for cell in line.split("|")] for line in PAGE.read_text(encoding="utf-8").splitlines()
    ]
    shown = [(row[4].strip("`"), "inf or NaN" in row[3]) for row in rows if len(row) > 7 and " dB" in row[3]]
    for rule in {rule for rule, _ in shown if rule.startswith("num-")}:
        infinite = [is_infinite for name, is_infinite in shown if name == rule]
        assert (rule in NOT_FINITE) == (sum(infinite) * 2 >= len(infinite)), rule


@pytest.mark.parametrize("name", ["root mean square norm", "layer norm, written out"])
def test_a_norm_is_repaired_by_the_pass_that_stays_on_the_engine(name: str) -> None:
    """The wrong version: fp32 on the CPU is named first, and the norm's own pass in the advice alone."""
    (hazard,) = (one for one in HAZARDS if one.name == name)
    found = [f for f in ane.inspect(hazard.graph, target=hazard.target).all_findings if f.kind == "numeric"]
    assert {f.remedy for f in found} == {hazard.repair}


@pytest.mark.parametrize("given", [True, False])
def test_a_mask_names_its_pass_where_that_applies(given: bool) -> None:
    """The wrong version: the pass is named where scores are an input, and finds nothing to do there."""
    specs = [mb.TensorSpec(shape, dtype=types.fp16) for shape in ((1, 4, 16, 16), (1, 1, 1, 16))]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS17)
    def attention(x: Var, mask: Var) -> Var:
        scores = x if given else mb.matmul(x=x, y=x, transpose_y=True)
        keep = mb.greater(x=mask, y=np.float16(-1))
        return mb.softmax(x=mb.select(cond=keep, a=scores, b=np.float16(-np.inf)), axis=-1, name="y")

    found = [f for f in ane.inspect(attention, target="M4").all_findings if f.rule.startswith("num-mask")]
    changed = bool(apply_pass(PaddingMaskTensor(), attention)[1].changes)
    assert changed is not given
    assert [f.remedy for f in found] == [(changed and "padding_mask_tensor") or None] * 2


@pytest.mark.parametrize("hazard", HAZARDS, ids=lambda h: h.name)
def test_nothing_is_said_where_it_cannot_happen(hazard: Hazard) -> None:
    assert named(hazard, hazard.twin) == set()


@pytest.mark.parametrize("hazard", [h for h in HAZARDS if h.arithmetic], ids=lambda h: h.name)
def test_the_arithmetic_shows_it(hazard: Hazard) -> None:
    assert decibels(hazard.graph, hazard, hazard.arithmetic) < GOOD


@pytest.mark.slow_cases("small attention weights over many keys")
@pytest.mark.parametrize("hazard", [h for h in HAZARDS if h.repair], ids=lambda h: h.name)
def test_the_repair_brings_the_numbers_back(hazard: Hazard) -> None:
    """Also in exact arithmetic, and where no arithmetic here shows the hazard."""
    after = repaired(hazard)
    if not np.isfinite(exact(hazard)).all():  # a row that is masked whole means nothing
        (value,) = run(after, {"x": hazard.inputs}, precision="fp16").values()
        assert np.isfinite(value).all()
        return
    for arithmetic in dict.fromkeys(("fp32", "fp16", "ane", hazard.arithmetic or "ane:M1")):
        assert decibels(after, hazard, arithmetic) >= GOOD, arithmetic


def made_safe(hazard: Hazard, inputs: Any = None) -> ane.Surgery:
    how: dict[str, Any] = {"target": hazard.target, "prove": "sites", "quiet": True, "inputs": inputs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ane.SurgeryWarning)  # it says what the repair costs
        return ane.apply(hazard.graph, "safe_numbers", **how)


@pytest.mark.one_of(9)
@pytest.mark.parametrize("hazard", [h for h in HAZARDS if h.repair], ids=lambda h: h.name)
def test_safe_numbers_repairs_it_and_leaves_no_finding(hazard: Hazard) -> None:
    surgery = made_safe(hazard)
    if any("less exact" in str(refusal) for _, refusal in surgery.refusals):  # of numbers that reach no hazard
        surgery = made_safe(hazard, {"x": hazard.inputs})
    assert hazard.repair in {change.pass_name for change in surgery.changes}
    found = {f.rule for f in ane.inspect(surgery.model, target=hazard.target).all_findings}
    assert (hazard.rule in found) is (hazard.repair in MOVE_THE_LIMIT)


def without_decibels(text: str) -> str:
    """A page without what the vector width of a processor may change."""
    return re.sub(r"[\d.]+ % off", "N % off", re.sub(r"\d+ dB", "N dB", text))


@pytest.mark.slow
def test_the_page_says_what_a_run_gives() -> None:
    assert without_decibels(PAGE.read_text(encoding="utf-8")) == without_decibels(page())


@pytest.mark.parametrize("value", PUBLISHED, ids=lambda v: f"{v.what} {v.measured}")
def test_published_values_are_reproduced_or_said_not_to_be(value: Published) -> None:
    assert (ours(value) == value.measured) is value.reproduced


def clipped_logarithm(dtype: Any) -> Program:
    """A log-mel front end's, of no less than 1e-10, which a converter to fp16 makes the least number of it."""
    held, least = (types.fp16, 2.0**-24) if dtype is np.float16 else (types.fp32, 1e-10)

    return mb.program(input_specs=[mb.TensorSpec((4, 16), dtype=held)])(
        lambda x: mb.log(
            x=mb.clip(x=mb.relu(x=x), alpha=dtype(least), beta=dtype(np.inf)), epsilon=dtype(0), name="y"
        )
    )


def test_the_least_number_of_a_logarithm_is_kept_from_fp32() -> None:
    """As the advice says; of a program of fp16 nobody can tell what the number was."""
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float16)
    wide, half = clipped_logarithm(np.float32), clipped_logarithm(np.float16)
    (meant,) = run(wide, {"x": x.astype(np.float32)}, precision="fp32").values()
    after = apply_pass(ComputeFp16(), wide)[0]
    (kept,) = run(after, {"x": x.astype(np.float32)}, precision="fp16").values()
    (lost,) = run(half, {"x": x}, precision="fp16").values()
    assert np.abs(kept - meant).max() < 0.01
    assert np.abs(lost - meant).max() > 6


def safe_surgery(name: str) -> tuple[Hazard, ane.Surgery]:
    (hazard,) = (one for one in HAZARDS if one.name == name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ane.SurgeryWarning)
        return hazard, ane.apply(hazard.graph, "safe_numbers", target=hazard.target, quiet=True)


def test_what_a_repair_costs_where_its_hazard_is_not_reached_is_said() -> None:
    """The wrong version says nothing of outputs on plain inputs that are less exact."""
    hazard, surgery = safe_surgery("exponential without a bound")
    assert hazard.repair in {change.pass_name for change in surgery.changes}
    (note,) = (one for one in surgery.notes if one.startswith(f"{hazard.repair}: outputs would be less exact"))
    assert "; kept, as it repairs what may go wrong: num-" in note


def test_a_sigmoid_is_repaired_without_a_loss() -> None:
    """The wrong version clips the exponent at 11, and 1.7e-5 is left of shares that are 0."""
    hazard, surgery = safe_surgery("sigmoid")
    (change,) = surgery.changes
    assert change.pass_name == hazard.repair
    assert not [note for note in surgery.notes if "less exact" in note]
    x = np.full(hazard.inputs.shape, -1000, np.float16)
    assert not ane.run(surgery.program, {"x": x}, precision="fp16")["y"].any()

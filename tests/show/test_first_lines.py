"""The first line of each kind of report says what was found, in words that need no documentation."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_models import finding, inspection, row

import anesurgery as ane
from anesurgery.display import drawn
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement import Inspection
from anesurgery.show import terminal
from anesurgery.show.console import as_text
from anesurgery.show.headline import compared_shares, headline
from anesurgery.show.markdown import Review, review_markdown

OURS = re.compile(
    r"\b(sites?|grades?|refus\w+|residency|segments?|fold|gates?|contract|status|trials?|verdict|remedy|surgery)\b"
)
"""Words that only our documentation explains."""
TARGET = "M1/macOS 14"


def program(opset: ct.target = ct.target.iOS16) -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 8, 64), dtype=types.fp16)], opset_version=opset)
    def made(x: Var) -> Var:
        weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16) / 8
        y = mb.relu(x=mb.linear(x=mb.sub(x=x, y=np.float16(1)), weight=weight, name="first"), name="middle")
        return mb.linear(x=y, weight=weight, name="second")

    return made


@pytest.fixture(scope="module")
def model() -> Any:
    return ane.load(program())


SAMPLES = [{"x": np.random.default_rng(1).standard_normal((1, 8, 64)).astype(np.float32)}]


def two(second: str | None, **changes: Any) -> Inspection:
    """Two ops that compute as much, one on the ANE."""
    return inspection([row(0, "conv", "ane", flop=100), row(1, "conv", second, flop=100, **changes)])


PLACED = two("cpu", findings=(finding("f", message="is int32"),))
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "inspection": (
        lambda m: PLACED,
        r"On M1/macOS 14, 1 of 2 ops \(50% of the work\) runs on the Neural Engine",
    ),
    "surgery": (lambda m: ane.apply(m, ["negate_subtract"], quiet=True), "Every edit gives the same bits"),
    "comparison": (lambda m: ane.compare(m, m), "ok: the outputs are identical"),
    "ranges": (lambda m: ane.ranges(m, SAMPLES), "no op leaves the range"),
    "chain": (lambda m: ane.split(m, 2), "2 chunks, "),
    "sizes": (lambda m: ane.choose_sizes([3, 5, 9], 2), r"best sizes: \d, \d"),
    "sensitivity": (
        lambda m: ane.sensitivity(m, SAMPLES, modes=["linear-8"]),
        "loss of the outputs if one weight is compressed",
    ),
    "certificate": (lambda m: ane.certify(m, SAMPLES), "holds: "),
    "compression": (lambda m: ane.compress(m, inputs=SAMPLES, target=TARGET), r"weights: \S+ kB -> "),
}
"""Kind -> what is reported, and how its report begins."""


def words(shown: str) -> str:
    """What is read first: of HTML without marks and pictures."""
    shown = re.sub(r"<(svg|style)\b.*?</\1>", "", shown, flags=re.S)
    shown = html.unescape(re.sub(r"<[^>]+>", "", shown)) if shown.lstrip().startswith("<") else shown
    return " ".join(shown.split())


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_begins_with_a_sentence(kind: str, model: Any) -> None:
    make, begins = KINDS[kind]
    report = make(model)
    for shown in map(words, (str(report), report._repr_html_())):
        assert re.match(begins, shown), shown[:200]
        assert not OURS.search(shown[:120]), shown[:120]


MOVED = "On M1/macOS 14: 50% -> 100% of the work runs on the Neural Engine"


def test_two_inspections_begin_with_what_moved() -> None:
    better = two("ane")
    lines = as_text(terminal.difference_report(PLACED, better)).splitlines()
    assert lines[0] == MOVED
    assert MOVED in words(drawn(PLACED, "page", better))
    assert (
        compared_shares(PLACED, PLACED) == "On M1/macOS 14: 50% of the ops run on the Neural Engine, as before"
    )


def test_a_page_and_a_cell_have_no_number_of_ours_first() -> None:
    for made in (drawn(PLACED, "page"), PLACED._repr_html_()):
        assert not re.search(r"status \d", made[: made.index("runs on the")])
    assert "in part on the Neural Engine" in drawn(PLACED, "page")
    assert re.search(r"<p class=.verdict.>\w", drawn(PLACED, "page")), "the sentence comes first"
    assert not re.search(r">[^<]*\bANE\b", drawn(PLACED, "page").partition("<script")[0])


def test_markdown_begins_with_the_model_and_what_got_worse() -> None:
    worse = inspection([row(0, "conv", "cpu"), row(1, "conv", "cpu")])
    lines = review_markdown([Review("net.mlpackage", PLACED, worse)]).splitlines()
    assert lines[0] == "### net.mlpackage on M1/macOS 14"
    assert lines[2].startswith("**worse: share of the ops on the Neural Engine 50.0% -> 0.0%")
    assert not OURS.search(" ".join(lines[:3]))


def test_what_is_rounded_is_said() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 64))], opset_version=ct.target.iOS16)
    def precise(x: Var) -> Var:
        return mb.relu(x=x, name="y")

    plain, rounded = (ane.apply(precise, ["compute_fp16"], quiet=True, prove=p) for p in ("sites", "model"))
    assert headline(plain) == "Values are rounded now; the outputs were not compared"
    assert headline(rounded).startswith("Outputs agree to ")


def test_what_does_not_load_is_no_share_of_the_engine() -> None:
    said = headline(ane.apply(program(ct.target.iOS18), ["negate_subtract"], target=TARGET, quiet=True))
    assert said.startswith("macOS 14 cannot load it")
    assert said.endswith("; 1 edit in 1 step")
    assert "Neural Engine" not in said


def test_a_recipe_does_not_edit_what_does_not_load(tmp_path: Path) -> None:
    """The wrong version edits the model, which does not load afterwards either."""
    model = ane.example("gpt2", tmp_path / "gpt2.mlpackage")
    for target, edited in (("iPhone 13/iOS 15", False), ("iPhone 13/iOS 16", True)):
        done = ane.apply(model, "gpt2_ane", target=target, quiet=True, prove=None)
        assert bool(done.changes) is edited
        assert headline(done).startswith("iOS 15 cannot load it") is not edited
        assert headline(done).endswith("nothing was changed") is not edited


def test_what_nobody_knows_is_no_share_of_nothing() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 8), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def bare(x: Var) -> Var:
        return mb.identity(x=x, name="y")

    said = headline(ane.apply(bare, ["negate_subtract"], target=TARGET, quiet=True))
    assert said == f"Nothing was changed; on {TARGET}, it is not known where the ops run"


def test_a_network_that_became_a_program_was_changed(tmp_path: Any) -> None:
    network = ane.example("network", tmp_path / "network.mlmodel")
    said = headline(ane.apply(network, ["negate_subtract"], target=TARGET, quiet=True))
    assert said.startswith("The neural network became an ML Program, and nothing else was changed; on M1")
    layers = headline(ane.apply(network, ["legacy_constant"], target=TARGET, quiet=True))
    assert "became" not in layers

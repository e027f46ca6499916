"""The first line of a report: share, time, numbers and interface, in words that need no documentation."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.checking.exactness import Near
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.durations import Time, change
from anesurgery.placement.inspection import percent
from anesurgery.show import headline as first_line
from anesurgery.show.headline import compared_shares, headline

TARGET = "A15/iOS 17"
OURS = re.compile(r"\b(site|grade|refus\w+|residency|segment|fold|failed|gate|contract)\b")
"""Words that only our documentation explains, or that read like a failure."""


def program(side: int = 64) -> Program:
    """A head over a difference."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 256), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def built(x: Var) -> Var:
        weight = np.random.default_rng(0).standard_normal((side, 256)).astype(np.float16) / 16
        return mb.linear(x=mb.sub(x=x, y=np.float16(1)), weight=weight, name="logits")

    return built


def long_head() -> Program:
    """Layers that pay for the engine, and a head that is too long for it on an A15."""

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 512), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def built(x: Var) -> Var:
        rng = np.random.default_rng(0)
        for _ in range(4):
            x = mb.relu(
                x=mb.linear(x=x, weight=rng.standard_normal((1024, x.shape[-1])).astype(np.float16) / 32)
            )
        return mb.linear(x=x, weight=rng.standard_normal((20000, 1024)).astype(np.float16) / 32, name="logits")

    return built


@pytest.fixture(scope="module")
def surgery() -> Any:
    return ane.apply(long_head(), "split_head", target=TARGET, prove="both", quiet=True)


def test_the_sentence_has_share_time_numbers_and_interface(surgery: Any) -> None:
    said = headline(surgery)
    assert " ".join(str(surgery).split()).startswith(said)
    assert surgery.to_json()["summary"] == said
    assert re.match(
        r"On A15/iOS 17: [\d.]+ ms -> [\d.]+ ms by estimate, "
        r"about [\d.]+ times as fast \(likely [\d.]+ to [\d.]+\); ",
        said,
    )
    assert surgery.time.verdict in said
    assert str(surgery.time) in " ".join(surgery.details.split())
    assert surgery.to_json()["time"]["verdict"] == surgery.time.verdict
    assert "identical outputs" in said or re.search(r"outputs agree to \d+ dB", said)
    assert not OURS.search(said)


def test_without_a_time_the_gain_is_said_and_no_share_that_may_fall() -> None:
    plan = SimpleNamespace(gain="switches between units 2 -> 0")
    untimed: Any = SimpleNamespace(target=TARGET, time=None, plan=plan)
    assert first_line._gain(untimed) == f"on {TARGET}: switches between units 2 -> 0"


def test_outputs_that_are_not_finite_are_said_to_be_so() -> None:
    surgery = ane.apply(program(), ["negate_subtract"], quiet=True)
    near = Near({"fp16": -math.inf})
    said = headline(replace(surgery, plan=replace(surgery.plan, outputs=(near, near))))
    assert "he outputs in fp16 are not finite, on these inputs" in said


@pytest.mark.slow
def test_shares_are_those_of_an_inspection(surgery: Any, tmp_path: Path) -> None:
    after = ane.inspect(surgery.save(tmp_path / "after.mlpackage"), target=TARGET).residency["flop"]
    before = ane.inspect(long_head(), target=TARGET).residency["flop"]
    found = ane.inspect(long_head(), target=TARGET), ane.inspect(tmp_path / "after.mlpackage", target=TARGET)
    assert f"{percent(before)} -> {percent(after)} of the work" in compared_shares(*found)


def test_without_a_target_nothing_is_said_of_the_engine() -> None:
    said = headline(ane.apply(program(), ["negate_subtract"], quiet=True))
    assert "Neural Engine" not in said
    assert said == "Every edit gives the same bits"


def test_what_was_not_compared_says_why() -> None:
    surgery = ane.apply(program(), ["negate_subtract"], quiet=True)
    surgery.changes.append(replace(surgery.changes[0], proof=None, unchecked="operands are rounded, and more"))
    assert headline(surgery).startswith("2 edits: 1 proved equal, 1 not compared (operands are rounded)")


def test_nothing_to_change_is_said_first() -> None:
    said = headline(ane.apply(program(), ["causal_mask_tensor"], target="M4/macOS 15", quiet=True))
    assert said.startswith("Nothing was changed; ")


def test_what_differs_is_no_success() -> None:
    surgery = ane.apply(program(), ["negate_subtract"], prove="model", quiet=True)
    assert surgery.proof is not None
    wrong = ane.compare(program(), scaled(), precision="fp32")
    surgery.proof = wrong
    assert "he outputs differ" in headline(surgery)


def scaled() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 64, 256), dtype=types.fp16)], opset_version=ct.target.iOS16)
    def built(x: Var) -> Var:
        weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float16) / 15
        return mb.linear(x=mb.sub(x=x, y=np.float16(1)), weight=weight, name="logits")

    return built


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0%"), (0.0001, "<0.1%"), (0.333, "33%"), (0.995, "99.5%"), (0.99999, "99.9%"), (1.0, "100%")],
)
def test_percent(share: float, words: str) -> None:
    assert percent(share) == words


def test_details_say_what_a_check_rests_on(surgery: Any) -> None:
    assert len(surgery.details) >= len(str(surgery))


def test_a_repair_of_numbers_is_said_first() -> None:
    """The wrong version: a model whose outputs were wrong is said to be as fast as before."""

    @mb.program(input_specs=[mb.TensorSpec((1, 4, 8), types.fp16)], opset_version=ct.target.iOS17)
    def cliff(x: Var) -> Var:
        return mb.softplus(x=x, name="y")

    inputs = {"x": np.linspace(8, 13, 32, dtype=np.float16).reshape(1, 4, 8)}
    said = ane.apply(cliff, "auto", inputs=inputs, target="M3/macOS 26", prove=None, quiet=True).summary
    assert re.match(
        r"The outputs in .* Engine \(M3\) are repaired: -?[\d.]+ dB -> [\d.]+ dB against fp32", said
    ), said
    proved = ane.apply(cliff, "auto", inputs=inputs, target="M3/macOS 26", prove="model", quiet=True).summary
    assert "are repaired" in proved
    assert proved.endswith("identical outputs in fp16"), "of which arithmetic each half speaks"


def test_a_mask_that_hides_whole_rows_is_the_reason_that_is_said() -> None:
    @mb.program(
        input_specs=[
            mb.TensorSpec((1, 4, 64, 64), dtype=types.fp16),
            mb.TensorSpec((1, 64), dtype=types.int32),
        ],
        opset_version=ct.target.iOS17,
    )
    def masked(x: Var, mask: Var) -> Var:
        hidden = mb.expand_dims(x=mb.equal(x=mask, y=np.int32(0)), axes=[1, 2])
        scores = mb.select(cond=hidden, a=np.float16(-np.inf), b=mb.matmul(x=x, y=x, transpose_y=True))
        return mb.softmax(x=scores, axis=-1, name="y")

    said = headline(ane.apply(masked, "auto", target="iPhone 14 Pro", quiet=True))
    assert said.startswith("Inputs that are all 0 or all 1 no longer give NaN or infinity; on iPhone 14 Pro")
    assert said.endswith("as fast as before; 1 edit checked on test inputs")


def test_a_model_whose_output_no_input_changes_says_so() -> None:
    """Of a codec with empty codebooks all was folded; the first line promised a thousand times the speed."""

    @mb.program(input_specs=[mb.TensorSpec((64,), dtype=types.int32)], opset_version=ct.target.iOS17)
    def codec(codes: Var) -> Var:
        rows = mb.gather(x=np.zeros((1024, 64), np.float16), indices=codes, axis=0)
        weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float16)
        return mb.tanh(x=mb.linear(x=mb.relu(x=mb.linear(x=rows, weight=weight)), weight=weight), name="sound")

    inspected = ane.inspect(codec, target=TARGET)
    assert "lost-output" in {finding.rule for finding in inspected.findings}
    changed = ane.apply(codec, "fold_constants", target=TARGET, quiet=True)
    assert changed.changes
    assert headline(changed).endswith("no input changes %sound")
    assert "no input changes" not in headline(ane.apply(long_head(), "split_head", target=TARGET, quiet=True))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (7, 22, ""),
        (500_000, 509_000, ""),
        (10_000_000, 10_090_000, ""),
        (500_000, 520_000, "weights 500 kB -> 520 kB"),
        (10_000_000, 10_200_000, "weights 10 MB -> 10.2 MB"),
    ],
)
def test_weights_that_hardly_grow_are_not_named(before: int, after: int, said: str) -> None:
    program, scores = SimpleNamespace(file_bytes=None), [SimpleNamespace(weights=n) for n in (before, after)]
    of_program: Any = SimpleNamespace(original=program, subject=program, scores=scores)
    assert first_line._larger(of_program) == said
    old, new = (SimpleNamespace(file_bytes=n) for n in (before, after))
    of_network: Any = SimpleNamespace(original=old, subject=new, scores=[SimpleNamespace(weights=0)] * 2)
    assert first_line._larger(of_network) == said.replace("weights", "file")


def test_the_target_is_named_once() -> None:
    """The wrong version: "nothing to gain on X; on X, it is not known where the ops run"."""
    surgery: Any = SimpleNamespace(target=TARGET, scores=[SimpleNamespace(ops=3, unplaced=3)] * 2)
    assert first_line._unplaced(surgery, "") == "it is not known where the ops run"


def test_times_that_differ_a_little_are_about_equal() -> None:
    old, new = (Time(ms, ms / 2, ms * 2, 4, "somebody", {}, {}) for ms in (0.515, 0.523))
    assert first_line._faster(change(old, old)) == "0.515 ms by estimate, as fast as before"
    assert first_line._faster(change(old, new)) == "0.515 ms -> 0.523 ms by estimate, about as fast as before"

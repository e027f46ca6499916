"""Plans: what is chosen before anything is edited, as data, and what is not done since nothing is gained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.errors import LoadError, PassError, SurgeryError
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.placement.target import Target
from anesurgery.rewriting import choosing
from anesurgery.rewriting.builder import Builder
from anesurgery.rewriting.edit_plan import Plan
from anesurgery.rewriting.ml_program import MLProgram
from anesurgery.rewriting.pattern import Match, OpPattern, Ops
from anesurgery.rewriting.rewrite import Rewrite
from anesurgery.surgery import Recipe, find_recipe

TARGET = "M4/macOS 15"


@dataclass(frozen=True)
class CumsumToExp(Rewrite):
    """What is off the engine comes onto it."""

    name: ClassVar[str] = "cumsum_to_exp"

    def pattern(self, op: Ops) -> OpPattern:
        return op.cumsum()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.exp(x=m.root.x)


@dataclass(frozen=True)
class TanhToExp(Rewrite):
    """One op for another that takes as long."""

    name: ClassVar[str] = "tanh_to_exp"

    def pattern(self, op: Ops) -> OpPattern:
        return op.tanh()

    def rewrite(self, mb: Builder, m: Match) -> Var:
        return mb.exp(x=m.root.x)


def sums(length: int = 512) -> Program:
    return mb.program(
        input_specs=[mb.TensorSpec((32, length, 64, 64), types.fp16)], opset_version=ct.target.iOS17
    )(lambda x: mb.tanh(x=mb.cumsum(x=mb.tanh(x=x), axis=-1), name="y"))


def log_mel() -> Program:
    """The logarithm of the mel bands of a spectrum, with an op of which no placement is known."""

    def build(x: Var) -> Var:
        basis, bands = np.ones((130, 1, 128), np.float16), np.full((20, 65), 1 / 64, np.float16)
        parts = mb.split(x=mb.identity(x=mb.conv(x=x, weight=basis, strides=[64])), num_splits=2, axis=1)
        power = mb.add(x=mb.square(x=parts[0]), y=mb.square(x=parts[1]))
        energy = mb.maximum(x=mb.matmul(x=bands, y=power), y=np.float16(1e-4))
        return mb.log(x=energy, epsilon=np.float16(0), name="y")

    specs = [mb.TensorSpec((1, 1, 4000), types.fp16)]
    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(build)


def cropped() -> Program:
    """A transposed convolution with output padding, as it is converted."""

    def build(x: Var) -> Var:
        wide = mb.conv_transpose(x=x, weight=np.ones((8, 8, 3, 3), np.float16), strides=[2, 2])
        return mb.relu(x=mb.crop(x=wide, crop_height=[1, 0], crop_width=[1, 0]), name="y")

    specs = [mb.TensorSpec((1, 8, 16, 16), types.fp16)]
    return mb.program(input_specs=specs, opset_version=ct.target.iOS17)(build)


@pytest.mark.parametrize("model", [log_mel, cropped])
def test_a_model_off_the_ane_is_not_edited_for_less_on_it(model: Callable[[], Program]) -> None:
    """The wrong version: an edit is kept for its cost or its switches, and "0 to 11% -> 0%" is its gain."""
    chosen = ane.plan(model(), "auto", target="M1")
    assert not chosen.steps
    assert chosen.gain == "nothing to gain on M1"


def decoder() -> Program:
    """A decoder of which an older engine cannot run the head."""
    weight = np.random.default_rng(0).standard_normal((30000, 64)).astype(np.float16)
    ahead = np.triu(np.full((64, 64), -1e4, np.float16), 1)

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 64), types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        shares = mb.softmax(x=mb.add(x=mb.matmul(x=x, y=x, transpose_y=True), y=ahead), axis=-1)
        return mb.linear(x=mb.matmul(x=shares, y=x), weight=weight, name="logits")

    return program


def test_a_plan_says_why_each_step_is_there_and_what_it_gains() -> None:
    plan = ane.plan(decoder(), "gpt2_ane", target="M1/macOS 14")
    assert plan.steps
    assert all(one.why for one in plan.steps)
    assert "expected time" in plan.gain or "switches" in plan.gain
    figures = plan.figures
    assert (figures["time"] or {"ratio": figures["relative cost"]})["ratio"] < 1
    assert "gpt2_ane: " in str(plan)
    assert str(plan.steps[0].step) in str(plan)


def test_a_plan_goes_to_json_and_back_and_does_the_same() -> None:
    program = decoder()
    plan = ane.plan(program, "gpt2_ane", target="M1/macOS 14")
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.to_json() == plan.to_json()
    assert str(again) == str(plan)
    first, second, direct = (
        ane.apply(program, how, target="M1/macOS 14", quiet=True) for how in (plan, again, "gpt2_ane")
    )
    assert ane.to_text(first.program) == ane.to_text(second.program) == ane.to_text(direct.program)
    assert [str(s) for s in first.steps] == [str(s) for s in direct.steps]


@pytest.mark.parametrize("text", ["", "[]", '{"format": "anesurgery.steps/0"}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(LoadError, match="plan"):
        Plan.read(tmp_path / "plan.json")


def test_the_model_is_not_edited_by_planning() -> None:
    program = decoder()
    before = ane.to_text(program)
    ane.plan(program, "auto", target="M1/macOS 14")
    assert ane.to_text(program) == before


def test_what_gains_nothing_is_not_done() -> None:
    """The wrong version: a recipe that edits since an edit loses nothing."""
    recipe = Recipe("own", (TanhToExp(),))
    done = ane.apply(sums(), recipe, target=TARGET, prove=None, quiet=True)
    assert not done.changes
    assert done.plan.gain == f"nothing to gain on {TARGET}"
    asked = ane.apply(sums(), recipe.with_options(tanh_to_exp=True), target=TARGET, prove=None, quiet=True)
    assert len(asked.changes) == 2


def test_in_a_plan_that_gains_a_step_stays_only_where_leaving_it_out_loses() -> None:
    recipe = Recipe("own", (CumsumToExp(), TanhToExp()))
    done = ane.apply(sums(), recipe, target=TARGET, prove=None, quiet=True)
    assert {change.pass_name for change in done.changes} == {"cumsum_to_exp"}
    (said,) = [refusal.reason for name, refusal in done.refusals if name == "tanh_to_exp"]
    assert said.startswith("undone: it gains nothing on this target")


def test_without_a_target_the_newest_chips_judge_and_are_named() -> None:
    old = ane.plan(decoder(), "gpt2_ane")
    assert old.steps
    assert old.gain.startswith("gains on A12 to A16 and M1 to M3 (iPhone 12, A14: expected time ")
    assert old.gain.endswith("; slower on A19 and M5 to M6")  # where Core ML would choose the CPU by its cost
    none = ane.plan(sums(), Recipe("own", (TanhToExp(),)))
    assert not none.steps
    assert none.gain == "nothing to gain on A12 to A19 and M1 to M6"


def test_without_a_target_too_a_step_stays_only_where_leaving_it_out_loses() -> None:
    plan = ane.plan(sums(), Recipe("own", (CumsumToExp(), TanhToExp())))
    assert [one.step.name for one in plan.steps] == ["cumsum_to_exp"]
    (reason,) = [refusal.reason for name, refusal in plan.left_out if name == "tanh_to_exp"]
    assert reason.startswith("undone: it gains nothing")


@pytest.mark.parametrize("target", ["M1/macOS 14", None])
def test_a_head_is_split_only_if_the_last_token_is_not_selected(target: str | None) -> None:
    chosen = {one.step.name for one in ane.plan(decoder(), "gpt2_ane", target=target).steps}
    assert chosen & {"select_last_token", "split_head"} == {"select_last_token"}
    whole = find_recipe("gpt2_ane").with_options(select_last_token=False)
    assert "split_head" in {one.step.name for one in ane.plan(decoder(), whole, target=target).steps}


def test_chips_on_which_the_model_gets_slower_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = Target.newest()
    faster = choosing._Change("expected time 2 ms -> 1 ms", is_timed=True)
    slower = choosing._Change(slower="the expected time would rise")
    said = {t: faster if i < 4 else slower for i, t in enumerate(targets)}
    said[targets[0]] = choosing._Change("relative cost 1 -> 0.5")  # the example is the first with a time
    said[targets[-1]] = choosing._Change()
    monkeypatch.setattr(choosing, "_change_on", lambda target, before, after: said[target])
    subject: Any = None
    assert choosing._on_chips(targets, subject, subject) == (
        "gains on A12 to A16 and M1 to M3 (iPhone 12, A14: expected time 2 ms -> 1 ms); "
        "nothing to gain on M6; slower on A17 to A19 and M4 to M5"
    )


def test_gains_are_two_percent_or_a_switch_or_a_load() -> None:
    aim = ane.Target.parse(TARGET)
    stands = MLProgram.read(sums()).score(aim)
    fewer = replace(stands, switches=stands.switches - 1)
    assert fewer.worth(stands) == f"switches between units {stands.switches} -> {fewer.switches}"
    assert stands.worth(stands) == ""
    assert stands.worth(replace(stands, refused="it is too new")) == "it loads, where it is too new"
    assert stands.time is not None
    little, more = (replace(stands, time=replace(stands.time, ms=stands.time.ms * by)) for by in (0.99, 0.9))
    assert little.worth(stands) == ""
    assert more.worth(stands).startswith("expected time ")


def test_the_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke
    path = ane.save(ane.load(decoder()), tmp_path / "m.mlpackage")
    shown = run(cli.app, ["plan", str(path), "gpt2_ane", "--target", "M1/macOS 14"])
    assert shown.exit_code == 0, shown.output
    assert "gpt2_ane: " in shown.output
    written = run(cli.app, ["plan", str(path), "gpt2_ane", "--target", "M1/macOS 14", "--json"])
    (tmp_path / "plan.json").write_text(written.stdout)
    out = tmp_path / "out.mlpackage"
    done = run(cli.app, ["apply", str(path), str(tmp_path / "plan.json"), str(out), "--target", "M1/macOS 14"])
    assert done.exit_code == 0, done.output
    assert ane.load(out).program.functions["main"].outputs[0].shape[1] == 1
    wrong = run(cli.app, ["apply", str(path), str(tmp_path / "plan.json"), "--set", "multiple=32", "--dry-run"])
    assert "--set is for a recipe" in str(wrong.exception)


def loud(size: float) -> dict[str, Any]:
    return {"x": np.full((2, 8), size, np.float16)}


def ninth() -> Program:
    """Nothing that is tried repairs it on large numbers."""

    return mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)])(
        lambda x: mb.mul(
            x=mb.pow(x=mb.add(x=x, y=np.float16(1)), y=np.float16(9)), y=np.float16(1e-3), name="y"
        )
    )


@pytest.mark.parametrize(("size", "status"), [(300.0, 1), (0.25, 0)])
def test_outputs_below_the_gate_are_an_exit_code(tmp_path: Path, size: float, status: int) -> None:
    path = ane.save(ane.load(ninth()), tmp_path / "m.mlpackage")
    np.savez(tmp_path / "inputs.npz", **loud(size))
    options = ["--target", "M1/macOS 14", "--inputs", str(tmp_path / "inputs.npz"), "--dry-run"]
    done = CliRunner().invoke(cli.app, ["apply", str(path), "auto", *options])
    assert done.exit_code == status, done.output
    assert ("outputs are wrong still" in " ".join(done.output.split())) == bool(status)


def test_a_gate_may_be_asked_for() -> None:
    exact = ane.plan(ninth(), "auto", target="M1/macOS 14", inputs=loud(0.25))
    assert not exact.wrong
    near = min((exact.outputs[1] or {}).values())
    asked = ane.plan(ninth(), "auto", target="M1/macOS 14", inputs=loud(0.25), gate=near + 1)
    assert asked.wrong.startswith("outputs are wrong still")


def angles() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((2, 8), dtype=types.fp16)] * 2, opset_version=ct.target.iOS17)(
        lambda x, y: mb.atan(x=mb.real_div(x=y, y=x), name="angle")
    )


@pytest.mark.filterwarnings("ignore::anesurgery.errors.SurgeryWarning")
def test_safe_numbers_takes_back_what_makes_outputs_worse() -> None:
    """The wrong version: a repair that costs 48 dB on the inputs at hand stays, with a note."""
    rng = np.random.default_rng(0)
    inputs = {name: rng.uniform(0.5, 2, (2, 8)).astype(np.float16) for name in ("x", "y")}
    done = ane.apply(angles(), "safe_numbers", target="M1/macOS 14", inputs=inputs, prove=None, quiet=True)
    before, after = done.plan.outputs
    assert before is not None
    assert after is not None
    assert all(after[name] > was - 1 for name, was in before.items())


def test_outputs_of_the_last_position_are_judged_too() -> None:
    """The wrong version: where results change nothing is known, and what is wrong is not said."""

    def read(size: float) -> Any:
        x = np.full((1, 64, 64), size, np.float16)
        return ane.plan(decoder(), "gpt2_ane", target="M1/macOS 14", inputs={"x": x})

    small, large = read(0.25), read(200.0)
    assert "select_last_token" in {one.step.name for one in small.steps}
    assert min((small.outputs[1] or {}).values()) > 60
    assert not small.wrong
    assert large.outputs[1] is not None
    assert large.wrong.startswith("outputs are wrong still"), "products of 200 overflow in fp16"


def test_of_layers_those_that_can_run_now_are_a_gain_unless_it_takes_longer() -> None:
    stands = MLProgram.read(sums()).score(ane.Target.parse(TARGET))
    layers = replace(stands, estimate=0.0, at_worst=0.0, time=None, illegal=frozenset({(0, "a"), (0, "b")}))
    freed = replace(layers, illegal=frozenset())
    assert freed.worth(layers) == "layers that cannot run on the ANE 2 -> 0"
    assert layers.worth(freed) == ""
    assert stands.time is not None
    longer = replace(stands.time, ms=2 * stands.time.ms)
    assert replace(freed, time=longer).worth(replace(layers, time=stands.time)) == ""


class OnlyInTrials(CumsumToExp):
    """Fails while steps are chosen, and works afterwards."""

    name = "only_in_trials"

    def run(self, program: Program, session: Any) -> None:
        if not session.prove_sites:
            raise PassError("not in a trial")


def test_what_could_not_be_judged_is_not_done() -> None:
    """The wrong version: where the choice fails, the steps run as if they were asked for by name."""
    with pytest.raises(PassError, match="not in a trial"):
        ane.apply(sums(), Recipe("own", (OnlyInTrials(),)), target=TARGET, quiet=True)


def test_in_a_chain_a_chunk_may_lack_what_a_recipe_looks_for(tmp_path: Path) -> None:
    chain = ane.split(ane.save(ane.load(decoder()), tmp_path / "m.mlpackage"), 2)
    assert len(chain.chunks) == 2
    plan = ane.plan(chain, "gpt2_ane", target="M1/macOS 14")
    assert [one.step.name for one in plan.steps] == ["split_head"]
    left = {name: refusal.reason for name, refusal in plan.left_out}
    assert left["gpt2_ane"].startswith("no attention was recognized")
    assert "interfaces must stay" in left["select_last_token"]
    with pytest.raises(SurgeryError, match="vit_ane is not for this model"):
        ane.plan(chain, "vit_ane")

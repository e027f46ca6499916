"""A certificate of numbers: where an error enters, what it grows to, and what a search finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil.mil import get_new_symbol
from one_layer import network

import anesurgery as ane
from anesurgery.errors import SurgeryError
from anesurgery.mil import Program, Var, ct, mb, types

HALF = np.float16


def chain(loud: str = "") -> Program:
    """Three products, and a square between them where `loud` says so."""
    rng = np.random.default_rng(0)
    weights = [(rng.standard_normal((32, 32)) / 6).astype(HALF) for _ in range(3)]

    @mb.program(input_specs=[mb.TensorSpec((4, 32), dtype=types.fp16)])
    def program(x: Var) -> Any:
        for k, weight in enumerate(weights):
            x = mb.linear(x=x, weight=weight, name=f"product_{k}")
            if loud == "root" and k == 1:
                total = mb.reduce_sum(x=mb.square(x=x, name="square"), axes=[-1], keep_dims=True, name="total")
                x = mb.real_div(x=x, y=mb.sqrt(x=mb.add(x=total, y=HALF(1e-3)), name="root"), name="normed")
            if loud == "variance" and k == 1:
                x = mb.add(x=x, y=HALF(100), name="shifted")
                first = mb.reduce_mean(x=mb.square(x=x), axes=[-1], keep_dims=True, name="first")
                mean = mb.reduce_mean(x=x, axes=[-1], keep_dims=True, name="mean")
                spread = mb.sub(x=first, y=mb.square(x=mean), name="spread")
                x = mb.real_div(x=mb.sub(x=x, y=mean), y=mb.add(x=mb.abs(x=spread), y=HALF(1)), name="scaled")
        return mb.identity(x=x, name="y")

    return program


def inputs(scale: float = 1.0) -> dict[str, Any]:
    return {"x": (np.random.default_rng(1).standard_normal((4, 32)) * scale).astype(HALF)}


def test_a_plain_model_holds() -> None:
    found = ane.certify(chain(), inputs())
    assert (found.verdict, found.ok, found.samples) == ("holds", True, 1)
    assert set(found.outputs) == {"fp16", "ane"}
    assert [row.name for row in found.rows] == ["product_0", "product_1", "product_2", "y"]
    for row in found.rows:
        assert row.grown["fp16"] <= row.own["fp16"] + 20
    assert "holds: every output agrees to" in str(found)


def test_an_overflow_fails_where_it_enters_and_names_its_repair() -> None:
    found = ane.certify(chain("root"), inputs(2000.0))
    assert found.verdict == "fails"
    rows = {row.name: row for row in found.rows}
    assert rows["square"].own["fp16"] == -np.inf  # of right operands
    assert rows["product_1"].own["fp16"] > 60
    assert rows["root"].repairs == ("scale_roots",)
    repaired = ane.apply(chain("root"), "scale_roots", quiet=True).program
    assert ane.certify(repaired, inputs(2000.0)).outputs["fp16"][0].psnr > 60


def test_what_is_carried_is_told_from_what_enters() -> None:
    """The wrong version blames the last op, whose outputs are as wrong as those before it."""
    found = ane.certify(chain("variance"), inputs())
    rows = {row.name: row for row in found.rows}
    assert found.enters[0].name == "spread"
    assert rows["product_2"].grown["fp16"] < 50 < rows["product_2"].own["fp16"]
    assert rows["spread"].repairs == ("centre_variance",)


def test_the_search_finds_worse_inputs_between_those_that_were_given() -> None:
    given = [inputs(), {"x": np.full((4, 32), 900, HALF)}, {"x": np.full((4, 32), -900, HALF)}]
    model = chain("root")
    (first, second) = (ane.certify(model, inputs(40.0), search=n, gate=30.0) for n in (0, 6))
    assert second.searched == 6
    assert second.outputs["fp16"][0].psnr <= first.outputs["fp16"][0].psnr
    assert np.abs(second.worst_inputs["x"]).max() <= np.abs(inputs(40.0)["x"]).max()
    assert ane.certify(model, given).verdict == "fails"


def test_near_the_end_of_fp16_it_is_at_risk() -> None:
    program = mb.program(input_specs=[mb.TensorSpec((2, 4), dtype=types.fp16)])(
        lambda x: mb.mul(x=x, y=HALF(2), name="y")
    )

    found = ane.certify(program, {"x": np.full((2, 4), 20000, HALF)})
    assert found.verdict == "at risk"
    assert "mul y reaches 4e+04; fp16 ends at 65504" in found.why


@pytest.mark.parametrize(("largest", "verdict"), [(3.0, "holds"), (20000.0, "at risk")])
@pytest.mark.parametrize("fill", [-3e4, -65504.0])
def test_scores_that_a_mask_takes_out_of_a_softmax_are_not_at_risk(
    fill: float, largest: float, verdict: str
) -> None:
    mask = np.where(np.tri(4, dtype=bool), 0, fill).astype(HALF)
    program = mb.program(input_specs=[mb.TensorSpec((1, 4, 4), dtype=types.fp16)])(
        lambda x: mb.softmax(x=mb.add(x=x, y=mask[None], name="masked"), axis=-1, name="y")
    )
    found = ane.certify(program, {"x": np.linspace(-1, largest, 16, dtype=HALF).reshape(1, 4, 4)})
    assert found.verdict == verdict
    assert ("add masked reaches 2e+04" in found.why) == (verdict == "at risk")


def test_it_is_plain_data() -> None:
    content = json.loads(json.dumps(ane.certify(chain("root"), inputs(2000.0)).to_json()))
    assert content["verdict"] == "fails"
    assert content["ops"][0]["op_type"] == "linear"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [([], SurgeryError, "the list of inputs is empty"), ({"z": np.ones(3)}, SurgeryError, "unknown input 'z'")],
)
def test_bad_inputs(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ane.certify(chain(), given)


def test_the_command_ends_with_1_where_it_fails(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from anesurgery.commands.app import app

    ane.save(ane.load(chain("root")), tmp_path / "m.mlpackage")
    for scale, code in ((1.0, 0), (2000.0, 1)):
        np.savez(tmp_path / "in.npz", **inputs(scale))
        words = ["certify", str(tmp_path / "m.mlpackage"), "--inputs", str(tmp_path / "in.npz")]
        words += ["--html", str(tmp_path / f"page_{code}.html"), "--worst", str(tmp_path / f"{code}.npz")]
        said = CliRunner().invoke(app, words)
        assert said.exit_code == code, said.output
        assert said.output.startswith("holds" if code == 0 else "fails")
        assert "</html>" in (tmp_path / f"page_{code}.html").read_text(encoding="utf-8")
        assert np.array_equal(np.load(tmp_path / f"{code}.npz")["x"], inputs(scale)["x"])
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 1
    assert isinstance(said.exception, SurgeryError)
    assert "exists; choose another name, or use --overwrite" in str(said.exception)


def pooled() -> Program:
    """A mean of windows beyond the end: no run of the package shows that torch meant another one."""

    @mb.program(input_specs=[mb.TensorSpec((1, 2, 7, 7), dtype=types.fp16)])
    def program(x: Var) -> Var:
        kernel = {"kernel_sizes": [2, 2], "strides": [2, 2]}
        return mb.avg_pool(x=x, **kernel, pad_type="custom", pad=[0, 0, 0, 0], ceil_mode=True, name="y")

    return program


def volume() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 3, 2, 4, 4), dtype=types.fp16)])(
        lambda x: mb.batch_norm(x=x, mean=np.zeros(3, HALF), variance=np.ones(3, HALF), name="y")
    )


def joined() -> Program:
    @mb.program(input_specs=[mb.TensorSpec((1, 800, 5, 1), dtype=types.fp16) for _ in range(2)])
    def program(x: Var, z: Var) -> Var:
        both = mb.concat(values=[x, z], axis=1)
        return mb.conv(x=both, weight=np.ones((1600, 1, 3, 1), HALF), groups=1600, name="y")

    return program


def wide() -> Program:
    return mb.program(input_specs=[mb.TensorSpec((1, 1, 8, 8), dtype=types.fp16)])(
        lambda x: mb.cast(x=mb.relu(x=x), dtype="fp32", name="y")
    )


@pytest.mark.parametrize(
    ("program", "target", "verdict", "why", "note"),
    [
        (pooled(), None, "at risk", "lost-average: the last window", ""),
        (pooled(), None, "at risk", "apply restore_meaning", ""),
        (joined(), "iPhone 13/iOS 16", "at risk", "fault-depthwise-concat: wrong on A15", ""),
        (joined(), "M4/macOS 15", "holds", "", "fault-depthwise-concat-elsewhere: reported wrong on A15"),
        (volume(), "M2/macOS 15", "holds", "", "apply replace_faulty_ops or replace it with a multiplication"),
        (wide(), "iPhone 15 Pro/iOS 18", "at risk", "", "apply interface_fp16"),
        (wide(), "M2/macOS 15", "holds", "", ""),
    ],
)
def test_what_no_run_shows_is_said(
    program: Program, target: str | None, verdict: str, why: str, note: str
) -> None:
    found = ane.certify(program, target=target)
    assert found.verdict == verdict
    assert why in found.why
    assert (note in " ".join(found.notes)) if note else verdict != "holds" or not found.notes


@pytest.mark.parametrize("centred", [False, True])
def test_the_square_of_a_norm_names_the_pass_that_holds_it(centred: bool) -> None:
    @mb.program(input_specs=[mb.TensorSpec((2, 32), dtype=types.fp16)])
    def program(x: Var) -> Var:
        n = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True)) if centred else x
        mean = mb.reduce_mean(x=mb.square(x=n, name="squares"), axes=[-1], keep_dims=True, name="mean")
        return mb.mul(x=n, y=mb.rsqrt(x=mb.add(x=mean, y=HALF(1e-3)), name="root"), name="y")

    values = (np.random.default_rng(0).standard_normal((2, 32)) * 2000).astype(HALF)
    found = ane.certify(program, {"x": values})
    rows = {row.name: row.repairs for row in found.rows}
    name = "group_norm" if centred else "rms_norm"
    assert found.verdict == "fails"
    assert rows["squares"] == (name,)
    assert name in rows["mean"], "it is infinite because of the squares"
    assert f"({name} may help)" in found.why


def test_an_error_that_no_finding_names_takes_the_repair_of_its_neighbour() -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, 8, 8)), mb.TensorSpec((1, 8, 8), dtype=types.bool)])
    def program(x: Var, seen: Var) -> Var:
        scores = mb.matmul(x=x, y=x, transpose_y=True)
        filled = mb.select(cond=seen, a=scores, b=np.float32(-1e9), name="filled")
        return mb.softmax(x=mb.cast(x=filled, dtype="fp16", name="narrow"), axis=-1, name="y")

    seen = np.ones((1, 8, 8), bool)
    seen[:, 3] = False
    values = {"x": np.random.default_rng(0).standard_normal((1, 8, 8)).astype(np.float32), "seen": seen}
    found = ane.certify(program, values)
    assert found.verdict == "fails"
    assert found.enters[0].name == "narrow"
    assert found.enters[0].repairs == ("padding_mask_tensor",)
    assert "12% not finite" in str(found)


@pytest.mark.parametrize(
    ("spike", "epsilon", "verdict", "found"),
    [(60.0, 1e-3, "at risk", True), (1.0, 1e-5, "holds", True), (60.0, 1e-7, "holds", False)],
    ids=["a spike", "none", "a small epsilon"],
)
def test_a_grown_epsilon_counts_where_rows_have_a_spike(
    spike: float, epsilon: float, verdict: str, found: bool
) -> None:
    @mb.program(input_specs=[mb.TensorSpec((4, 512))])
    def program(x: Var) -> Var:
        scale = mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True)
        normed = mb.real_div(x=x, y=scale)
        mean = mb.reduce_mean(x=mb.square(x=normed), axes=[-1], keep_dims=True)
        root = mb.sqrt(x=mb.add(x=mean, y=np.float32(epsilon)))
        return mb.real_div(x=x, y=mb.mul(x=root, y=scale), name="y")

    values = np.random.default_rng(0).standard_normal((4, 512)).clip(-1, 1).astype(np.float32) * 0.3
    values[:, 0] = spike
    assert ane.certify(program, {"x": values}).verdict == verdict
    findings = ane.inspect(program).all_findings
    assert any(f.rule == "lost-epsilon" for f in findings) == found


def test_a_grown_epsilon_over_an_unknown_length_is_found() -> None:
    @mb.program(input_specs=[mb.TensorSpec((4, get_new_symbol()))])
    def program(x: Var) -> Var:
        scale = mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True)
        mean = mb.reduce_mean(x=mb.square(x=mb.real_div(x=x, y=scale)), axes=[-1], keep_dims=True)
        root = mb.sqrt(x=mb.add(x=mean, y=np.float32(1e-7)))
        return mb.real_div(x=x, y=mb.mul(x=root, y=scale), name="y")

    (found,) = (f.message for f in ane.inspect(program).all_findings if f.rule == "lost-epsilon")
    assert found.endswith("changes a row with a spike the more, the longer it is")


def test_a_target_that_cannot_load_the_model_is_noted() -> None:
    program = mb.program(input_specs=[mb.TensorSpec((4, 32), dtype=types.fp16)], opset_version=ct.target.iOS18)(
        lambda x: mb.relu(x=x, name="y")
    )

    assert any("cannot load it" in note for note in ane.certify(program, target="M1/macOS 13").notes)
    assert not ane.certify(program, target="M1/macOS 15").notes


def test_a_neural_network_is_loaded_as_it_is(tmp_path: Path) -> None:
    """The wrong version: what the program needs that is made of it here."""
    spec = network(lambda b: b.add_activation("r", "RELU", "x", "y"), np.zeros((1, 8, 8, 8)))
    (path := tmp_path / "m.mlmodel").write_bytes(spec.SerializeToString())
    assert not ane.certify(path, target="A15/iOS 16").notes

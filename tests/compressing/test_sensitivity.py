"""What compressing each weight costs, shared out and merged, and which bits each weight gets."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery.commands import app as cli
from anesurgery.compressing.assignment import Option, Row, propose
from anesurgery.compressing.costs import Cost
from anesurgery.compressing.modes import compress, read_mode, weight_readers
from anesurgery.compressing.sensitivity import Sensitivity, sensitivity
from anesurgery.errors import SurgeryError
from anesurgery.files.sharing import Shard, share
from anesurgery.mil import Program, Var, ct, is_compressed, mb, types, walk_ops
from anesurgery.neuralnetwork.making import make_layer, make_network
from anesurgery.regions.compressed_weights import decoded
from anesurgery.regions.reencoding import stored_bytes
from anesurgery.splitting.graph import read_graph

RNG = np.random.default_rng(2)
MODES = ("palettize-2-uniform", "palettize-4-uniform", "linear-8", "prune-50")
WIDTH = 24
WEIGHTS = [
    (RNG.standard_normal((WIDTH, WIDTH)) * size).astype(np.float16) / 4 for size in (1.0, 0.02, 1.0, 0.5)
]


def layers(opset: Any = ct.target.iOS18) -> Program:
    """Layers, one of which matters little; a state that is read and written, and a loop."""

    @mb.program(
        input_specs=[mb.TensorSpec((3, WIDTH), dtype=types.fp16), mb.StateTensorSpec((3, WIDTH), types.fp16)],
        opset_version=opset,
    )
    def program(x: Var, memory: Var) -> Var:
        h = mb.relu(x=mb.linear(x=x, weight=mb.const(val=WEIGHTS[0], name="first")))
        h = mb.add(x=h, y=mb.linear(x=h, weight=mb.const(val=WEIGHTS[1], name="faint")))
        kept = mb.add(x=mb.read_state(input=memory), y=h)
        h = mb.coreml_update_state(state=memory, value=kept)
        h = mb.linear(x=h, weight=mb.const(val=WEIGHTS[2], name="third"))
        return mb.linear(x=mb.tanh(x=h), weight=mb.const(val=WEIGHTS[3], name="head"), name="logits")

    return program


DATA = [{"x": RNG.standard_normal((3, WIDTH)).astype(np.float16)} for _ in range(2)]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ane.save(ane.load(layers()), tmp_path_factory.mktemp("layers") / "layers.mlpackage")


@pytest.fixture(scope="module")
def found(package: Path) -> Sensitivity:
    return sensitivity(package, DATA, MODES, smallest=256)


def with_weight(name: str, values: Any) -> Program:
    """The whole model with other numbers in one weight."""
    program = layers()
    for op in walk_ops(program):
        for v in cast(Any, op.outputs) if op.op_type == "const" and op.name == name else ():
            v._sym_val.val = np.asarray(values, np.float16)
    return program


@pytest.mark.one_of(2)
@pytest.mark.parametrize("mode", MODES)
def test_the_cost_is_that_of_the_whole_model_with_the_weight_replaced(found: Sensitivity, mode: str) -> None:
    program = layers()
    graph = read_graph(program, 9, "main")
    readers = weight_readers(graph, 256)
    assert list(readers) == ["first", "faint", "third", "head"]
    for row in found.rows:
        made = compress(graph, row.weight, readers[row.weight], read_mode(mode), 9, 256)
        assert not isinstance(made, str)
        cost = Cost()
        for values in DATA:
            cost.add(ane.run(layers(), values), ane.run(with_weight(row.weight, made.array), values))
        option = row.options[mode]
        np.testing.assert_allclose(
            [option.psnr, option.kl, option.top1], [cost.psnr, cost.kl, cost.top1], rtol=1e-5
        )
        assert option.bytes == made.bytes < row.bytes


def test_a_weight_that_matters_little_costs_little(found: Sensitivity) -> None:
    costs = {row.weight: row.options["palettize-2-uniform"].kl for row in found.rows}
    assert costs["faint"] < 0.01 * min(costs[n] for n in ("first", "third", "head"))
    assert found.rows[0].options["palettize-2-uniform"].kl > found.rows[0].options["linear-8"].kl


def test_the_model_is_as_before_after_the_runs(package: Path) -> None:
    """The wrong version leaves a replaced weight in the plan: the next weight would be measured with it."""
    one = sensitivity(package, DATA, ("palettize-2-uniform",), smallest=256)
    both = sensitivity(package, DATA, ("prune-50", "palettize-2-uniform"), smallest=256)
    for a, b in zip(one.rows, both.rows, strict=True):
        assert a.options["palettize-2-uniform"] == b.options["palettize-2-uniform"]


def test_a_weight_that_is_joined_with_values(tmp_path: Path) -> None:
    """Places that a model learned, before those of its input: one of several values of an operand."""

    @mb.program(input_specs=[mb.TensorSpec((3, WIDTH), dtype=types.fp16)], opset_version=ct.target.iOS18)
    def program(x: Var) -> Var:
        y = mb.concat(values=[x, mb.const(val=WEIGHTS[0], name="learned")], axis=0)
        return mb.linear(x=y, weight=mb.const(val=WEIGHTS[1], name="head"), name="y")

    place = ane.save(ane.load(program), tmp_path / "joined.mlpackage")
    row = next(row for row in sensitivity(place, DATA, MODES, smallest=256).rows if row.readers == ("concat",))
    assert set(row.options) == set(MODES)
    assert row.options["palettize-2-uniform"].psnr < row.options["linear-8"].psnr < math.inf


def test_shares_merge_to_the_whole(package: Path, found: Sensitivity) -> None:
    parts = [sensitivity(package, DATA, MODES, smallest=256, shard=f"{n}/3") for n in (3, 1, 2)]
    assert [len(p.rows) for p in parts] == [1, 2, 1]
    with pytest.raises(SurgeryError, match="1 of 4 weights are measured; merge the other shares"):
        parts[0].propose(bits=4)
    read = [Sensitivity.from_json(json.loads(json.dumps(p.to_json()))) for p in parts]
    assert read[0].merge(*read[1:]).rows == found.rows
    with pytest.raises(SurgeryError, match="this is no result of `sensitivity`: OverflowError"):
        Sensitivity.from_json({**parts[0].to_json(), "samples": math.inf})
    other = sensitivity(package, DATA[:1], MODES, smallest=256, shard="1/3")
    with pytest.raises(SurgeryError, match="different models, data or modes"):
        parts[0].merge(other)


@pytest.mark.slow
def test_processes_give_what_one_gives(package: Path, found: Sensitivity) -> None:
    assert sensitivity(package, DATA, MODES, smallest=256, jobs=2).rows == found.rows


def test_a_share_of_a_share() -> None:
    work = list(range(23))
    parts = [Shard(2, 3).share(n, 4).of(work) for n in range(1, 5)]
    assert sorted(itertools.chain(*parts)) == Shard(2, 3).of(work)
    assert share((1, 2)) == share(" 1/2 ")
    for wrong in ("3", "0/2", "3/2"):
        with pytest.raises(SurgeryError, match="shard"):
            share(wrong)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("bits", [3.0, 4.5, 9.0])
def test_a_proposal_is_applied_by_coremltools(package: Path, found: Sensitivity, bits: float) -> None:
    modes = [m for m in MODES if m != "prune-50"]
    rows = tuple(
        dataclasses.replace(r, options={m: o for m, o in r.options.items() if m in modes}) for r in found.rows
    )
    proposal = dataclasses.replace(found, rows=rows).propose(bits=bits)
    assert proposal.bits <= bits
    for kind, config in proposal.configs.items():
        assert set(config.op_name_configs) == {w for w, m in proposal.modes.items() if m.startswith(kind)}
    if len(proposal.configs) > 1:
        with pytest.raises(SurgeryError, match="kinds"):
            _ = proposal.config
    weights = applied(package, proposal)
    assert sum(map(stored_bytes, weights.values())) == proposal.bytes
    assert {n for n, v in weights.items() if is_compressed(v)} == set(proposal.modes)


def applied(package: Path, proposal: Any) -> dict[str, Var]:
    """The weights of the compressed model by the name that they had, each seen to hold what was measured."""
    model = proposal.apply(package)
    linears = [op for op in walk_ops(ane.load(model).program) if op.op_type == "linear"]
    graph = read_graph(layers(), 9, "main")
    readers = weight_readers(graph, 256)
    weights = dict(zip(readers, (op.weight for op in linears), strict=True))
    for name, mode in proposal.modes.items():
        made = compress(graph, name, readers[name], read_mode(mode), 9, 256)
        assert not isinstance(made, str)
        np.testing.assert_array_equal(decoded(weights[name]), made.array)
    return weights


def test_a_weight_whose_op_has_another_name(tmp_path: Path) -> None:
    """Names that are no identifiers become `op_2_weight` for the op and `var_2_weight` for the value."""
    program = layers()
    const = next(op for op in walk_ops(program) if op.name == "third")
    const.name, const.outputs[0].name = "op_3", "var_3"
    package = ane.save(ane.load(program), tmp_path / "named.mlpackage")
    found = sensitivity(package, DATA, ("palettize-4-uniform",), smallest=256)
    assert [row.weight for row in found.rows] == ["first", "faint", "op_3", "head"]
    assert all(row.options for row in found.rows)
    proposal = found.propose(bits=4.5)
    compressed = ane.load(proposal.apply(package)).program
    linears = [op for op in walk_ops(compressed) if op.op_type == "linear"]
    assert [is_compressed(op.weight) for op in linears] == [r.weight in proposal.modes for r in found.rows]
    assert "op_3" in proposal.modes


def row(number: int, costs: dict[str, tuple[int, float]]) -> Row:
    options = {m: Option(size, 40.0 - kl, kl, 1.0) for m, (size, kl) in costs.items()}
    return Row(number, f"w{number}", ("linear",), 1000, 2000, options, {})


ROWS = (
    row(0, {"a": (250, 5.0), "b": (500, 1.0), "c": (1000, 0.1)}),
    row(1, {"a": (250, 0.02), "b": (500, 0.01), "c": (1000, 0.009)}),
    row(2, {"a": (250, 0.5), "b": (500, 0.6), "c": (1000, 0.0)}),
)


def test_the_least_damage_within_a_size() -> None:
    best = propose(ROWS, max_bytes=1500)
    assert best.modes == {"w0": "c", "w1": "a", "w2": "a"}
    assert best.bytes == 1500
    everything = min(
        (sum(r.options[m].kl for r, m in zip(ROWS, ms, strict=True)), ms)
        for ms in itertools.product("abc", repeat=3)
        if sum(r.options[m].bytes for r, m in zip(ROWS, ms, strict=True)) <= 1500
    )
    assert best.kl == pytest.approx(everything[0])


def test_the_least_size_within_a_damage() -> None:
    assert propose(ROWS, max_kl=10).modes == {"w0": "a", "w1": "a", "w2": "a"}
    found = propose(ROWS, max_kl=0.2)
    assert found.kl <= 0.2
    assert found.modes == {"w0": "c", "w1": "a", "w2": "c"}
    assert propose(ROWS, max_kl=0).modes == {"w2": "c"}
    assert propose(ROWS, min_psnr=1000).bytes == 6000


@pytest.mark.parametrize(
    ("goal", "reason"),
    [
        ({}, "give one goal"),
        ({"bits": 4, "max_kl": 1}, "give one goal"),
        ({"max_bytes": 700}, "the smallest forms measured take 750 bytes, more than 700 bytes"),
        ({"max_bytes": "few"}, "is not a size"),
    ],
)
def test_goals_that_cannot_be(goal: dict[str, Any], reason: str) -> None:
    with pytest.raises(SurgeryError, match=reason):
        propose(ROWS, **goal)


@pytest.mark.parametrize(
    "name", ["palettize-5", "linear-4-group-8", "prune-100", "kmeans", "palettize-4-group"]
)
def test_unknown_modes(name: str) -> None:
    with pytest.raises(SurgeryError, match="there is no mode"):
        read_mode(name)


def test_modes_that_an_opset_cannot_hold(package: Path) -> None:
    @mb.program(input_specs=[mb.TensorSpec((1, WIDTH))], opset_version=ct.target.iOS16)
    def old(x: Var) -> Var:
        return mb.linear(x=x, weight=WEIGHTS[0].astype(np.float32))

    with pytest.raises(SurgeryError, match="linear-4-block-8 needs iOS 18"):
        sensitivity(old, None, ("linear-4-block-8",), smallest=256)
    with pytest.raises(SurgeryError, match="there is no data"):
        sensitivity(package, [], MODES)


def test_probabilities_are_not_taken_for_logits() -> None:
    logits = RNG.standard_normal((4, 9))
    other = logits + 0.3 * RNG.standard_normal((4, 9))
    p, q = (np.exp(v) / np.exp(v).sum(-1, keepdims=True) for v in (logits, other))
    one, two = Cost(), Cost()
    one.add({"y": logits}, {"y": other})
    two.add({"y": p}, {"y": q})
    assert one.kl == pytest.approx(two.kl)
    assert one.kl == pytest.approx(float((p * np.log(p / q)).sum(-1).mean()))
    broken = Cost()
    broken.add({"y": logits}, {"y": np.full_like(logits, np.nan)})
    assert (broken.kl, broken.psnr) == (np.inf, -np.inf)


def test_outputs_without_floats_are_not_called_identical() -> None:
    cost = Cost()
    cost.add({"token": np.array([1, 2])}, {"token": np.array([5, 6])})
    assert cost.words(True) == "no output of floats to compare"


def test_finite_outputs_of_one_column_are_not_called_infinite() -> None:
    """The wrong version takes outputs without rows, as depth maps have none, for infinite ones."""
    numbers = np.arange(1.0, 5.0)[:, None]
    depth, masked = Cost(), Cost()
    depth.add({"y": numbers}, {"y": numbers + 0.004})
    masked.add({"y": np.append(numbers, [[np.inf]], 0)}, {"y": np.append(numbers + 0.004, [[np.inf]], 0)})
    for chooses in (False, True):
        assert depth.words(chooses) == "PSNR 60.0 dB"
        assert masked.words(chooses) == "infinite numbers are left out, PSNR 60.0 dB"


def test_logits_far_apart_have_the_divergence_of_their_likeliest_entries() -> None:
    """Softmax of such rows underflows to 0, whose logarithm is infinite: 0 times it must not become NaN."""
    cost = Cost()
    cost.add(
        {"y": np.array([[-3e38, 0.0, 3e38], [0.0, -1e4, -1e4]])}, {"y": np.array([[0.0] * 3, [0.0, 0, -1e4]])}
    )
    assert cost.kl == pytest.approx((np.log(3) + np.log(2)) / 2)


def test_a_weight_in_a_loop_is_left_out_and_others_are_replaced_there_too() -> None:
    """`first` is read in a loop: it is no candidate; a weight before the loop is measured through it."""

    @mb.program(input_specs=[mb.TensorSpec((1, WIDTH))], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        before = mb.linear(x=x, weight=mb.const(val=WEIGHTS[0].astype(np.float32), name="before"))

        def step(i: Var, h: Var) -> tuple[Var, Var]:
            inside = mb.const(val=WEIGHTS[2].astype(np.float32), name="inside")
            return mb.add(x=i, y=1), mb.tanh(x=mb.linear(x=h, weight=inside))

        made = mb.while_loop(_cond=lambda i, h: mb.less(x=i, y=2), _body=step, loop_vars=(0, before))
        return mb.identity(x=made[1], name="y")

    found = sensitivity(program, None, ("palettize-4-uniform",), smallest=256)
    assert [row.weight for row in found.rows] == ["before"]
    assert found.rows[0].options["palettize-4-uniform"].psnr < 60


@pytest.mark.slow
def test_the_commands(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "x.npz"
    np.savez(data, x=DATA[0]["x"])

    def call(*words: object) -> Any:
        return CliRunner().invoke(cli.app, list(map(str, words)), catch_exceptions=False)

    flags = ["--inputs", data, "--mode", "palettize-4-uniform", "--mode", "linear-8", "--smallest", 256]
    parts = []
    for number in (1, 2):
        parts.append(tmp_path / f"{number}.json")
        made = call("sensitivity", package, *flags, "--shard", f"{number}/2", "--save", parts[-1])
        assert made.exit_code == 0, made.output
    merged = json.loads(call("sensitivity", "--merge", parts[0], "--merge", parts[1], "--json").output)
    assert merged["total"] == len(merged["weights"]) == 4
    small = tmp_path / "small.mlpackage"
    goal = call("sensitivity", package, *flags, "--bits", 6, "-o", small, "--json")
    assert goal.exit_code == 0, goal.output
    assert json.loads(goal.output)["proposal"]["bits"] <= 6
    assert any(op.op_type.startswith("constexpr_") for op in walk_ops(ane.load(small).program))
    with pytest.raises(SurgeryError, match="give a model to measure"):
        call("sensitivity")
    with pytest.raises(SurgeryError, match="--out needs the model and a goal"):
        call("sensitivity", package, "-o", tmp_path / "small.mlpackage")
    shown = call("ranges", package, "--inputs", data, "--shard", "1/1", "--json")
    (tmp_path / "ranges.json").write_text(shown.output)
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell expands no ~ after "="
    again = call("ranges", "--merge=~/ranges.json", "--json")
    assert json.loads(again.output) == json.loads(shown.output)


@pytest.mark.parametrize("seed", range(20))
def test_no_choice_within_a_size_is_better(seed: int) -> None:
    """Against all choices; steps by damage for a byte leave room where weights are of very different sizes."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(4):
        sizes = np.sort(rng.integers(1, 400, 3)) * int(rng.choice([1, 10]))
        costs = np.sort(rng.uniform(0, 1, 3))[::-1]
        rows.append(row(number, {m: (int(b), float(c)) for m, b, c in zip("abc", sizes, costs, strict=True)}))
    smallest = sum(r.options["a"].bytes for r in rows)
    budget = int(smallest * rng.uniform(1, 3))
    listed = itertools.product(
        *([*((o.bytes, o.kl) for o in r.options.values()), (r.bytes, 0.0)] for r in rows)
    )
    least = min(sum(c for _, c in one) for one in listed if sum(b for b, _ in one) <= budget)
    proposal = propose(rows, max_bytes=budget)
    assert proposal.bytes <= budget
    assert proposal.kl == pytest.approx(least, rel=1e-9)


def test_sampled_inputs_have_lengths_that_the_model_allows(tmp_path: Path) -> None:
    """The wrong version: each length that may vary is 4, also where the least is 8."""
    weights = {"floatValue": RNG.standard_normal(16 * 8)}
    sizes: dict[str, Any] = {"outputChannels": 16, "kernelChannels": 8, "kernelSize": [1, 1], "valid": {}}
    layer = make_layer("convolution", ["x"], ["y"], weights=weights, **sizes)
    spec = make_network({"x": (1, 8, 16, 16)}, [layer], ["y"])
    ranges = spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges
    for low, high in ((1, 1), (8, 8), (8, 32), (8, 32)):
        ranges.add(lowerBound=low, upperBound=high)
    path = tmp_path / "flexible.mlmodel"
    path.write_bytes(spec.SerializeToString())
    assert sensitivity(path, modes=("linear-8",), smallest=1).samples == 1
    assert ane.first_divergence(path, path) is None

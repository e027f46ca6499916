"""Models as graphs for Model Explorer: nodes, edges, groups and the values that overlays show."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from compiled_models import compile_package

import anesurgery as ane
from anesurgery.explorer.model_graphs import COLOURS, TEXT, function_of_graph, graph_id, graphs, values
from anesurgery.explorer.side_by_side import panes
from anesurgery.mil import Program, Var, mb, types, walk_ops


def program() -> Program:
    """x is read twice, by one op of two outputs too, and one op computes in integers, on the CPU."""

    @mb.program(input_specs=[mb.TensorSpec((1, 8), dtype=types.fp16)])
    def made(x: Var) -> Var:
        first, second = mb.split(x=x, num_splits=2, axis=1, name="halves")
        whole = mb.cast(x=mb.add(x=first, y=second, name="sum"), dtype="int32", name="whole")
        return mb.cast(x=mb.add(x=whole, y=np.int32(2), name="more"), dtype="fp16", name="y")

    return made


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ane.save(ane.load(program()), tmp_path_factory.mktemp("explorer") / "model.mlpackage")


def test_each_op_is_a_node_and_each_value_an_edge(package: Path) -> None:
    (nodes,) = graphs(package).values()
    assert [node.label for node in nodes] == ["input", "split", "add", "cast", "add", "cast"]
    halves, total = nodes[1], nodes[2]
    assert halves.reads == (("x", "0", "x"),)
    assert total.reads == ((halves.name, "0", "x"), (halves.name, "1", "y"))
    (split,) = (op for op in walk_ops(ane.load(package).program) if op.op_type == "split")
    assert [name for name, _ in halves.gives] == [var.name for var in split.outputs]
    assert len({node.name for node in nodes}) == len(nodes)
    known = {node.name for node in nodes}
    assert all(source in known for node in nodes for source, _, _ in node.reads)


def test_networks_and_compiled_models_are_opened_too(package: Path, tmp_path: Path) -> None:
    compiled = tmp_path / "model.mlmodelc"
    compile_package(package, compiled)
    assert [n.label for n in graphs(compiled)["main"]] == [n.label for n in graphs(package)["main"]]
    assert len(graphs(ane.example("network", tmp_path / "network.mlmodel"))["main"]) > 1


def test_ops_without_scopes_are_grouped_by_segment(package: Path) -> None:
    (nodes,) = graphs(package).values()
    rows = {row.name: row for row in ane.inspect(package).ops}
    for node in nodes[1:]:
        assert node.group.startswith(f"segment {rows[node.name].segment} on ")
        assert "op" in node.facts


def test_scopes_of_modules_are_groups() -> None:
    made = program()
    for op in made.functions["main"].operations:
        op.scopes["ScopeSource.TORCHSCRIPT_MODULE_NAME"] = ["model", "layers/0"]
    (nodes,) = graphs(made).values()
    assert {node.group for node in nodes[1:]} == {"model/layers_0"}


def test_overlays_say_what_inspect_says(package: Path) -> None:
    report = ane.inspect(package)
    units = values(report, "units")
    assert set(units) == {row.name for row in report.ops}
    assert {unit for unit, _ in units.values()} <= set(COLOURS)
    found = values(report, "findings")
    assert {name: len(row.findings) for row in report.ops if row.findings for name in [row.name]} == {
        name: count for name, (count, _) in found.items()
    }
    assert set(values(report, "time")) == {row.name for row in report.ops if row.ms is not None}


def test_graphs_of_two_files_have_names_of_their_own() -> None:
    names = [graph_id(f"some/{name}.mlpackage", "main") for name in ("before", "after")]
    assert names == ["before: main", "after: main"]
    assert {function_of_graph(name) for name in (*names, "main", "after: main (1)")} == {"main"}
    assert function_of_graph("a: b: prefill") == "prefill"


def test_two_models_are_shown_beside_each_other(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, other := tmp_path / "after.mlpackage")
    shutil.copytree(package, same := tmp_path / "model.mlpackage")
    shown = panes(package, other)
    assert [Path(model["url"]) for model in shown["models"]] == [package, other]
    states = shown["uiState"]["paneStates"]
    assert [s["selectedGraphId"] for s in states] == ["model: main", "after: main"]
    assert [s["selectedCollectionLabel"] for s in states] == ["model.mlpackage", "after.mlpackage"]
    assert [s["selectedGraphId"] for s in panes(package, same)["uiState"]["paneStates"]] == [
        "model: main",
        "model: main (1)",
    ]


def test_words_are_read_on_every_colour() -> None:
    for colour in COLOURS.values():
        assert contrast(colour, TEXT) > 10


def contrast(a: str, b: str) -> float:
    """The ratio of two colours' luminances, by WCAG."""
    low, high = sorted(map(luminance, (a, b)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

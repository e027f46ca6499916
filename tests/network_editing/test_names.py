"""Names of inputs and outputs survive each call that writes a model; what no ML Program has is declared."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anesurgery as ane
from anesurgery.errors import SurgeryWarning
from anesurgery.files.package import locate, read_spec
from anesurgery.mil import Var, ct, mb, types
from anesurgery.network_editing.upgrade import NOTES
from anesurgery.neuralnetwork.making import make_layer, make_network

PAIRS = [("82", "x.1"), ("x.1", "82"), ("a/b", "größe"), ("日本", "a b")]
ALLOWED = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
X = np.ones((1, 2, 4, 4), np.float32)


def network(at: Path, given: str, made: str) -> Path:
    layers = [
        make_layer("unary", [given], ["between"], type="EXP"),
        make_layer("unary", ["between"], [made], type="INVERSE"),
    ]
    path = at / "network.mlmodel"
    path.write_bytes(make_network({given: X.shape}, layers, [made]).SerializeToString())
    return path


def package(at: Path, given: str, made: str) -> Path:
    """An ML Program with such names, which coremltools does not write."""

    @mb.program(input_specs=[mb.TensorSpec(X.shape, dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Var) -> Var:
        return mb.exp(x=mb.tanh(x=x), name="y")

    path = ane.save(ane.load(program), at / "program.mlpackage")
    file = locate(path)[0]
    spec, new = read_spec(file), {"x": given, "y": made}
    for feature in (*spec.description.input, *spec.description.output):
        feature.name = new[feature.name]
    function = spec.mlProgram.functions["main"]
    block = function.block_specializations[function.opset]
    bindings = [a for op in block.operations for i in op.inputs.values() for a in i.arguments]
    for named in (*function.inputs, *(v for op in block.operations for v in op.outputs), *bindings):
        if named.name in new:
            named.name = new[named.name]
    block.outputs[:] = [made]
    file.write_bytes(spec.SerializeToString())
    return path


def names_of(spec: Any) -> tuple[str, str]:
    ends = spec.description.functions[0] if spec.description.functions else spec.description
    return ends.input[0].name, ends.output[0].name


SAVED: dict[str, Callable[[Path, Path], Any]] = {
    "apply": lambda path, at: ane.apply(path, "interface_fp16", quiet=True).save(at / "new.mlpackage"),
    "upgrade": lambda path, at: ane.upgrade(path).save(str(at / "new.mlpackage")),
    "save": lambda path, at: ane.save(ane.load(path), at / "new.mlpackage"),
    "merge": lambda path, at: ane.merge({"one": path, "two": path}, at / "new.mlpackage"),
    "extract": lambda path, at: ane.extract(path, "main", at / "new.mlpackage"),
}


@pytest.mark.parametrize("how", SAVED)
@pytest.mark.parametrize("names", PAIRS, ids=str)
def test_names_of_an_ml_program_survive(names: tuple[str, str], how: str, tmp_path: Path) -> None:
    SAVED[how](package(tmp_path, *names), tmp_path)
    assert names_of(ane.load(tmp_path / "new.mlpackage").spec) == names


@pytest.mark.parametrize("names", PAIRS, ids=str)
def test_names_of_chunks_survive(names: tuple[str, str], tmp_path: Path) -> None:
    assert names_of(ane.split(package(tmp_path, *names), 2).spec) == names


@pytest.mark.parametrize("names", PAIRS, ids=str)
def test_names_of_layers_survive(names: tuple[str, str], tmp_path: Path) -> None:
    surgery = ane.apply(network(tmp_path, *names), "neuralnetwork_ane", quiet=True)
    assert names_of(surgery.model.get_spec()) == names


@pytest.mark.parametrize("names", PAIRS, ids=str)
def test_a_name_that_no_ml_program_has_is_declared(names: tuple[str, str], tmp_path: Path) -> None:
    path = network(tmp_path, *names)
    with pytest.warns(SurgeryWarning, match="the interface changes; give and read the new names") as caught:
        spec = ane.upgrade(path).get_spec()
    new = names_of(spec)
    (before,) = ane.run(path, {names[0]: X}).values()
    (after,) = ane.run(ane.upgrade(path, precision="fp32"), {new[0]: X}).values()
    np.testing.assert_array_equal(before, after)
    for old, name in zip(names, new, strict=True):
        assert ALLOWED.fullmatch(name)
        said = f"{old!r} is called {name!r}: MIL takes identifiers only"
        assert said in str(caught[0].message)
        assert said in spec.description.metadata.userDefined[NOTES]


def test_a_pass_that_makes_a_program_of_a_network_declares_it_too(tmp_path: Path) -> None:
    with pytest.warns(SurgeryWarning, match=r"'82' is called '_82'.*'x.1' is called 'x_1'"):
        surgery = ane.apply(network(tmp_path, "82", "x.1"), "compute_fp16", quiet=True)
    assert "'82' is called '_82': MIL takes identifiers only" in surgery.notes


PROGRAMS: dict[str, Callable[[Path, Path], Any]] = {
    "split": lambda path, at: ane.split(path, 2, compare=False),
    "merge": lambda path, at: ane.merge({"one": path, "two": path}, at / "new.mlpackage"),
    "extract": lambda path, at: ane.extract(path, "main", at / "new.mlpackage"),
    "save": lambda path, at: ane.save(ane.load(path), at / "new.mlpackage"),
}


@pytest.mark.parametrize("how", PROGRAMS)
def test_whatever_writes_a_program_of_a_network_declares_it(how: str, tmp_path: Path) -> None:
    with pytest.warns(SurgeryWarning, match=r"'82' is called '_82'.*'x.1' is called 'x_1'"):
        PROGRAMS[how](network(tmp_path, "82", "x.1"), tmp_path)


def test_names_that_may_stay_do_without_a_word(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    assert names_of(ane.upgrade(network(tmp_path, "for", "_82")).get_spec()) == ("for", "_82")
    assert not [w for w in recwarn if w.category is SurgeryWarning]

"""Programs of ExecuTorch: their Core ML parts are listed, extracted and inspected; damage is said in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from executorch_files import INLINE, Call, flattened, program

import anesurgery as ane
from anesurgery.errors import LoadError
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Program, mb

COREML, OTHER = "CoreMLBackend", "XnnpackBackend"
Nodes = list[dict[str, Any]]


def scaled(by: float) -> Program:
    """One op with a stored weight."""
    weight = np.eye(8, dtype=np.float32) * by

    return mb.program(input_specs=[mb.TensorSpec((1, 8))])(lambda x: mb.linear(x=x, weight=weight, name="y"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two parts as Core ML's backend writes them, before they are made into bytes."""
    made = []
    for by in (2.0, 3.0):
        folder = tmp_path_factory.mktemp("part")
        save(load(scaled(by)), folder / "model.mlpackage")
        (folder / "metadata.json").write_text('{"identifier": "größe"}', encoding="utf-8")
        made.append(folder)
    return made


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.pte"
    path.write_bytes(content)
    return path


def scale(model: Path) -> float:
    x = np.ones((1, 8), np.float32)
    return float(ane.run(model, {"x": x}, precision="fp32")["y"][0, 0])


def test_parts_are_listed_and_extracted(folders: list[Path], tmp_path: Path) -> None:
    calls = [Call(COREML, 0), Call(OTHER, 1), Call(COREML, 2)]
    content = program({"forward": calls}, [flattened(folders[0]), b"other", flattened(folders[1])])
    found = ane.executorch(path := written(tmp_path, content))
    assert [m.delegates for m in found.methods] == [(COREML, OTHER, COREML)]
    assert found.methods[0].operators == ("aten::add.out",)
    assert "2 Core ML parts" in str(found)
    assert json.dumps(found.to_json())
    models = found.extract(tmp_path / "parts")
    assert [scale(model) for model in models] == [2.0, 3.0]
    for model, folder in zip(models, folders, strict=True):
        for file in filter(Path.is_file, folder.rglob("*")):
            assert (model.parent / file.relative_to(folder)).read_bytes() == file.read_bytes()
    assert path.read_bytes() == content
    with pytest.raises(LoadError, match="exists"):
        found.extract(tmp_path / "parts")
    assert found.extract(tmp_path / "parts", overwrite=True) == models


def test_a_part_that_methods_share_is_there_once(folders: list[Path], tmp_path: Path) -> None:
    reference = b"CMJR" + json.dumps({"version": 1, "key": "coreml_x"}).encode()
    content = program(
        {"prefill": [Call(COREML, 0, INLINE)], "decode": [Call(COREML, 1, INLINE)]},
        [flattened(folders[0])],
        [reference, reference],
        {"coreml_x": 0},
    )
    (part,) = ane.executorch(written(tmp_path, content)).parts
    assert part.methods == ("prefill", "decode")


def test_one_part_is_inspected_where_it_lies(folders: list[Path], tmp_path: Path) -> None:
    path = written(tmp_path, program({"forward": [Call(COREML, 0, INLINE)]}, inline=[flattened(folders[1])]))
    assert [row.op_type for row in ane.inspect(path).ops] == ["linear"]
    assert scale(path) == 3.0
    assert ane.inspect(path).model == str(path)


def test_several_parts_are_named_where_one_is_needed(folders: list[Path], tmp_path: Path) -> None:
    content = program({"forward": [Call(COREML, 0), Call(COREML, 1)]}, [*map(flattened, folders)])
    with pytest.raises(LoadError, match=r"has 2 Core ML parts: part_1 \(forward\).*--out parts"):
        ane.inspect(written(tmp_path, content))


def test_a_program_without_parts_says_what_it_calls(tmp_path: Path) -> None:
    path = written(tmp_path, program({"forward": [Call(OTHER, 0)]}, [b"bytes"]))
    assert ane.executorch(path).parts == ()
    with pytest.raises(LoadError, match="no part for Core ML; forward: delegates: 1 XnnpackBackend"):
        ane.executorch(path).extract(tmp_path / "parts")
    with pytest.raises(LoadError, match="0 Core ML parts: none"):
        ane.load(path)


def renamed(name: str) -> Callable[[Nodes], None]:
    def edit(nodes: Nodes) -> None:
        nodes[-1]["children"] = {name: 0}

    return edit


def circle(nodes: Nodes) -> None:
    nodes[-1]["children"] = {"model.mlpackage": len(nodes) - 1}


def huge(nodes: Nodes) -> None:
    nodes[0]["dataRegion"]["size"] = 1 << 60


def before(nodes: Nodes) -> None:
    next(n for n in nodes if not n["kind"])["dataRegion"]["offset"] = -4


def many_times(nodes: Nodes) -> None:
    file = next(n for n in nodes if not n["kind"] and n["dataRegion"]["size"] > 100)
    root = nodes.pop()
    root["children"] |= {f"copy{i}": len(nodes) + i for i in range(1000)}
    nodes += [dict(file, children={}) for _ in range(1000)]
    nodes.append(root)


def nowhere(nodes: Nodes) -> None:
    nodes[-1]["children"]["x"] = 10**6


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (renamed("../../../etc"), "leads out of it; do not trust it"),
        (renamed(".."), "leads out of it"),
        (renamed("a\\b"), "leads out of it"),
        (renamed("model.txt"), "one model is expected"),
        (circle, "which cannot be"),
        (nowhere, "which cannot be"),
        (huge, "more bytes than"),
        (before, "bytes at -4"),
        (many_times, "more bytes than"),
        (lambda nodes: nodes.clear(), "lists no files"),
        (lambda nodes: nodes[0].pop("kind"), "damaged"),
    ],
)
def test_a_malicious_part_is_refused(
    edit: Callable[[Nodes], None], said: str, folders: list[Path], tmp_path: Path
) -> None:
    content = program({"forward": [Call(COREML, 0)]}, [flattened(folders[0], edit)])
    with pytest.raises(LoadError, match=said):
        ane.executorch(written(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"PK\3\4 something else", "no program of ExecuTorch"),
        (b"\xff\xff\xff\x7fET12", "damaged: 4 bytes at"),
        (program({"forward": [Call(COREML, 5)]}, [b"x"]), "damaged"),
        (program({"forward": [Call(COREML, 0)]}, [b"not a list"]), "damaged"),
        (program({"forward": [Call(COREML, 0, INLINE)]}, inline=[b'CMJR{"key": "k"}']), "stored as 'k'"),
    ],
)
def test_a_damaged_file_is_refused(content: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=said):
        ane.executorch(written(tmp_path, content))


def test_no_cut_file_ends_in_another_error(folders: list[Path], tmp_path: Path) -> None:
    content = program({"forward": [Call(COREML, 0)]}, [flattened(folders[0])])
    last = len(content.rstrip(b"\0"))
    for cut in (*range(1, 400, 7), *range(400, last, 97)):
        with pytest.raises(LoadError):
            ane.executorch(written(tmp_path, content[:cut]))

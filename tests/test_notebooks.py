"""The notebooks and the demonstration run, and say what they should."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = json.dumps([cell.get("outputs", []) for cell in notebook.cells])
    assert "1 edit: 1 bit for bit" in outputs
    assert "skipped: square_to_mul: %a has rank 1 (at left)" in outputs


def test_notebooks_are_stored_without_outputs() -> None:
    for path in NOTEBOOKS.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert not any(cell.get("outputs") for cell in cells)


def test_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    spec = importlib.util.spec_from_file_location("demo", NOTEBOOKS / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.setattr(demo, "BUILD", demo.ROOT / "build" / "test-demo")
    monkeypatch.setattr(demo, "STEPS", 20)
    monkeypatch.setattr("sys.argv", ["demo"])
    demo.main()
    out = capsys.readouterr().out
    before, after = out.split("before:\n")[1].split("\n\nafter:\n")
    assert before == after.split("\n\nbefore: an estimated")[0]
    assert "inspect build/test-demo/gpt2.mlpackage" in out
    report = json.loads((demo.BUILD / "report.json").read_text(encoding="utf-8"))
    assert report["proof"]["ok"]
    assert report["edits"]["causal_mask_tensor"] == 3
    assert (demo.BUILD / "gpt2_ane.mlpackage").is_dir()

"""The notebooks and the demonstration run, and say what they should."""

from __future__ import annotations

import html
import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from children import HUNG
from nbclient import NotebookClient

from anesurgery.coreai import toolkit

pytestmark = pytest.mark.first

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SAID = {
    "against_torch": ["part in 2 (Summary)", "package and PyTorch agree"],
    "core_ai": ["fixed.mlpackage and fixed.aimodel agree True", "identical", "True coreai"],
    "see_fix_prove": ["14.9 ms -> 1.89 ms", "select_last_token", "not proved, but checked (90 bit for bit"],
    "own_pass": ["1 edit: 1 proved", "the exponent is 0.5, not 2 to 3", "power_to_product_wrong"],
    "divergence": ["first diverging op: mul scaled", "ratio 0.980", "not proved", "5 bit for bit"],
    "old_mlmodel": ["legacy_concat", "ok: the outputs agree to"],
    "vision": ["reflect_pad_slices", "after"],
    "gpt2": ["causal_mask_tensor", "embedding_matmul"],
    "whisper": ["encoder:", "decoder:"],
    "families": ["layout: channels first, head by head", "by evidence -> "],
    "llama_cache": ["the same 53 tokens from both", "cache_0"],
    "characters": ["Beautiful is better than ugly", "gate 60 dB", "['ids', 'position', 'cache_0']"],
}
"""Notebook -> what its outputs hold."""
LONG = ("gpt2", "vision", "whisper", "characters", "llama_cache", "families")
"""They convert a model of PyTorch."""


TRAINED = ("characters", "against_torch")
"""What these print depends on how a processor rounds, which differs: they are compared in words only."""


def marked(path: Path) -> Any:
    return pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else [])


def text_of(notebook: Any) -> str:
    """All that the cells gave."""
    return json.dumps([cell.get("outputs", []) for cell in notebook.cells], ensure_ascii=False)


def printed(notebook: Any) -> list[str]:
    """What each code cell prints and shows as text; pictures have their own text beside them."""
    return [
        "".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


NUMBER = re.compile(r"(-?\d+(?:\.\d+)?e[+-]?\d+|-?\d+\.\d+|\d+(?= dB))")


def near(stored: str, fresh: str) -> bool:
    """Two numbers as they are printed; those with an exponent are sizes of what rounding does."""
    return math.isclose(float(stored), float(fresh), rel_tol=0.5 if "e" in stored else 0.01)


def agree(stored: str, fresh: str) -> bool:
    """The same words and whole numbers; other numbers may differ by the rounding of another processor."""
    ours, theirs = NUMBER.split(stored), NUMBER.split(fresh)
    return ours[::2] == theirs[::2] and all(map(near, ours[1::2], theirs[1::2]))


def differing(stored: Any, fresh: Any) -> list[tuple[str, str]]:
    """What cells of a stored notebook show, and what they show in a run, where the two differ."""
    return [pair for pair in zip(printed(stored), printed(fresh), strict=True) if not agree(*pair)]


@pytest.mark.slow
@pytest.mark.parametrize("path", [marked(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))])
def test_notebooks_run(path: Path) -> None:
    if path.stem == "core_ai" and toolkit.ABSENT:
        pytest.skip(f"it writes Core AI models: {toolkit.ABSENT}")
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=HUNG, kernel_name="python3").execute()
    assert [words for words in SAID[path.stem] if words not in text_of(notebook)] == []
    if path.stem not in TRAINED:
        assert differing(nbformat.read(path, as_version=4), notebook) == []


def test_another_number_in_a_notebook_is_noticed() -> None:
    cell = nbformat.v4.new_code_cell("1 / 3", outputs=[nbformat.v4.new_output("stream", text="0.333\n")])
    other = nbformat.v4.new_code_cell("1 / 3", outputs=[nbformat.v4.new_output("stream", text="0.334\n")])
    stored, fresh = nbformat.v4.new_notebook(cells=[cell]), nbformat.v4.new_notebook(cells=[other])
    assert differing(stored, stored) == []
    assert differing(stored, fresh) == []
    cell.outputs[0].text = "0.444\n"
    assert differing(stored, fresh) == [("0.444\n", "0.334\n")]
    assert not agree("12 edits", "13 edits")
    assert not agree("a 0.5", "b 0.5")
    assert not agree("2e-05", "9e-05")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_are_stored_with_outputs_of_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    text = text_of(notebook)
    assert [words for words in SAID[path.stem] if words not in text] == []
    assert not re.search(r"/(home|root|work|Users|tmp|usr)/", text)
    assert '"output_type": "error"' not in text
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run in order, from a fresh start: make notebooks"


def test_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    spec = importlib.util.spec_from_file_location("demo", NOTEBOOKS / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    monkeypatch.setattr(demo, "BUILD", demo.ROOT / "build" / "test-demo")
    picture = tmp_path / "report.svg"
    monkeypatch.setattr("sys.argv", ["demo", "--svg", str(picture)])
    demo.main()
    out = capsys.readouterr().out
    screen = " ".join(" ".join(out.splitlines()[:20]).split())
    assert re.search(
        r"On iPhone 13 \(A15\): [\d.]+ ms -> [\d.]+ ms by estimate, about [\d.]+ times as fast", screen
    )
    assert "outputs agree to" in screen
    assert "see build/test-demo/gpt2.mlpackage" in out
    report = json.loads((demo.BUILD / "report.json").read_text(encoding="utf-8"))
    assert report["proof"]["ok"]
    assert report["edits"]["select_last_token"] == 1
    assert (demo.BUILD / "gpt2_ane.mlpackage").is_dir()
    assert drawn(picture) == drawn(NOTEBOOKS / "report.svg"), "make notebooks"


def drawn(picture: Path) -> str:
    """The words of a picture of the report, without what the vector width of a processor may change."""
    pieces = re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text(encoding="utf-8"))
    return re.sub(r"\d+ dB", "N dB", html.unescape("".join(pieces)).replace("\xa0", " "))


def test_an_older_picture_is_noticed(tmp_path: Path) -> None:
    older = tmp_path / "older.svg"
    text = (NOTEBOOKS / "report.svg").read_text(encoding="utf-8")
    older.write_text(text.replace("likely", "between", 1), encoding="utf-8")
    assert drawn(older) != drawn(NOTEBOOKS / "report.svg")

"""The snippets of the README and of docs/ run as written, in order, in a folder with the models they name."""

from __future__ import annotations

import io
import itertools
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import save_checkpoint
from compiled_models import compile_package
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery import registry
from anesurgery.commands.app import app
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, types
from anesurgery.neuralnetwork.making import make_layer, make_network, weights

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)")
WIDTH, WORDS, LENGTH = 16, 96, 8
BAD_INPUT = 64
MADE_BEFORE = {"inspect.md": ["gpt2_ane.mlpackage"], "tutorial.md": ["network.mlpackage"]}
"""Page -> the packages that its Python snippets write and its commands read."""
EXPLAINED = {"Builder", "Match", "OpPattern", "Ops", "Pass", "Refusal"}
"""Names that the example of `Rewrite` shows."""
MEANT = {
    "AgainstTorch",
    "Build",
    "Certificate",
    "Compression",
    "SizedModel",
    "Inspection",
    "Picture",
    "Surgery",
    "Comparison",
    "Recipe",
}
"""Classes of results: their example shows what gives them."""


def language_model(length: int = LENGTH, opset: Any = ct.target.iOS16) -> Program:
    """A causal attention with a token table, as converters write it."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((WORDS, WIDTH)).astype(np.float16)
    keep = np.tril(np.ones((1, length, length), bool))

    @mb.program(input_specs=[mb.TensorSpec((1, length), dtype=types.int32)], opset_version=opset)
    def program(ids: Var) -> Var:
        x = mb.gather(x=table, indices=ids, axis=0, name="embedded")
        scores = mb.matmul(x=x, y=x, transpose_y=True, name="scores")
        masked = mb.select(cond=keep, a=scores, b=np.float16(-np.inf), name="masked")
        mixed = mb.matmul(x=mb.softmax(x=masked, axis=-1, name="weights"), y=x, name="mixed")
        made: Var = mb.linear(x=mixed, weight=table, name="logits")
        return made

    function = program.functions["main"]
    function._input_dict["ids"] = function._input_dict.pop(next(iter(function.inputs)))
    function.inputs["ids"].name = "ids"
    return program


def old_network() -> Any:
    """A network of the older format with a layer that came with iOS 13."""
    constant = np.arange(4, dtype=np.float32)
    layers = [
        make_layer("loadConstantND", [], ["c"], shape=[4], data=weights(constant)),
        make_layer("addBroadcastable", ["x", "c"], ["y"]),
    ]
    return make_network({"x": (2, 4)}, layers, ["y"])


def custom_network() -> Any:
    """A custom layer between two that the ANE can run."""
    layers = [
        make_layer("activation", ["x"], ["a"]),
        make_layer("custom", ["a"], ["features"], className="Mine"),
    ]
    layers.append(make_layer("activation", ["features"], ["y"]))
    for layer in (layers[0], layers[2]):
        layer.activation.ReLU.SetInParent()
    return make_network({"x": (1, 8, 4, 4)}, layers, ["y"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Hugging Face."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, but for the models and arrays that the pages name; passes they register go again."""
    known = registry.pass_names()
    for name in ("gpt2", "other"):
        save(load(language_model()), tmp_path / f"{name}.mlpackage")
    save(load(language_model(16, ct.target.iOS18)), tmp_path / "decoder.mlpackage")
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    compile_package(tmp_path / "gpt2.mlpackage", tmp_path / "gpt2.mlmodelc")
    (tmp_path / "lengths.txt").write_text("12\n40 3\n128\n")
    (tmp_path / "old.mlmodel").write_bytes(old_network().SerializeToString())
    (tmp_path / "custom.mlmodel").write_bytes(custom_network().SerializeToString())
    for name in ("in", "calibration"):
        np.savez(tmp_path / f"{name}.npz", ids=np.arange(LENGTH, dtype=np.int32)[None])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(registry.pass_names()) - set(known):
        registry.unregister(name)


def snippets(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: (language, text)."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def differing(blocks: list[tuple[str, str]], where: str) -> list[str]:
    """Run the Python blocks of a page in order; where what one prints is not the block of text after it."""
    names: dict[str, Any] = {"__name__": where}
    found = []
    for (language, text), (after, shown) in itertools.pairwise([*blocks, ("", "")]):
        printed = io.StringIO()
        if language == "python":
            with redirect_stdout(printed):
                exec(compile(text, where, "exec", dont_inherit=True), names)
            if after == "text" and printed.getvalue() != shown:
                found.append(f"the page says:\n{shown}it prints:\n{printed.getvalue()}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_snippets_run_in_order_and_print_what_the_page_says(page: Path, folder: Path) -> None:
    assert differing(snippets(page), page.stem) == []


def test_another_number_on_a_page_is_noticed() -> None:
    block = ("python", "print(f'{2 / 3:.1%}')\n")
    assert differing([block, ("text", "66.7%\n")], "page") == []
    assert len(differing([block, ("text", "66.6%\n"), ("sh", "ls")], "page")) == 1


def test_the_first_example_gains() -> None:
    """Shares that the tutorial stores, which the test above compares with a run: each is higher after."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    shares = re.findall(r"^(?:before|after): ([\d.]+)% of ops, ([\d.]+)% of flop", page, re.MULTILINE)
    (ops, flop), (ops_after, flop_after) = [tuple(map(float, row)) for row in shares]
    assert ops < ops_after
    assert flop < flop_after


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_run_in_order(page: Path, folder: Path) -> None:
    """No command of a page is bad usage or names what is not there."""
    lines = [line for language, text in snippets(page) if language == "sh" for line in text.splitlines()]
    for name in MADE_BEFORE.get(page.name, ()):
        save(load(language_model()), folder / name)
    printed = ""
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["anesurgery"]:
            if words[1] == "example":
                shutil.rmtree(folder / f"{words[2]}.mlpackage", ignore_errors=True)
            made = CliRunner().invoke(app, words[1:])
            assert made.exit_code < BAD_INPUT, f"{line}\n{made.output}"
            assert made.exception is None or isinstance(made.exception, SystemExit), line
            printed += made.output
    for shown in (text for language, text in snippets(page) if language == "text" and text.startswith("ANE:")):
        assert without_decibels(shown) in without_decibels(printed)


def without_decibels(text: str) -> str:
    """In one line, and without what the vector width of a processor may change."""
    return re.sub(r"\d+ dB", "N dB", " ".join(text.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_public_name_has_an_example() -> None:
    """The examples run with the other snippets; the reference shows them beside each call."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^## `(\w+)`\n\n(?:[^\n]+\n\n)?```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert all(name in code for name, code in named if name not in MEANT)
    missing = set(ane.__all__) - {name for name, _ in named}
    assert missing == {"passes", "recipes", *EXPLAINED}


def test_the_first_page_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150

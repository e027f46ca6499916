"""The snippets of the README and of docs/ run as written, in order, in a folder with the models they name."""

from __future__ import annotations

import io
import itertools
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_checkpoint
from compiled_models import compile_package
from executorch_files import Call, flattened, program
from prose import GUIDE
from typer.testing import CliRunner

import anesurgery as ane
from anesurgery import registry
from anesurgery.commands.app import app
from anesurgery.coreai import toolkit
from anesurgery.neuralnetwork.making import make_layer, make_network

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)")
BAD_INPUT = 64
YOURS = {
    "api.md": ["checkpoint", "gpt2.mlmodelc", "model.pte"],
    "compiled-models.md": ["gpt2.mlmodelc", "model.pte"],
    "decoders.md": ["checkpoint"],
    "neural-networks.md": ["custom.mlmodel"],
}
"""Page -> what it takes for its reader's own: no example makes it."""
CORE_AI = {"api.md", "core-ai.md"}
"""Pages that need Apple's package coreai-core."""
EXPLAINED = {"Builder", "Match", "OpPattern", "Ops", "Pass", "Refusal"}
"""Names that the example of `Rewrite` shows."""
MEANT = {
    "AgainstTorch",
    "Both",
    "Build",
    "Certificate",
    "CompressedCache",
    "Compression",
    "CoreAI",
    "ExecuTorch",
    "Fallback",
    "Folder",
    "Lint",
    "SizedModel",
    "Inspection",
    "Picture",
    "Surgery",
    "Comparison",
    "Recipe",
}
"""Classes of results: their example shows what gives them."""


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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, which is the current one; passes that a page registers go again."""
    known = registry.pass_names()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(registry.pass_names()) - set(known):
        registry.unregister(name)


def put_there(name: str, folder: Path, checkpoint: Path) -> None:
    """Write what a page takes for its reader's own."""
    if name == "checkpoint":
        shutil.copytree(checkpoint, folder / name)
    elif name == "gpt2.mlmodelc":
        compile_package(ane.example("tiny", folder / "compiled.mlpackage"), folder / name)
        shutil.rmtree(folder / "compiled.mlpackage")
    elif name == "model.pte":
        (folder / "part").mkdir()
        ane.example("tiny", folder / "part" / "model.mlpackage")
        call = Call("CoreMLBackend", 0)
        (folder / name).write_bytes(program({"forward": [call]}, [flattened(folder / "part")]))
        shutil.rmtree(folder / "part")
    else:
        (folder / name).write_bytes(custom_network().SerializeToString())


def snippets(page: Path) -> list[tuple[str, str]]:
    """The fenced blocks of a page: (language, text)."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


def differing(blocks: list[tuple[str, str]], where: str) -> list[str]:
    """Run the blocks of a page in order; where what one prints is not the block of text after it."""
    names: dict[str, Any] = {"__name__": where}
    found = []
    for (language, text), (after, shown) in itertools.pairwise([*blocks, ("", "")]):
        printed = io.StringIO()
        with redirect_stdout(printed):
            if language == "python":
                exec(compile(text, where, "exec", dont_inherit=True), names)
            elif language == "sh":
                run_commands(text)
        if after == "text" and not same_text(language, printed.getvalue(), shown):
            found.append(f"the page says:\n{shown}it prints:\n{printed.getvalue()}")
    return found


def same_text(language: str, printed: str, shown: str) -> bool:
    """What Python prints, exactly; of commands what the page shows up to "...", without the decibels."""
    if language == "python":
        return printed == shown
    pieces = re.split(r"^\.\.\.$", shown, flags=re.MULTILINE)
    return language != "sh" or all(without_decibels(one) in without_decibels(printed) for one in pieces)


def run_commands(text: str) -> None:
    """Run the lines of a block that are ours; none is bad usage or names what is not there."""
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["python", "-c"]:
            exec(compile(words[2], line, "exec", dont_inherit=True), {})
        if words[:1] == ["anesurgery"]:
            words, into = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, os.devnull)
            done = CliRunner().invoke(app, words[1:])
            Path(into).write_text(done.stdout, encoding="utf-8")
            assert done.exit_code < BAD_INPUT, f"{line}\n{done.output}"
            assert done.exception is None or isinstance(done.exception, SystemExit), line
            print(done.output)


@pytest.mark.slow_cases(
    "README.md",
    "api.md",
    "ci.md",
    "command-line.md",
    "compression.md",
    "decoders.md",
    "inspect.md",
    "repair.md",
    "sizes.md",
    "tutorial.md",
)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_snippets_run_in_order_and_print_what_the_page_says(
    page: Path, folder: Path, request: pytest.FixtureRequest
) -> None:
    """In an empty folder, but for what the page says is the reader's own."""
    if page.name in CORE_AI and toolkit.ABSENT:
        pytest.skip(f"the page writes Core AI models: {toolkit.ABSENT}")
    for name in YOURS.get(page.name, ()):
        put_there(name, folder, request.getfixturevalue("checkpoint"))
    assert differing(snippets(page), page.stem) == []


def test_a_page_that_names_what_is_not_there_fails(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"nope\.mlpackage"):
        differing([("sh", "anesurgery inspect nope.mlpackage\n")], "page")
    shown = ("text", "ANE: 0 % of ops\n")
    assert len(differing([("sh", "anesurgery --version\n"), shown], "page")) == 1


def test_another_number_on_a_page_is_noticed() -> None:
    block = ("python", "print(f'{2 / 3:.1%}')\n")
    assert differing([block, ("text", "66.7%\n")], "page") == []
    assert len(differing([block, ("text", "66.6%\n"), ("sh", "ls")], "page")) == 1


def test_the_first_example_gains() -> None:
    """Shares that the tutorial stores, which the test above compares with a run: each is higher after."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    shares = re.findall(
        r"^(?:before|after): at least (\d+)% of the ops and (\d+)% of the work", page, re.MULTILINE
    )
    (ops, work), (ops_after, work_after) = [tuple(map(float, row)) for row in shares]
    assert ops < ops_after
    assert work < work_after


def test_the_rates_on_a_page_are_those_of_the_score() -> None:
    """The script that scores `inspect` writes one page; the guide quotes it."""
    pages = (ROOT / "docs" / f"{name}.md" for name in ("accuracy", "inspect"))
    score, page = (path.read_text(encoding="utf-8") for path in pages)
    row = re.search(r"\| preferred in a graph \| (\d+) \| (\d+) \|", score)
    assert row is not None
    assert f"{row[1]} of {row[2]} ops in small graphs" in page
    apart = re.findall(r"\| CPU_AND_NE \| [\d.]+% \| [\d.]+% \| ([\d.]+) points \|", score)
    assert apart == ["0.0"] * 4
    assert "four whole models" in page


def without_decibels(text: str) -> str:
    """In one line, and without what the vector width of a processor may change."""
    return re.sub(r"[\d.]+ dB", "N dB", " ".join(text.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


def broken_tables(text: str) -> list[str]:
    """Return the rows that have another number of cells than the row before, or stand outside of a table."""
    text = re.sub(r"^(?:```|~~~).*?^(?:```|~~~)$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`|\\\|", "code", text)
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    broken = [t.splitlines()[0] for t in tables if not re.match(r".*\n\|[-:| ]+\|(?:\n|$)", t)]
    return broken + [
        row for t in tables for row in t.splitlines() if row.count("|") != t.partition("\n")[0].count("|")
    ]


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs").rglob("*/*.md"))], ids=lambda p: p.name)
def test_tables_are_whole(page: Path) -> None:
    assert broken_tables(page.read_text(encoding="utf-8")) == []


def test_a_broken_table_is_noticed() -> None:
    whole = "| a | `b|c` |\n|---|---|\n| d | e |\n"
    assert broken_tables(whole) == []
    assert broken_tables(f"{whole}\n| f | g |\n") == ["| f | g |"]
    assert broken_tables(f"{whole}| f |\n") == ["| f |"]


def test_every_public_name_has_an_example() -> None:
    """The examples run with the other snippets; the reference shows them beside each call."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(
        r"^## `(\w+)`\n\n(?:(?:[^\n]+\n)+\n)?```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    assert all(name in code for name, code in named if name not in MEANT)
    missing = set(ane.__all__) - {name for name, _ in named}
    assert missing == {"passes", "recipes", *EXPLAINED}


def test_the_first_page_stays_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("name", registry.pass_names())
def test_code_in_the_text_of_a_pass_stays_on_one_line(name: str) -> None:
    """The site turns code spans into literals line by line."""
    broken = [
        line for line in registry.documentation(name).splitlines() if line.replace("``", "").count("`") % 2
    ]
    assert not broken


IN_ORDER = ("README", *GUIDE, "core-ai")
"""Pages that a new reader may read one after the other, in one folder."""


@pytest.mark.slow
def test_pages_can_be_read_in_one_folder(folder: Path, checkpoint: Path) -> None:
    """The wrong version: two pages make different models of one name, which `example` refuses to replace."""
    put_there("checkpoint", folder, checkpoint)
    pages = {page.stem: page for page in PAGES}
    names = [name for name in IN_ORDER if not (toolkit.ABSENT and f"{name}.md" in CORE_AI)]
    assert {name: differing(snippets(pages[name]), name) for name in names} == {name: [] for name in names}


def test_two_models_of_one_name_are_noticed(folder: Path) -> None:
    commands = "anesurgery example tiny\nanesurgery example tiny --ios 18 --out tiny.mlpackage\n"
    with pytest.raises(AssertionError, match="exists"):
        differing([("sh", commands)], "page")

"""What the commands print fits into 80 columns; shells complete names; long waits show the time."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from anesurgery import registry
from anesurgery.commands import waiting
from anesurgery.commands.app import app
from anesurgery.commands.options import complete_name, complete_steps
from anesurgery.display import folded
from anesurgery.files import progress
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb

WIDTH = 80
RULES = Counter(dict.fromkeys(("|", "|---|---|", "|---|---|---|", *("-" * n for n in range(1, WIDTH))), 100))
"""The lines of a table."""
LONG = "encoder_layers_0_attention_self_query_dense_output_cast_fp16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two packages with long names."""
    place = tmp_path_factory.mktemp("widths")
    weight = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float16)

    def build(scale: float) -> Program:
        @mb.program(input_specs=[mb.TensorSpec((1, 8, 16))], opset_version=ct.target.iOS16)
        def program(x: Var) -> Var:
            half = mb.cast(x=x, dtype="fp16", name=f"{LONG}_first")
            made = mb.linear(x=half, weight=weight, name=LONG)
            made = mb.mul(x=mb.cumsum(x=made, name=f"{LONG}_sum"), y=np.float16(scale), name=f"{LONG}_scaled")
            return mb.sub(x=made, y=half, name=f"{LONG}_output")

        return program

    for name, scale in (("first", 0.5), ("second", 0.4)):
        save(load(build(scale)), place / f"{name}.mlpackage")
    return place


@pytest.mark.one_of(5)
@pytest.mark.parametrize(
    "words",
    [
        "inspect first.mlpackage --target M1",
        f"inspect first.mlpackage --why {LONG}",
        "inspect first.mlpackage second.mlpackage",
        "inspect first.mlpackage --status",
        "apply auto first.mlpackage --dry-run --prove both",
        "run first.mlpackage",
        "ranges first.mlpackage",
        "certify first.mlpackage",
        "compare first.mlpackage second.mlpackage --prove",
        f"draw first.mlpackage --around {LONG} -o ops.svg",
        "split first.mlpackage --parts 2 -o parts",
        "chips",
        "doctor",
        "list",
        "--help",
        "inspect --help",
        "apply --help",
        "generate --help",
    ],
)
def test_a_command_prints_no_wider_than_a_terminal(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    made = CliRunner().invoke(app, words.split())
    assert made.exit_code < 64, made.output
    assert made.output
    assert [line for line in made.output.splitlines() if len(line) > WIDTH] == []


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", [*registry.pass_names(), *registry.recipe_names()])
def test_explanations_fit_but_for_words_without_a_place_to_break(name: str) -> None:
    text = registry.documentation(name)
    wide = [line for line in folded(text).splitlines() if len(line) > WIDTH and len(line.split()) > 1]
    assert wide == []
    assert Counter(folded(text).split()) - RULES == Counter(text.split()) - RULES, "words are lost"


def test_folding_fills_paragraphs_and_keeps_sketches() -> None:
    words = "a sentence " * 10
    assert folded(f"{words}\n\n    %y = add(x=%x)\n\nend", 40).splitlines()[-3:] == [
        "    %y = add(x=%x)",
        "",
        "end",
    ]
    assert folded("    %y: 1x4 = add(x=%x, y=%z)", 20) == "    %y: 1x4 =\n        add(x=%x,\n        y=%z)"


def test_folding_makes_columns_of_a_table() -> None:
    table = "| op | becomes |\n|---|---|\n| `mod` | x - floor(x / y) * y |\n| `cumsum` | a product |"
    assert folded(table, 24).splitlines() == [
        "op        becomes",
        "--------  --------------",
        "`mod`     x - floor(x /",
        "          y) * y",
        "`cumsum`  a product",
    ]


def test_shells_complete_names() -> None:
    assert complete_name("gpt2") == ["gpt2_ane"]
    assert "fold_constants,pad_last_axis" in complete_steps("fold_constants,pad_l")
    made = CliRunner().invoke(
        app,
        [],
        prog_name="anesurgery",
        env={
            "_ANESURGERY_COMPLETE": "complete_bash",
            "COMP_WORDS": "anesurgery explain gpt2_",
            "COMP_CWORD": "2",
        },
    )
    assert made.output.strip() == "gpt2_ane"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@dataclass
class Clock:
    """A clock that goes on by a second whenever somebody waits; it stands in for `time`, and for an event."""

    waits: int
    """How often the event is waited for in vain."""
    now: float = 100.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.waits -= 1
        return self.waits < 0


def test_a_long_wait_shows_what_and_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: Any = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    clock: Any = Clock(waits=2)
    for module in (waiting, progress):
        monkeypatch.setattr(module, "time", clock)
    listener = progress.Listener(progress.Amount(2_000_000, done=500_000, start=clock.now))
    waiting._tick("saving", clock, listener)
    assert shown.getvalue().split("\r\033[K") == [
        "saving ...",
        "saving ... 1 s, 500 kB of 2 MB, 3 s left",
        "saving ... 2 s, 500 kB of 2 MB, 6 s left",
    ]


def test_a_wait_is_told_on_a_terminal_and_wiped_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: Any = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    with waiting.waiting("proving", quiet=True):
        pass
    assert shown.getvalue() == ""
    with waiting.waiting("proving"):
        pass
    assert shown.getvalue().startswith("proving ...")
    assert shown.getvalue().endswith("\r\033[K")


def test_split_says_its_options_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "any.mlpackage").mkdir()
    made = CliRunner().invoke(app, ["split", str(tmp_path / "any.mlpackage"), "-o", "parts"])
    assert str(made.exception) == "give either --parts N or --max-size 950MB or --at unsupported"

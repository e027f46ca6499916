"""Names that a model brings: markup, escape codes and endless ones reach the terminal as plain text, or not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import assert_linear

from anesurgery.commands import app as cli
from anesurgery.display import printable
from anesurgery.files.package import save
from anesurgery.loading import load
from anesurgery.mil import Program, Var, ct, mb, types, walk_ops
from anesurgery.placement.inspector import inspect
from anesurgery.show.console import as_html, as_text

NAME = "[/b][bold]x[/bold][/] \x1b[31mred\x1b[2J\u202e:smile:\x00\x07"
WORDS = (
    ("inspect", "IN"),
    ("inspect", "IN", "OTHER"),
    ("apply", "IN", "negate_subtract", "OUT", "--prove", "both"),
    ("run", "IN"),
    ("ranges", "IN"),
    ("certify", "IN"),
    ("compare", "IN", "OTHER"),
    ("diff", "IN", "OTHER"),
)


def named(name: str, factor: float = 2.0) -> Program:
    """A program in which an op, a value inside and the output have a name."""

    @mb.program(input_specs=[mb.TensorSpec((2, 3), dtype=types.fp16)] * 2, opset_version=ct.target.iOS16)
    def program(x: Var, z: Var) -> Var:
        large = mb.mul(x=mb.sub(x=x, y=z, name="d"), y=np.float16(60000), name="m")
        return mb.mul(x=large, y=np.float16(factor), name="y")

    for op in walk_ops(program):
        if op.op_type != "const":
            op.name += name
            op.outputs[0].name += name
    return program


@pytest.mark.one_of(3)
@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_every_command_prints_them(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    places = {
        "IN": save(load(named(NAME)), tmp_path / "in.mlpackage"),
        "OTHER": save(load(named(NAME, 3.0)), tmp_path / "other.mlpackage"),
        "OUT": tmp_path / "out.mlpackage",
    }
    monkeypatch.setattr(sys, "argv", ["anesurgery", *(str(places.get(w, w)) for w in words)])
    code: Any = 0
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code or 0
    out, err = capsys.readouterr()
    assert code in (0, 1), err
    assert all(c.isprintable() or c == "\n" for c in out + err)


def test_markup_is_text_and_codes_are_replaced() -> None:
    assert as_text("[/b] [red]x :smile:") == "[/b] [red]x :smile:"
    assert as_text("\x1b[31mred") == "�[31mred"
    assert "\x1b" not in as_html("\x1b[31mred")
    assert printable("a\x1b\nb\u202e") == "a�\nb�"


def test_errors_are_printable_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["anesurgery", "inspect", str(tmp_path / "\x1b[31m.mlpackage")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "\x1b" not in capsys.readouterr().err


def test_an_endless_name_is_no_endless_wait(tmp_path: Path) -> None:
    def shown(path: Path) -> str:
        return str(inspect(path))

    paths = [save(load(named("x" * size)), tmp_path / f"{size}.mlpackage") for size in (500_000, 1_000_000)]
    assert_linear(shown, *paths)
    assert len(shown(paths[1])) < 100_000

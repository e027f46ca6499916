"""The door to Apple's package: what it uses is there, and without the package it says how to get it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from children import run_child

from anesurgery.coreai import toolkit

ROOT = Path(__file__).parents[2]
absent = pytest.mark.skipif(bool(toolkit.ABSENT), reason=f"no coreai-core here: {toolkit.ABSENT}")


@absent
@pytest.mark.parametrize(("place", "least"), [("ops", 20), ("ir", 15)])
def test_what_apple_does_not_version_is_there(place: str, least: int) -> None:
    files = (ROOT / "anesurgery" / "coreai").rglob("*.py")
    names = {
        name for file in files for name in re.findall(rf"(?<![.\w]){place}\.([A-Za-z]\w*)", file.read_text())
    }
    assert len(names) >= least
    assert [name for name in sorted(names) if not hasattr(getattr(toolkit, place), name)] == []


@absent
def test_the_version_is_the_one_that_is_pinned() -> None:
    from importlib.metadata import version

    assert f'"coreai-core=={toolkit.VERSION};' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert version("coreai-core") == toolkit.VERSION


def test_without_the_package_it_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['coreai'] = None\n"  # importing it now raises
        "from anesurgery.coreai import toolkit\n"
        "toolkit.require()\n"
    )
    done = run_child([sys.executable, "-c", code], cwd=ROOT)
    assert "LoadError" in done.stderr
    assert "pip install 'anesurgery[coreai]'" in done.stderr


def test_the_child_loads_neither_torch_nor_coremltools() -> None:
    """Each run starts a process, which would take ten times as long with them."""
    code = (
        "import sys, anesurgery.coreai.child; print([m for m in ('torch', 'coremltools') if m in sys.modules])"
    )
    assert run_child([sys.executable, "-c", code], cwd=ROOT).stdout.strip() == "[]"


def test_no_other_file_imports_it() -> None:
    engine = [p for p in (ROOT / "anesurgery").rglob("*.py") if p.name != "toolkit.py"]
    found = [p.name for p in engine if "import coreai" in (t := p.read_text()) or "from coreai" in t]
    assert found == []


@absent
@pytest.mark.parametrize("dtype", ["uint1", "uint2", "uint4", "int4", "uint8", "fp16", "bool"])
def test_constants_are_read_back_as_they_were(dtype: str, tmp_path: Path) -> None:
    """Those of few bits are packed, the lowest first; in hexadecimal digits in the text of a program."""
    values = np.array([1, 0, 1, 1] * 32, np.bool_ if dtype == "bool" else np.uint8)
    with toolkit.module() as program:
        toolkit.graph("main", {}, lambda _: {"y": toolkit.constant(toolkit.constant_attribute(values, dtype))})
    text = str(program)
    packed = {"uint1": "DD" * 16, "uint2": "51" * 32, "uint4": "0111" * 32, "int4": "0111" * 32}
    assert packed.get(dtype, "") in text.replace("0x", "")
    toolkit.save(program, tmp_path / "model.aimodel")
    assert toolkit.authoring.AIModelAsset.is_valid(tmp_path / "model.aimodel")

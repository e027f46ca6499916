"""The pages build into a site without a warning, and every public name is in its reference."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import anesurgery
from anesurgery import registry
from anesurgery.commands.app import app

pytestmark = pytest.mark.slow
"""`make docs` builds the same site on each push, as a job of its own."""

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(folder)]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=DOCS.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == "", "what coremltools logs while the pages are built is a warning too"
    return folder


def test_every_public_name_has_an_entry(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text()
    missing = {n for n in anesurgery.__all__ if f'id="anesurgery.{n}"' not in page}
    assert missing == {"passes", "recipes"}


def test_every_pass_and_recipe_has_a_section(site: Path) -> None:
    kinds = ("passes", "layers", "recipes")
    pages = "".join((site / "reference" / f"{kind}.html").read_text() for kind in kinds)
    names = [*registry.op_pass_names(), *registry.layer_pass_names(), *registry.recipe_names()]
    assert [n for n in names if f'id="{n.replace("_", "-")}"' not in pages] == []


IN_MEMORY = """
import gc, importlib, pkgutil
from anesurgery import placement
from anesurgery.placement.evidence import Rule

for module in pkgutil.walk_packages(placement.__path__, "anesurgery.placement."):
    if not module.name.endswith("._template"):
        importlib.import_module(module.name)
print(*{thing.id for thing in gc.get_objects() if type(thing) is Rule})
"""


def test_every_rule_is_on_its_page_with_what_it_rests_on(site: Path) -> None:
    """Counted are the rules that exist in memory, wherever they come from."""
    page = (site / "reference" / "rules.html").read_text()
    known = subprocess.run([sys.executable, "-c", IN_MEMORY], capture_output=True, text=True, check=True).stdout
    names = known.splitlines()[-1].split()
    assert len(names) > 100
    places = {name: f'id="{name.lower().replace("_", "-")}"' for name in names}
    assert [name for name, place in places.items() if place not in page] == []
    assert page.count(">Source<") == page.count(">Grade<") >= len(names)


def test_every_command_and_option_has_a_line(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"anesurgery {name}<" in page
        for parameter in command.params:
            assert all(option in page for option in parameter.opts if option.startswith("--"))


def test_examples_and_pictures_are_on_the_pages(site: Path) -> None:
    page = (site / "reference" / "passes.html").read_text()
    assert page.count('class="ane-ops"') == 2 * len(registry.op_pass_names())
    assert "square_to_mul" in (site / "reference" / "api.html").read_text()


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert not any('src="http' in page or 'rel="stylesheet" href="http' in page for page in pages)


LEFT_OUT = ("space", "measurements")
"""Folders that the site leaves out, as `exclude_patterns` of its configuration says."""


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = (DOCS / "index.md").read_text()
    files = [*DOCS.rglob("*.md"), *DOCS.rglob("*.rst")]
    pages = [p.relative_to(DOCS).with_suffix("").as_posix() for p in files if p.parent.name not in LEFT_OUT]
    assert [page for page in pages if f"\n{page}\n" not in listed and page != "index"] == []

"""Sphinx: the pages of this folder, and a reference made of the docstrings.

Sphinx with MyST and furo: pages stay Markdown that GitHub shows too, the reference comes from the docstrings,
and what is built needs no network. `make docs` builds it; a warning is an error.
"""

from __future__ import annotations

import re
from typing import Any

import anesurgery
from anesurgery import registry

project = "anesurgery"
author = "the authors of anesurgery"
release = anesurgery.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project
default_role = "code"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_use_rtype = False
suppress_warnings = ["myst.xref_missing", "myst.header"]  # links to files outside of docs/ are read on GitHub
exclude_patterns: list[str] = []

MODULES = ("passes", "recipes")
"""Public names that are packages."""


def _api() -> str:
    """A directive for every public name."""
    lines = []
    for name in anesurgery.__all__:
        if name in MODULES:
            continue
        value = getattr(anesurgery, name)
        if isinstance(value, type):
            options = "   :members:\n   :exclude-members: __init__\n"
            lines.append(f".. autoclass:: anesurgery.{name}\n{options}")
        else:
            lines.append(f".. autofunction:: anesurgery.{name}\n")
    return "\n".join(lines)


def _page(kind: str) -> str:
    """The documentation of every pass or recipe, as `anesurgery explain` prints it."""
    listed = {"passes": "op_pass_names", "layers": "layer_pass_names", "recipes": "recipe_names"}
    parts = []
    for name in getattr(registry, listed[kind])():
        text = re.sub(r"^(?! )(.*)$", _escaped, registry.documentation(name).strip(), flags=re.MULTILINE)
        parts.append(f"{name}\n{'-' * len(name)}\n\n{text}\n")
    return "\n".join(parts)


def _escaped(line: re.Match[str]) -> str:
    """A line of prose, its words in backticks as code and its bars as they are."""
    return re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line[0]).replace("|", "\\|")


def _expand(app: Any, name: str, source: list[str]) -> None:
    """Fill the pages of the reference."""
    if name == "reference/api":
        source[0] += "\n" + _api()
    elif name.startswith("reference/"):
        source[0] += "\n" + _page(name.rpartition("/")[2])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _expand)

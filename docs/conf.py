"""Sphinx: the pages of this folder, and a reference made of docstrings, tables and commands.

Sphinx with MyST and furo: pages stay Markdown that GitHub shows too, the reference comes from the docstrings,
and what is built needs no network. `make docs` builds it; a warning is an error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import reference_pages

import anesurgery

project = "anesurgery"
author = "the authors of anesurgery"
release = anesurgery.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["pictures.css"]
default_role = "code"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_use_rtype = False
suppress_warnings = ["myst.xref_missing", "myst.header"]  # links to files outside of docs/ are read on GitHub
exclude_patterns = ["space", "measurements"]  # files of a Space, and files that are read by a script
html_show_copyright = False


def _expand(app: Any, name: str, source: list[str]) -> None:
    """Fill the pages of the reference."""
    if name.startswith("reference/"):
        source[0] += "\n" + reference_pages.page(name.rpartition("/")[2])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _expand)

"""Open models beside each other in Model Explorer: before and after a surgery, one in each half of the window.

::

    python -m anesurgery.explorer.side_by_side before.mlpackage after.mlpackage
"""

from __future__ import annotations

import argparse
import json
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anesurgery.errors import SurgeryError
from anesurgery.explorer.model_graphs import graph_id
from anesurgery.loading import load_graph

ALL = "___all___"
"""Model Explorer's word for: every group is open."""


def panes(before: Path, after: Path) -> dict[str, Any]:
    """What the address of Model Explorer says to show both.

    Raises:
        LoadError: a model cannot be read.
    """
    names = [graph_id(path, next(iter(load_graph(path).program.functions))) for path in (before, after)]
    if names[0] == names[1]:
        names[1] += " (1)"  # so Model Explorer calls the second of a name
    states = [
        {
            "deepestExpandedGroupNodeIds": [ALL],
            "selectedNodeId": "",
            "selectedGraphId": name,
            "selectedCollectionLabel": path.name,
            "widthFraction": 0.5,
            "selected": path is before,
        }
        for name, path in zip(names, (before, after), strict=True)
    ]
    models = [{"url": str(path.absolute())} for path in (before, after)]
    return {"models": models, "uiState": {"paneStates": states}}


def main(words: Sequence[str] | None = None) -> None:
    """Start Model Explorer with two models, and open it in the browser."""
    parser = argparse.ArgumentParser(prog="python -m anesurgery.explorer.side_by_side", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--no-open", action="store_true", help="print the address alone")
    asked = parser.parse_args(words)
    try:
        from model_explorer import server
        from model_explorer.config import ModelExplorerConfig

        data = urllib.parse.quote(json.dumps(panes(asked.before, asked.after)))
    except ImportError:
        parser.error("Model Explorer is not here: pip install 'anesurgery[explorer]'")
    except SurgeryError as error:
        parser.error(str(error))

    class Beside(ModelExplorerConfig):  # type: ignore[misc, unused-ignore]
        """Two models, and the panes in which they are."""

        def to_url_param_value(self) -> str:
            return data

    config = Beside()
    for path in (asked.before, asked.after):
        config.add_model_from_path(str(path))
    server.start(
        port=asked.port, config=config, no_open_in_browser=asked.no_open, extensions=["anesurgery.explorer"]
    )


if __name__ == "__main__":
    main()

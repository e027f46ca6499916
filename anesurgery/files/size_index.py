"""`sizes.json`: which function of which package runs which shapes of the inputs.

A folder of sizes holds packages and this file::

    {
      "format": "anesurgery sizes", "version": 1,
      "sizes": [
        {"name": "size_64", "function": "size_64", "package": "model.mlpackage", "inputs": {"ids": [1, 64]}}
      ]
    }

The sizes are in rising order of the elements of their inputs. `function` is null where a package holds one
function.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.errors import InterpretError, LoadError, UnknownName
from anesurgery.files.source import read_text

INDEX = "sizes.json"
FORMAT, VERSION = "anesurgery sizes", 1


@dataclass(frozen=True)
class SizeRow:
    """One size.

    Attributes:
        name: of the size.
        function: which function of the package; None for its only one.
        package: its name in the folder.
        inputs: input -> its shape, for each input whose shape differs between sizes, and no others.
    """

    name: str
    function: str | None
    package: str
    inputs: Mapping[str, tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        """Plain data, a row of `sizes.json`."""
        inputs = {name: list(shape) for name, shape in self.inputs.items()}
        return {"name": self.name, "function": self.function, "package": self.package, "inputs": inputs}


def written(rows: Sequence[SizeRow]) -> str:
    """The text of `sizes.json`."""
    whole = {"format": FORMAT, "version": VERSION, "sizes": [row.to_json() for row in rows]}
    return json.dumps(whole, indent=2) + "\n"


def is_sized(path: Path) -> bool:
    """Is it a folder of sizes?"""
    return (path / INDEX).is_file()


def read(folder: Path) -> tuple[SizeRow, ...]:
    """The sizes in a folder.

    Raises:
        LoadError: `sizes.json` is damaged, or of another version.
    """
    place = folder / INDEX
    try:
        whole = json.loads(read_text(place))
        if (whole["format"], whole["version"]) != (FORMAT, VERSION):
            raise LoadError(
                f"{place} is of {whole['format']} {whole['version']}; this reads {FORMAT} {VERSION}"
            )
        rows = tuple(_row(row) for row in whole["sizes"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{place} is damaged: {type(error).__name__}: {error}; make the sizes again") from error
    if not rows:
        raise LoadError(f"{place} names no sizes; make the sizes again")
    return rows


def _row(row: Any) -> SizeRow:
    package = str(row["package"])
    if Path(package).name != package:
        raise ValueError(f"the package {package!r} is not in the folder")
    inputs = {str(name): tuple(int(n) for n in shape) for name, shape in row["inputs"].items()}
    return SizeRow(str(row["name"]), row["function"], package, inputs)


def chosen(folder: Path, values: Mapping[str, Any], name: str | None = None) -> SizeRow:
    """The size of a name, or that of the shapes of some values.

    Raises:
        InterpretError: no size has these shapes.
        UnknownName: no size has the name.
        LoadError: `sizes.json` is damaged.
    """
    rows = read(folder)
    if name is not None:
        named = {row.name: row for row in rows}
        if name not in named:
            raise UnknownName("size", name, named)
        return named[name]
    shapes = {key: tuple(np.shape(value)) for key, value in values.items()}
    for row in rows:
        if all(shapes.get(key) == shape for key, shape in row.inputs.items()):
            return row
    offered = "; ".join(f"{row.name} takes {in_words(row.inputs)}" for row in rows)
    given = in_words({key: shapes[key] for key in rows[0].inputs if key in shapes}) or "none of them"
    raise InterpretError(f"no size takes the inputs given ({given}): {offered}; make that size too")


def in_words(shapes: Mapping[str, Sequence[int]]) -> str:
    """Shapes by name: ids 1x64, mask 1x64."""
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())

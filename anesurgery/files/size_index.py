"""`sizes.json`: which function of which package runs which shapes of the inputs.

A folder of sizes holds packages and this file::

    {
      "format": "anesurgery sizes", "version": 4,
      "sizes": [
        {"name": "size_64", "function": "size_64", "package": "model.mlpackage", "inputs": {"ids": [1, 64]}}
      ],
      "padding": {"inputs": {"ids": 1}, "outputs": {"scores": 1}, "why_not": "",
                  "fill": {"ids": 0}, "hiding": {}, "spread": null, "shares": {"scores": 1}, "multiple": 1,
                  "more": [], "others": ""}
    }

The sizes are in rising order of the elements of their inputs. `function` is null where a package holds one
function.
`padding` names the axis of each input at whose end a shorter one is filled up to the next size, with the
number in `fill`, and that of each output which is then cropped to the length given; `why_not` says why that
may not be done. `hiding` names the inputs that hide what is filled up: in each row of one, the first place must
not hold its fill (true), or some place must not (false). `spread` is how far apart the attention scores of a
row may be, at which what is hidden weighs nothing; null where that does not matter. Where convolutions move by
more than 1 place, an output is cropped to the length by its number in `shares`, and only lengths are filled up
that are multiples of `multiple`, to sizes that are. Where the sizes differ by several lengths, as of a text
and of its translation, or the sides of a picture, `more` has the same for each further one: inputs are filled
up along one after the other. `others` says which lengths may not be filled up, and why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.errors import InterpretError, LoadError, UnknownName
from anesurgery.files.source import read_text

INDEX = "sizes.json"
FORMAT, VERSION = "anesurgery sizes", 4
READ = {1: 3, 2: 6, 3: 8, VERSION: None}
"""Versions that are read -> how many fields of `Padding` they have; the first fills up with zeros."""


@dataclass(frozen=True)
class SizeRow:
    """One size.

    Attributes:
        name: name of the size.
        function: function of the package; None for its only one.
        package: its name in the folder.
        inputs: input -> its shape, for each input whose shape differs between sizes.
    """

    name: str
    function: str | None
    package: str
    inputs: Mapping[str, tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        """Plain data, a row of `sizes.json`."""
        inputs = {name: list(shape) for name, shape in self.inputs.items()}
        return {"name": self.name, "function": self.function, "package": self.package, "inputs": inputs}


@dataclass(frozen=True)
class Padding:
    """How inputs between two sizes are padded.

    Attributes:
        inputs: input -> the axis that is padded at its end.
        outputs: output -> the axis that is cropped. Other outputs do not depend on the padding.
        why_not: why inputs may not be padded; "" if they may.
        fill: input -> the number to pad with; 0 by default.
        hiding: mask input -> must the first position of each row be real (or any)?
        spread: the largest distance of attention scores in a row at which masked positions have no weight.
        shares: output -> number of input positions for one of its own; 1 by default.
        multiple: lengths must be multiples of this.
        more: the same for each further length, in the order of padding.
        others: other lengths that may not be padded, and why.
    """

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    why_not: str = ""
    fill: Mapping[str, float] = field(default_factory=dict)
    hiding: Mapping[str, bool] = field(default_factory=dict)
    spread: float | None = None
    shares: Mapping[str, int] = field(default_factory=dict)
    multiple: int = 1
    more: tuple[Padding, ...] = ()
    others: str = ""

    @property
    def each(self) -> tuple[Padding, ...]:
        """What is filled up along each length; none where nothing may be."""
        return () if self.why_not else (self, *self.more)

    def to_json(self) -> dict[str, Any]:
        """Plain data, a part of `sizes.json`."""
        return {
            "inputs": dict(self.inputs),
            "outputs": dict(self.outputs),
            "why_not": self.why_not,
            "fill": {name: self.fill.get(name, 0) for name in self.inputs},
            "hiding": dict(self.hiding),
            "spread": self.spread,
            "shares": {name: self.shares.get(name, 1) for name in self.outputs},
            "multiple": self.multiple,
            "more": [one.to_json() for one in self.more],
            "others": self.others,
        }

    def __str__(self) -> str:
        if self.why_not:
            return f"not padded: {self.why_not}"
        if not self.more and not self.others:
            return self._in_words("")
        words = [one._in_words(f" along {axes_in_words(one.inputs)}") for one in self.each]
        return "; ".join([*words, *([f"not padded along {self.others}"] if self.others else [])])

    def _in_words(self, along: str) -> str:
        """How one length is filled up."""
        words = f"padded at the end{along}"
        words += f", lengths that are multiples of {self.multiple}" if self.multiple > 1 else ""
        if self.spread is None:
            return f"{words}, proved"
        return f"{words}, proved for attention scores of a row within {self.spread:g} of each other"


@dataclass(frozen=True)
class Call:
    """What to call for some values.

    Attributes:
        row: the size.
        values: as they were given, or filled up.
        lengths: for each of `Padding.each`, that to which outputs are cropped; none where nothing is.
    """

    row: SizeRow
    values: Mapping[str, Any]
    lengths: tuple[int, ...] = ()

    def cropped(self, name: str, value: Any, padding: Padding) -> Any:
        """An output without what was filled up."""
        for length, one in zip(self.lengths, padding.each if self.lengths else (), strict=True):
            if name in one.outputs:
                kept = length // one.shares.get(name, 1)
                value = value[(slice(None),) * one.outputs[name] + (slice(kept),)]
        return value


PADDING = tuple(one.name for one in fields(Padding))


def written(rows: Sequence[SizeRow], padding: Padding) -> str:
    """The text of `sizes.json`."""
    sizes = [row.to_json() for row in rows]
    whole = {"format": FORMAT, "version": VERSION, "sizes": sizes, "padding": padding.to_json()}
    return json.dumps(whole, indent=2) + "\n"


def is_sized(path: Path) -> bool:
    """Is it a folder of sizes?"""
    return (path / INDEX).is_file()


def read(folder: Path) -> tuple[tuple[SizeRow, ...], Padding]:
    """The sizes in a folder, and how inputs between them are run.

    Raises:
        LoadError: `sizes.json` is damaged, or of another version.
    """
    place = folder / INDEX
    try:
        whole = json.loads(read_text(place))
        if whole["format"] != FORMAT or whole["version"] not in READ:
            raise LoadError(
                f"{place} is of {whole['format']} {whole['version']}; this reads {FORMAT} {VERSION}"
            )
        rows = tuple(_row(row) for row in whole["sizes"])
        keys = PADDING[: READ[whole["version"]]]
        padding = _padding(whole["padding"], keys)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{place} is damaged: {type(error).__name__}: {error}; make the sizes again") from error
    if not rows:
        raise LoadError(f"{place} names no sizes; make the sizes again")
    return rows, padding


def _padding(given: Any, keys: Sequence[str]) -> Padding:
    """What was written of padding."""
    values = {key: given[key] for key in keys}
    return Padding(**{**values, "more": tuple(_padding(one, keys) for one in values.get("more", ()))})


def _row(row: Any) -> SizeRow:
    package = str(row["package"])
    if Path(package).name != package:
        raise ValueError(f"the package {package!r} is not in the folder")
    inputs = {str(name): tuple(int(n) for n in shape) for name, shape in row["inputs"].items()}
    return SizeRow(str(row["name"]), row["function"], package, inputs)


def chosen(
    rows: Sequence[SizeRow], padding: Padding, values: Mapping[str, Any], name: str | None = None
) -> Call:
    """The size of a name, or that of the shapes of some values, which are filled up where they may be.

    Raises:
        InterpretError: no size has these shapes.
        UnknownName: no size has the name.
    """
    if name is not None:
        named = {row.name: row for row in rows}
        if name not in named:
            raise UnknownName("size", name, named)
        return Call(named[name], values)
    shapes = {key: tuple(np.shape(value)) for key, value in values.items()}
    for row in rows:
        own = shapes | _of_pictures(row, values)
        if all(own.get(key) == shape for key, shape in row.inputs.items()):
            return Call(row, values)
    if empty := [key for key in rows[0].inputs if 0 in shapes.get(key, ())]:
        raise InterpretError(f"{in_words({empty[0]: shapes[empty[0]]})} is empty; give at least one place")
    each = () if _of_pictures(rows[0], values) else padding.each
    for row in rows:
        lengths = _shorter(row, shapes, each) if each else None
        if lengths is not None:
            return Call(row, _filled(row, values, each), lengths)
    offered = "; ".join(f"{row.name} takes {in_words(row.inputs)}" for row in rows)
    shapes_in_words = in_words({key: shapes[key] for key in rows[0].inputs if key in shapes}) or "none of them"
    raise InterpretError(
        f"no size takes the inputs given ({shapes_in_words}): {offered}{_why_not(padding)}; make that size too"
    )


def _why_not(padding: Padding) -> str:
    """What keeps lengths from being filled up."""
    words = f", and it is not padded: {padding.why_not}" if padding.why_not else ""
    words += f", and it is not padded along {padding.others}" if padding.others else ""
    for one in padding.each:
        if one.multiple > 1:
            words += f", and only lengths that are multiples of {one.multiple} are padded, to sizes that are"
    return words


def _of_pictures(row: SizeRow, values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes as which a model reads pictures (PIL), whose size is width and height."""
    read: dict[str, Any] = {key: values[key] for key in row.inputs if key in values}
    return {
        key: (*row.inputs[key][:-2], *value.size[::-1]) for key, value in read.items() if hasattr(value, "mode")
    }


def _shorter(
    row: SizeRow, shapes: Mapping[str, tuple[int, ...]], each: Sequence[Padding]
) -> tuple[int, ...] | None:
    """The lengths of the inputs to fill up, if that makes them as long as those of a size."""
    filled, lengths = {key: list(shape) for key, shape in shapes.items()}, list[int]()
    for one in each:
        own = {filled[key][axis] for key, axis in one.inputs.items() if len(filled.get(key, ())) > axis}
        wanted = {row.inputs[key][axis] for key, axis in one.inputs.items()}
        if len(own) != 1 or len(wanted) != 1:
            return None
        (length,), (size,) = own, wanted
        if not 0 < length <= size or (length < size and (length % one.multiple or size % one.multiple)):
            return None
        for key, axis in one.inputs.items():
            if key not in filled or len(filled[key]) <= axis:
                return None
            filled[key][axis] = size
        lengths.append(length)
    return tuple(lengths) if all(filled.get(k) == list(s) for k, s in row.inputs.items()) else None


def _filled(row: SizeRow, values: Mapping[str, Any], each: Sequence[Padding]) -> dict[str, Any]:
    """The values, those shorter than a size filled up along one length after the other.

    Raises:
        InterpretError: a mask hides what must be seen.
    """
    filled = dict(values)
    for one in each:
        if all(np.shape(filled[key])[axis] == row.inputs[key][axis] for key, axis in one.inputs.items()):
            continue
        _check_seen(filled, one)
        for key, axis in one.inputs.items():
            array = np.asarray(filled[key])
            more = [
                (0, row.inputs[key][axis] - array.shape[axis] if a == axis else 0) for a in range(array.ndim)
            ]
            filled[key] = np.pad(array, more, constant_values=np.asarray(one.fill.get(key, 0), array.dtype))
    return filled


def _check_seen(values: Mapping[str, Any], padding: Padding) -> None:
    """Each row of a mask must leave something to be seen: a row that hides all weighs what is filled up, too.

    Raises:
        InterpretError: a row hides everything, or its first place where that must count.
    """
    for key, first in padding.hiding.items():
        array, fill, axis = np.asarray(values[key]), padding.fill.get(key, 0), padding.inputs[key]
        seen = array > fill / 2 if fill < 0 else array != fill
        if not (seen.take(0, axis) if first else seen.any(axis)).all():
            words = "the first place of a row" if first else "a whole row"
            raise InterpretError(
                f"{key} hides {words}, so that these inputs cannot be filled up to another size; make the size "
                f"{in_words({name: np.shape(values[name]) for name in padding.inputs})} too"
            )


def in_words(shapes: Mapping[str, Sequence[int]]) -> str:
    """Shapes by name: ids 1x64, mask 1x64."""
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())


def axes_in_words(axes: Mapping[str, int]) -> str:
    """Axes of inputs: axis 1 of ids, axis 1 of mask."""
    return ", ".join(f"axis {axis} of {name}" for name, axis in axes.items())

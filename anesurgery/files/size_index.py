"""Read and write `sizes.json`, which says which function of which package runs which input shapes.

A folder of sizes, made by `anesurgery.sizes`, holds packages and this file::

    {
      "format": "anesurgery sizes", "version": 4,
      "sizes": [
        {"name": "size_64", "function": "size_64", "package": "model.mlpackage", "inputs": {"ids": [1, 64]}}
      ],
      "padding": {"inputs": {"ids": 1}, "outputs": {"scores": 1}, "why_not": "",
                  "fill": {"ids": 0}, "hiding": {}, "spread": null, "shares": {"scores": 1}, "multiple": 1,
                  "more": [], "others": ""}
    }

The sizes are in rising order of the elements of their inputs. `function` is null if a package has one function.

`choose_call` picks the size for given inputs. If no size has their shapes, they may be padded to the next one:
`padding.inputs` names the axis of each input that is padded at its end with the number in `fill`;
`padding.outputs` names the axis of each output that is then cropped; `why_not` says why padding is not allowed.

* `hiding` names the masks that hide the padding: in each row of the mask, the first position (true), or any
  position (false), must be real.
* `spread` is the largest distance of attention scores in a row at which hidden positions get no weight; null if
  that does not matter.
* With strided convolutions an output is cropped to the length divided by its number in `shares`, and only
  multiples of `multiple` are padded, to sizes that are multiples too.
* `more` has the same entries for each further length, if the sizes differ in several (a text and its
  translation, height and width): inputs are padded along one length after the other.
* `others` says which lengths may not be padded, and why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.errors import DAMAGED, InterpretError, LoadError, UnknownName
from anesurgery.files.source import read_json

INDEX = "sizes.json"
FORMAT, VERSION = "anesurgery sizes", 4
FIELDS_OF_VERSION = {1: 3, 2: 6, 3: 8, VERSION: None}
"""Version that can be read -> number of fields of `Padding` that it has; the first pads with zeros."""


@dataclass(frozen=True)
class SizeRow:
    """One size.

    Attributes:
        name: name of the size.
        function: the function in the package; null if the package has only one.
        package: name of the package in the folder.
        inputs: input -> its shape, for each input whose shape differs between sizes.
    """

    name: str
    function: str | None
    package: str
    inputs: Mapping[str, tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, a row of `sizes.json`."""
        inputs = {name: list(shape) for name, shape in self.inputs.items()}
        return {"name": self.name, "function": self.function, "package": self.package, "inputs": inputs}


@dataclass(frozen=True)
class Padding:
    """How inputs between two sizes are padded.

    Attributes:
        inputs: input -> the axis that is padded at its end.
        outputs: output -> the axis that is cropped. The padding does not change other outputs.
        why_not: why you may not pad inputs; "" if you may.
        fill: input -> the number to pad with; 0 by default.
        hiding: mask input -> true if the mask must keep the first position of each row; false if it may keep
            any one position instead.
        spread: masked positions get zero weight only while the attention scores in a row span no more than
            this; null if there is no limit.
        shares: output -> how many input positions make one output position; 1 by default.
        multiple: the length must be a multiple of this.
        more: the same entries for each additional length, if several lengths vary (height and width). Pad
            one axis at a time, in this order.
        others: other lengths, which you may not pad, and why.
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
    def by_length(self) -> tuple[Padding, ...]:
        """The padding of each length, this one first; empty if inputs may not be padded."""
        return () if self.why_not else (self, *self.more)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, a part of `sizes.json`."""
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
        words = [one._in_words(f" along {axes_in_words(one.inputs)}") for one in self.by_length]
        return "; ".join([*words, *([f"not padded along {self.others}"] if self.others else [])])

    def _in_words(self, along: str) -> str:
        """Return in words how one length is padded."""
        words = f"padded at the end{along}"
        words += f" to a multiple of {self.multiple}" if self.multiple > 1 else ""
        if self.spread is None:
            return f"{words}, proved"
        return f"{words}, proved as long as the attention scores in a row differ by at most {self.spread:g}"


@dataclass(frozen=True)
class SizedCall:
    """The size to call for some inputs."""

    row: SizeRow
    """The size."""
    values: Mapping[str, Any]
    """The inputs as they were given, or padded."""
    lengths: tuple[int, ...] = ()
    """For each entry of `Padding.by_length`, the length to crop outputs to; () if nothing was padded."""

    def cropped(self, name: str, value: Any, padding: Padding) -> Any:
        """Return an output without the padding."""
        if not self.lengths:
            return value
        for length, one in zip(self.lengths, padding.by_length, strict=True):
            if name in one.outputs:
                cropped = length // one.shares.get(name, 1)
                value = value[(slice(None),) * one.outputs[name] + (slice(cropped),)]
        return value


PADDING_FIELDS = tuple(one.name for one in fields(Padding))


def index_text(rows: Sequence[SizeRow], padding: Padding) -> str:
    """Return the text of `sizes.json`."""
    sizes = [row.to_json() for row in rows]
    content = {"format": FORMAT, "version": VERSION, "sizes": sizes, "padding": padding.to_json()}
    return json.dumps(content, indent=2) + "\n"


def is_sized(path: Path) -> bool:
    """Is a path a folder of sizes?"""
    return (path / INDEX).is_file()


def read(folder: Path) -> tuple[tuple[SizeRow, ...], Padding]:
    """Read the sizes in a folder, and how inputs between them are padded.

    Raises:
        LoadError: `sizes.json` is damaged, or of another version.
    """
    file = folder / INDEX
    try:
        content = read_json(file)
        if content["format"] != FORMAT or content["version"] not in FIELDS_OF_VERSION:
            raise LoadError(
                f"{file} is of {content['format']} {content['version']}; this reads {FORMAT} {VERSION}"
            )
        rows = tuple(_row(row) for row in content["sizes"])
        keys = PADDING_FIELDS[: FIELDS_OF_VERSION[content["version"]]]
        padding = _padding(content["padding"], keys)
    except DAMAGED as error:
        raise LoadError(f"{file} is damaged: {type(error).__name__}: {error}; make the sizes again") from error
    if not rows:
        raise LoadError(f"{file} names no sizes; make the sizes again")
    return rows, padding


def _padding(given: Any, keys: Sequence[str]) -> Padding:
    """Return the padding of a parsed `sizes.json`, with the fields that its version has."""
    values = {key: given[key] for key in keys}
    return Padding(**{**values, "more": tuple(_padding(one, keys) for one in values.get("more", ()))})


def _row(row: Any) -> SizeRow:
    package = str(row["package"])
    if Path(package).name != package:
        raise ValueError(f"the package {package!r} is not in the folder")
    inputs = {str(name): tuple(int(n) for n in shape) for name, shape in row["inputs"].items()}
    return SizeRow(str(row["name"]), row["function"], package, inputs)


def choose_call(
    rows: Sequence[SizeRow], padding: Padding, values: Mapping[str, Any], name: str | None = None
) -> SizedCall:
    """Choose the size with a name, or the size for the shapes of some values, padding them if allowed.

    Raises:
        InterpretError: no size takes these shapes.
        UnknownName: no size has the name.
    """
    if name is not None:
        named = {row.name: row for row in rows}
        if name not in named:
            raise UnknownName("size", name, named)
        return SizedCall(named[name], values)
    shapes = {key: tuple(np.shape(value)) for key, value in values.items()}
    for row in rows:
        actual = shapes | _picture_shapes(row, values)
        if all(actual.get(key) == shape for key, shape in row.inputs.items()):
            return SizedCall(row, values)
    if empty := [key for key in rows[0].inputs if 0 in shapes.get(key, ())]:
        raise InterpretError(f"{in_words({empty[0]: shapes[empty[0]]})} is empty; give at least one place")
    by_length = () if _picture_shapes(rows[0], values) else padding.by_length
    for row in rows:
        lengths = _lengths_to_pad(row, shapes, by_length) if by_length else None
        if lengths is not None:
            return SizedCall(row, _padded_values(row, values, by_length), lengths)
    offered = "; ".join(f"{row.name} takes {in_words(row.inputs)}" for row in rows)
    shapes_in_words = in_words({key: shapes[key] for key in rows[0].inputs if key in shapes}) or "none of them"
    raise InterpretError(
        f"no size takes the inputs given ({shapes_in_words}): {offered}{_why_not(padding)}; make that size too"
    )


def _why_not(padding: Padding) -> str:
    """Return in words which lengths are not padded, and why."""
    words = f", and it is not padded: {padding.why_not}" if padding.why_not else ""
    words += f", and it is not padded along {padding.others}" if padding.others else ""
    for one in padding.by_length:
        if one.multiple > 1:
            words += f", and only lengths that are multiples of {one.multiple} are padded, to sizes that are"
    return words


def _picture_shapes(row: SizeRow, values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that PIL pictures have as inputs: leading axes of the size, then height and width."""
    given: dict[str, Any] = {key: values[key] for key in row.inputs if key in values}
    pictures = {key: value for key, value in given.items() if hasattr(value, "mode")}
    return {key: (*row.inputs[key][:-2], *picture.size[::-1]) for key, picture in pictures.items()}


def _lengths_to_pad(
    row: SizeRow, shapes: Mapping[str, tuple[int, ...]], by_length: Sequence[Padding]
) -> tuple[int, ...] | None:
    """Return the length of the inputs for each padding, if padding gives the shapes of a size; else None."""
    padded, lengths = {key: list(shape) for key, shape in shapes.items()}, list[int]()
    for one in by_length:
        long_enough = {key: axis for key, axis in one.inputs.items() if len(padded.get(key, ())) > axis}
        given_lengths = {padded[key][axis] for key, axis in long_enough.items()}
        size_lengths = {row.inputs[key][axis] for key, axis in one.inputs.items()}
        if len(given_lengths) != 1 or len(size_lengths) != 1:
            return None
        (length,), (size,) = given_lengths, size_lengths
        if not 0 < length <= size or (length < size and (length % one.multiple or size % one.multiple)):
            return None
        for key, axis in one.inputs.items():
            if key not in padded or len(padded[key]) <= axis:
                return None
            padded[key][axis] = size
        lengths.append(length)
    return tuple(lengths) if all(padded.get(k) == list(s) for k, s in row.inputs.items()) else None


def _padded_values(row: SizeRow, values: Mapping[str, Any], by_length: Sequence[Padding]) -> dict[str, Any]:
    """Return the values padded to a size, along one length after the other.

    Raises:
        InterpretError: a mask hides positions that must be real.
    """
    padded = dict(values)
    for one in by_length:
        if all(np.shape(padded[key])[axis] == row.inputs[key][axis] for key, axis in one.inputs.items()):
            continue
        _check_not_masked(padded, one)
        for key, axis in one.inputs.items():
            array, fill = np.asarray(padded[key]), one.fill.get(key, 0)
            array = array if _holds(array.dtype, fill) else array.astype(np.float32)
            amounts = [(0, 0)] * array.ndim
            amounts[axis] = (0, row.inputs[key][axis] - array.shape[axis])
            padded[key] = np.pad(array, amounts, constant_values=np.asarray(fill, array.dtype))
    return padded


def _holds(dtype: np.dtype[Any], number: float) -> bool:
    """Return whether a dtype holds a number; floats count as holding any."""
    if dtype.kind not in "iu":
        return dtype.kind != "b" or number in (0, 1)
    return np.iinfo(dtype).min <= number <= np.iinfo(dtype).max and number == int(number)


def _check_not_masked(values: Mapping[str, Any], padding: Padding) -> None:
    """Refuse a mask with a row that hides every position, since the padding would get weight in it.

    Raises:
        InterpretError: a row hides every position, or its first one if `hiding` asks for that.
    """
    for key, needs_first in padding.hiding.items():
        array, fill, axis = np.asarray(values[key]), padding.fill.get(key, 0), padding.inputs[key]
        is_real = array > fill / 2 if fill < 0 else array != fill
        if not (is_real.take(0, axis) if needs_first else is_real.any(axis)).all():
            words = "the first place of a row" if needs_first else "a whole row"
            raise InterpretError(
                f"{key} hides {words}, so that these inputs cannot be filled up to another size; make the size "
                f"{in_words({name: np.shape(values[name]) for name in padding.inputs})} too"
            )


def in_words(shapes: Mapping[str, Sequence[int]]) -> str:
    """Return shapes in words: "ids 1x64, mask 1x64"."""
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())


def axes_in_words(axes: Mapping[str, int]) -> str:
    """Return axes in words: "axis 1 of ids, axis 1 of mask"."""
    return ", ".join(f"axis {axis} of {name}" for name, axis in axes.items())

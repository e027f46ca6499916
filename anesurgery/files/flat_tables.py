"""Tables of a FlatBuffers file, read where they lie; a place outside the file is an error."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from anesurgery.errors import LoadError

UINT8, UINT16, UINT32, UINT64, INT32 = map(struct.Struct, ("<B", "<H", "<I", "<Q", "<i"))


@dataclass(frozen=True)
class Table:
    """A table at a place of a file.

    Attributes:
        data: the whole file, as bytes or mapped.
        at: where the table begins.
    """

    data: Any
    at: int

    @classmethod
    def root(cls, data: Any) -> Table:
        """The table that a file begins with."""
        return cls(data, read(UINT32, data, 0))

    def number(self, field: int, kind: struct.Struct = UINT32) -> int:
        """A number; 0, the default of every field here, where it is absent."""
        place = self._place(field)
        return 0 if place is None else read(kind, self.data, place)

    def table(self, field: int) -> Table | None:
        """Another table, or None where it is absent."""
        place = self._place(field)
        return None if place is None else Table(self.data, _target(self.data, place))

    def tables(self, field: int) -> list[Table]:
        """A vector of tables; empty where it is absent."""
        start, count = self.vector(field, 4)
        return [Table(self.data, _target(self.data, start + 4 * i)) for i in range(count)]

    def text(self, field: int) -> str:
        """A text; empty where it is absent."""
        start, count = self.vector(field, 1)
        return bytes(self.data[start : start + count]).decode("utf-8")

    def vector(self, field: int, width: int) -> tuple[int, int]:
        """Where a vector begins, and its count of elements of `width` bytes; (0, 0) where it is absent."""
        place = self._place(field)
        if place is None:
            return 0, 0
        place = _target(self.data, place)
        count = read(UINT32, self.data, place)
        check_bounds(self.data, place + 4, count * width)
        return place + 4, count

    def _place(self, field: int) -> int | None:
        """Where the value of a field lies, by the list of places that belongs to the table."""
        places = self.at - read(INT32, self.data, self.at)
        entry = 4 + 2 * field
        if entry + 2 > read(UINT16, self.data, places):
            return None
        return self.at + offset if (offset := read(UINT16, self.data, places + entry)) else None


def _target(data: Any, place: int) -> int:
    """Where an offset leads to, which counts from its own place."""
    return place + read(UINT32, data, place)


def read(kind: struct.Struct, data: Any, at: int) -> int:
    """A number at a place.

    Raises:
        LoadError: the place is outside.
    """
    check_bounds(data, at, kind.size)
    return int(kind.unpack_from(data, at)[0])


def check_bounds(data: Any, at: int, size: int) -> None:
    """See that bytes lie in a file.

    Raises:
        LoadError: they do not.
    """
    if at < 0 or at + size > len(data):
        raise LoadError(f"{size} bytes at {at} are outside of its {len(data)}")

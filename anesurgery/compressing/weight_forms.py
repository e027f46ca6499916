"""The names of the forms that a weight can be stored in, and what each asks of the weight and of the system.

``int4``, ``int8``, ``palette3``, ``palette3-group-16`` (a table for each 16 output channels),
``palette6-vector-2`` (an entry holds the numbers of two output channels), ``sparse-50`` (half of the numbers
are 0 and not stored), ``sparse-50-int8`` and ``sparse-50-palette4``; ``zeros-50`` stores the zeros too, as
plain numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from anesurgery.errors import SurgeryError

IOS16, IOS18 = 7, 9
"""Specification versions. The second is that of scales of any shape, numbers of 4 bits, tables for groups,
vectors, and zeros beside another form."""
BITS = {"int": (4, 8), "palette": (1, 2, 3, 4, 6, 8)}
NAME = re.compile(
    r"(?:(?P<way>sparse|zeros)-(?P<zeros>\d{1,2}))?(?P<sep>-)?(?:(?P<kind>int|palette)(?P<bits>\d))?"
    r"(?:-(?P<shape>group|vector)-(?P<size>\d{1,4}))?"
)
EXAMPLES = (
    "int4, int8, palette4, palette3-group-16, palette6-vector-2, sparse-50, "
    "sparse-50-int8, sparse-50-palette4, zeros-75"
)
LEAST_GROUP = 4
"""Output channels that share a table: fewer were slow (coremltools guide: OPT-1.3B, A17, iOS 18)."""
MOST_VECTOR = 8
"""Output channels of a vector: with the widest indices, of 8 bits, a number has one bit then."""


@dataclass(frozen=True)
class WeightForm:
    """What a name says."""

    kind: str
    """"int", "palette", or "" of plain numbers."""
    bits: int
    """Of a code, or of a plain number."""
    zeros: int = 0
    """Per cent."""
    group: int = 0
    """Output channels that share a table; 0 where all do."""
    vector: int = 1
    """Output channels whose numbers an entry of the table holds."""
    stored: bool = False
    """Are the zeros stored, as numbers like the others?"""

    @property
    def evidence(self) -> str:
        """What published pairs of times call it."""
        inner = {"int": f"int{self.bits}", "palette": "palette"}.get(self.kind, "")
        if self.zeros:
            return "zeros" if self.stored else f"sparse {inner}".strip()
        return f"vector {inner}" if self.vector > 1 else inner

    @property
    def version(self) -> int:
        """The least specification version that has it."""
        joined = bool(self.zeros and self.kind) or self.group > 0 or self.vector > 1
        newer = joined or (self.kind, self.bits) in (("int", 4), ("palette", 3))
        return IOS18 if newer else IOS16

    def unfit(self, channels: int, together: int) -> str:
        """Why a weight cannot have it; empty where it can.

        Args:
            channels: its output channels.
            together: those that meet the same inputs.
        """
        if self.group and channels % self.group:
            return f"its {channels} output channels are no multiple of groups of {self.group}"
        if together % self.vector:
            return f"{together} output channels, which meet the same inputs, are no multiple of {self.vector}"
        return ""


@lru_cache(maxsize=256)
def read_form(name: str) -> WeightForm:
    """The form of a name.

    Raises:
        SurgeryError: there is none.
    """
    parts = NAME.fullmatch(name)
    form = parts and _form(parts)
    if not form:
        raise SurgeryError(f"there is no form {name!r}; forms are such as {EXAMPLES}")
    return form


def _form(parts: re.Match[str]) -> WeightForm | None:
    zeros, kind, bits = int(parts["zeros"] or 0), parts["kind"] or "", int(parts["bits"] or 16)
    plain, shape, size = not kind, parts["shape"], int(parts["size"] or 0)
    if (plain and (not zeros or shape)) or (kind and bits not in BITS[kind]):
        return None
    if bool(parts["sep"]) != bool(zeros and kind) or (parts["zeros"] is not None and not zeros):
        return None
    if (shape and (kind != "palette" or zeros)) or (parts["way"] == "zeros" and kind):
        return None
    if (shape == "group" and size < LEAST_GROUP) or (shape == "vector" and not 2 <= size <= MOST_VECTOR):
        return None
    group, vector = (size if shape == each else least for each, least in (("group", 0), ("vector", 1)))
    return WeightForm(kind, bits, zeros, group, vector, parts["way"] == "zeros")

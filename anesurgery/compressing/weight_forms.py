"""The forms that a weight can be stored in: their names, what each asks for, and which is fast on which chip.

``int4``, ``int8``, ``palette3``, ``palette3-group-16`` (a table for each 16 output channels),
``palette6-vector-2`` (an entry holds the numbers of two output channels), ``sparse-50`` (half of the numbers
are 0 and not stored), ``sparse-50-int8`` and ``sparse-50-palette4``; ``zeros-50`` stores the zeros too, as
plain numbers.

A form counts as slower than fp16 if it was measured slower, in published times, on the same generation of the
engine, for products with the same bound. If nothing was measured, the report says so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from anesurgery.errors import SurgeryError
from anesurgery.placement.target import Target, family_of
from anesurgery.placement.timing import FEW, TABLE

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


PAIRS = TABLE.with_name("time_pairs.json")
"""Published times of two forms of one thing."""
KINDS = ("int4", "int8", "palette", "sparse")
"""What the weights that are corrected can be stored as, as the published pairs call it."""
ZEROS = "zeros"
"""Zeros that are stored as plain numbers."""
W8A8 = "w8a8"
"""Weights and what they are multiplied with in 8 bits, as the published pairs call it."""
PURPOSES = ("size", "speed")
READING, COMPUTING = "reading", "compute"
POSITIONS = {READING: "few positions", COMPUTING: "many positions"}
"""What bounds a product, by what it has of positions."""


def form_ratio(pair: Mapping[str, Any]) -> float:
    """The time after over the time before."""
    slower = pair["after"] / pair["before"]
    return 1 / slower if pair["unit"] == "positions/s" else slower


@dataclass(frozen=True)
class Evidence:
    """One published pair of times."""

    form: str
    """One of `KINDS`, or `ZEROS`."""
    bits: int
    bound: str
    """By "reading" the weights, in products of few positions, or by "compute"."""
    chip: str
    os: str
    """Empty where none was published."""
    positions: int
    speed: float
    """Relative to fp16; above 1 is faster."""
    what: str
    source: str
    zeros: float = 0
    """Per cent of the numbers."""

    @property
    def family(self) -> int:
        """The generation of the engine."""
        return family_of(self.chip)

    def __str__(self) -> str:
        where = f"{self.chip}, {self.os}" if self.os else self.chip
        return f"{self.form} at {self.speed:.2f} times the speed of fp16 ({where}; {self.what}; {self.source})"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))


@lru_cache(maxsize=1)
def evidence() -> tuple[Evidence, ...]:
    """All that was published of the forms."""
    return _published(KINDS)


@lru_cache(maxsize=4)
def _published(kinds: tuple[str, ...]) -> tuple[Evidence, ...]:
    pairs = [p for p in json.loads(PAIRS.read_text(encoding="utf-8")) if p["what"] in kinds]
    return tuple(
        Evidence(
            ZEROS if p.get("plain") else p["what"],
            p.get("bits", 8),
            p["of"],
            p["chip"],
            p.get("os", ""),
            p["rows"],
            1 / form_ratio(p),
            p["note"],
            p["source"],
            p.get("zeros", 0),
        )
        for p in pairs
    )


@dataclass(frozen=True)
class Choice:
    """The form of a weight, and why."""

    form: str | None
    """Such as "int4" or "palette3"; None: it stays as it is."""
    why: str
    inputs: bool = False
    """Are the inputs of its ops to be 8 bits too?"""


def bounds_of(positions: Iterable[int]) -> frozenset[str]:
    """What bounds the products of a weight, each of so many positions."""
    return frozenset(READING if count <= FEW else COMPUTING for count in positions)


def choose(
    bits: int, target: Target, bounds: frozenset[str], version: int, purpose: str, rows: Sequence[Evidence] = ()
) -> Choice:
    """The form of a weight.

    Args:
        bits: that are asked for; for speed a form may have more.
        target: chips.
        bounds: what bounds the products that read it.
        version: of the specification: int4, and palettes of 3 bits, begin at iOS 18.
        purpose: "speed" takes no form that is slower by the evidence; "size" takes a palette.
        rows: the evidence; all that was published by default.
    """
    levels = [[f for f in level if version >= read_form(f).version] for level in _levels(bits, purpose)]
    if not any(levels):
        return Choice(None, f"{bits} bits need iOS 18; convert the model for that, or take 4 or 8")
    if purpose == "size":
        return Choice(levels[0][0], "size alone was asked for")
    slow: list[str] = []
    for level in levels:
        known: list[tuple[float, str, str]] = []
        unknown: list[str] = []
        for form in level:
            here = _of(form, bounds, target.families, rows or evidence())
            worst = min(here, key=lambda one: one.speed, default=None)
            if worst is not None and worst.speed < 1:
                slow.append(str(worst))
            elif worst is not None and _covers(form, here, bounds, target):
                known.append((worst.speed, form, str(worst)))
            elif all(one.speed >= 1 for one in _of(form, bounds, None, rows or evidence())):
                unknown.append(form)
        fewer = _fewer(bits, level, slow) if known or unknown else ""
        if known:
            return Choice(max(known)[1], f"{max(known)[2]}{fewer}")
        if unknown:
            return Choice(unknown[0], f"{_unknown(target, bounds)}{fewer}")
    return Choice(
        None, f"slower than fp16: {'; '.join(slow)}" if slow else "each form is slower on other chips"
    )


def _unknown(target: Target, bounds: frozenset[str]) -> str:
    """Why a form is taken of which nothing was published."""
    products = " and ".join(POSITIONS[bound] for bound in sorted(bounds))
    return f"no speed was published on {target.name} for products of {products}"


def _fewer(bits: int, level: Sequence[str], slow: Sequence[str]) -> str:
    """Why a weight has more bits than were asked for; "" where it has not."""
    if level[0].endswith(str(bits)):
        return ""
    reason = (
        f"slower than fp16 ({'; '.join(slow)})"
        if slow
        else "slower than fp16 on other chips, or newer than the opset"
    )
    return f'; forms of {bits} bits are {reason}: for_="size" takes one'


REPORTS = {
    ("sparse palette", "A19"): "a palette with zeros was slower than one without (john-rocky/CoreML-LLM)"
}
"""What was published without a time: (form, chip) -> words."""


def choose_form(
    name: str, target: Target, bounds: frozenset[str], version: int, purpose: str, rows: Sequence[Evidence] = ()
) -> Choice:
    """A form that was asked for by name.

    Args:
        name: such as "sparse-50-palette4".
        target: chips.
        bounds: what bounds the products that read the weight.
        version: of the specification.
        purpose: "speed" refuses a form that is slower by the evidence; "size" says so.
        rows: the evidence; all that was published by default.
    """
    form, here = read_form(name), _of(name, bounds, target.families, rows or evidence())
    if version < form.version:
        return Choice(None, f"{name} needs iOS 18; convert the model for that")
    slow = [str(one) for one in here if one.speed < 1]
    chips = {family_of(chip): words for (kind, chip), words in REPORTS.items() if kind == form.evidence}
    slow += [f"{words}, on this engine" for family, words in chips.items() if family in target.families]
    if slow and purpose == "speed":
        return Choice(None, f'slower than fp16: {"; ".join(slow)}: for_="size" takes it')
    if slow:
        return Choice(name, f"asked for, though slower: {'; '.join(slow)}")
    if here and _covers(name, here, bounds, target):
        return Choice(name, str(min(here, key=_speed)))
    return Choice(name, f"asked for; {_unknown(target, bounds)}")


def choose_activations(
    target: Target, bounds: frozenset[str], purpose: str, rows: Sequence[Evidence] = ()
) -> Choice:
    """Weights and inputs of 8 bits, unless published times call that slower on average.

    Args:
        target: chips.
        bounds: what bounds the products that read the weight.
        purpose: "speed" or "size".
        rows: the evidence; all that was published by default.
    """
    here = _of(W8A8, bounds, target.families, rows or _published((W8A8,)))
    if not here:
        return Choice("int8", f"asked for; nothing is known of the speed of {W8A8} on {target.name}", True)
    speeds = [one.speed for one in here]
    mean, least, most = math.exp(fmean(map(math.log, speeds))), min(here, key=_speed), max(here, key=_speed)
    words = f"{W8A8} is {mean:.2f} times as fast as fp16 on average ({least}; {most})"
    wanted = mean >= 1 or purpose == "size"
    return Choice("int8" if wanted else None, words, wanted)


def _speed(one: Evidence) -> float:
    return one.speed


def _covers(form: str, rows: Sequence[Evidence], bounds: frozenset[str], target: Target) -> bool:
    """Was a form of no fewer bits measured on each generation of the target, for these products?"""
    asked = read_form(form)
    alike = [one for one in rows if one.zeros <= asked.zeros and (asked.zeros or one.bits >= asked.bits)]
    seen = {(one.family, one.bound) for one in alike}
    return all((family, each) in seen for family in target.families for each in bounds)


def _levels(bits: int, purpose: str) -> list[list[str]]:
    """The forms of so many bits, then for speed those of more."""
    if purpose == "size":
        return [[f"{kind}{bits}" for kind in ("palette", "int") if bits in BITS[kind]]]
    counts = sorted({n for some in BITS.values() for n in some if n >= bits})
    return [[f"{kind}{n}" for kind in ("int", "palette") if n in BITS[kind]] for n in counts]


def _of(
    form: str, bounds: frozenset[str], families: frozenset[int] | None, rows: Sequence[Evidence]
) -> list[Evidence]:
    kind = form if form == W8A8 else read_form(form).evidence
    return [
        one
        for one in rows
        if one.form == kind and one.bound in bounds and (families is None or one.family in families)
    ]


def unknown_chips(forms: Iterable[str], target: Target) -> list[str]:
    """The chips of a target for which nothing was published of a form."""
    found = []
    for form in sorted(set(forms)):
        known = {one.family for one in _of(form, frozenset((READING, COMPUTING)), None, evidence())}
        chips = [chip for chip in target.chips if family_of(chip) not in known]
        if chips:
            found.append(f"no speed of {form} was published for {', '.join(chips)}")
    return found

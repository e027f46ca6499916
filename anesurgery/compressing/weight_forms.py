"""The forms that a weight can be stored in: their names, what each needs, and which is fast on which chip.

``int4``, ``int8``, ``palette3``, ``palette3-group-16`` (one table for every 16 output channels),
``palette6-vector-2`` (an entry holds the numbers of two output channels), ``sparse-50`` (half of the numbers
are 0 and not stored), ``sparse-50-int8`` and ``sparse-50-palette4``; ``zeros-50`` stores the zeros too, as
plain numbers.

`choose` decides by published times. A form counts as slower than fp16 if it was measured slower on the same
generation of the engine, for products with the same bound: by reading the weights, if there are few positions,
or else by computing. If nothing was measured, the report says so.
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
"""Specification versions. iOS 18 brings scales of any shape, numbers of 4 bits, tables for groups of channels,
vectors, and zeros beside another form."""
BITS = {"int": (4, 8), "palette": (1, 2, 3, 4, 6, 8)}
"""The kind of a form -> the bits that it may have."""
NAME = re.compile(
    r"(?:(?P<way>sparse|zeros)-(?P<zeros>\d{1,2}))?(?P<sep>-)?(?:(?P<kind>int|palette)(?P<bits>\d))?"
    r"(?:-(?P<shape>group|vector)-(?P<size>\d{1,4}))?"
)
EXAMPLES = (
    "int4, int8, palette4, palette3-group-16, palette6-vector-2, sparse-50, "
    "sparse-50-int8, sparse-50-palette4, zeros-75"
)
LEAST_GROUP = 4
"""The fewest output channels that may share a table: fewer were slow (coremltools guide: OPT-1.3B, A17, iOS
18)."""
MOST_VECTOR = 8
"""The most output channels of a vector. With the widest indices, of 8 bits, a number then takes one bit."""


@dataclass(frozen=True)
class WeightForm:
    """A form, as its name describes it."""

    kind: str
    """"int" or "palette"; "" for plain numbers."""
    bits: int
    """The bits of a code, or of a plain number."""
    zeros: int = 0
    """The per cent of numbers that are 0."""
    group: int = 0
    """The number of output channels that share a table; 0 if all do."""
    vector: int = 1
    """The number of output channels whose numbers share an entry of the table."""
    stored: bool = False
    """Are the zeros stored like the other numbers?"""

    @property
    def evidence(self) -> str:
        """The name of the form in the published times (`weight_forms`), such as "sparse palette"."""
        inner = {"int": f"int{self.bits}", "palette": "palette"}.get(self.kind, "")
        if self.zeros:
            return "zeros" if self.stored else f"sparse {inner}".strip()
        return f"vector {inner}" if self.vector > 1 else inner

    @property
    def version(self) -> int:
        """The first specification version that has the form."""
        joined = bool(self.zeros and self.kind) or self.group > 0 or self.vector > 1
        newer = joined or (self.kind, self.bits) in (("int", 4), ("palette", 3))
        return IOS18 if newer else IOS16

    def unfit(self, channels: int, together: int) -> str:
        """Return why a weight cannot have this form; empty where it can.

        Args:
            channels: the number of its output channels.
            together: the number of output channels that meet the same inputs.
        """
        if self.group and channels % self.group:
            return f"its {channels} output channels are no multiple of groups of {self.group}"
        if together % self.vector:
            return f"{together} output channels, which meet the same inputs, are no multiple of {self.vector}"
        return ""


@lru_cache(maxsize=256)
def read_form(name: str) -> WeightForm:
    """Return the form of a name.

    Raises:
        SurgeryError: there is no such form.
    """
    parts = NAME.fullmatch(name)
    form = parts and _form(parts)
    if not form:
        raise SurgeryError(f"there is no form {name!r}; forms are such as {EXAMPLES}")
    return form


def _form(parts: re.Match[str]) -> WeightForm | None:
    """Return the form of a name that matches `NAME`; None if it combines what no form has."""
    zeros, kind, bits = int(parts["zeros"] or 0), parts["kind"] or "", int(parts["bits"] or 16)
    is_plain, shape, size = not kind, parts["shape"], int(parts["size"] or 0)
    if is_plain and (not zeros or shape):  # plain numbers are a form only beside zeros, and have no tables
        return None
    if not is_plain and bits not in BITS[kind]:
        return None
    if bool(parts["sep"]) != bool(zeros and kind) or (parts["zeros"] is not None and not zeros):
        return None
    if (shape and (kind != "palette" or zeros)) or (parts["way"] == "zeros" and kind):
        return None
    if (shape == "group" and size < LEAST_GROUP) or (shape == "vector" and not 2 <= size <= MOST_VECTOR):
        return None
    group = size if shape == "group" else 0
    vector = size if shape == "vector" else 1
    return WeightForm(kind, bits, zeros, group, vector, parts["way"] == "zeros")


# Which form is fast on which chip.

PAIRS = TABLE.with_name("time_pairs.json")
"""Published times of the same thing in two forms."""
KINDS = ("int4", "int8", "palette", "sparse")
"""The names in the published pairs of the forms that `compress` can store."""
ZEROS = "zeros"
"""The name here of zeros that are stored as plain numbers."""
W8A8 = "w8a8"
"""The name in the published pairs of 8-bit weights and inputs."""
PURPOSES = ("size", "speed")
READING, COMPUTING = "reading", "compute"
POSITIONS = {READING: "few positions", COMPUTING: "many positions"}
"""Bound of a product -> how many positions such products have, in words."""


def form_ratio(pair: Mapping[str, Any]) -> float:
    """Return the time after over the time before; some pairs give speeds."""
    slower = pair["after"] / pair["before"]
    return 1 / slower if pair["unit"] == "positions/s" else slower


@dataclass(frozen=True)
class Evidence:
    """One published pair of times."""

    form: str
    """One of `KINDS`, or `ZEROS`."""
    bits: int
    bound: str
    """What bounds the time: "reading" the weights, for products of few positions, or "compute"."""
    chip: str
    os: str
    """Empty where none was published."""
    positions: int
    speed: float
    """The speed relative to fp16; above 1 is faster."""
    what: str
    source: str
    zeros: float = 0
    """The per cent of the numbers that are 0."""

    @property
    def family(self) -> int:
        """The generation of the engine."""
        return family_of(self.chip)

    def __str__(self) -> str:
        where = f"{self.chip}, {self.os}" if self.os else self.chip
        return f"{self.form} at {self.speed:.2f} times the speed of fp16 ({where}; {self.what}; {self.source})"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return dict(vars(self))


@lru_cache(maxsize=1)
def evidence() -> tuple[Evidence, ...]:
    """Return all published pairs with forms of weights."""
    return _published(KINDS)


@lru_cache(maxsize=4)
def _published(kinds: tuple[str, ...]) -> tuple[Evidence, ...]:
    """Return the published pairs of some kinds."""
    pairs = [p for p in json.loads(PAIRS.read_text(encoding="utf-8")) if p["what"] in kinds]
    return tuple(
        Evidence(
            form=ZEROS if p.get("plain") else p["what"],
            bits=p.get("bits", 8),
            bound=p["of"],
            chip=p["chip"],
            os=p.get("os", ""),
            positions=p["rows"],
            speed=1 / form_ratio(p),
            what=p["note"],
            source=p["source"],
            zeros=p.get("zeros", 0),
        )
        for p in pairs
    )


@dataclass(frozen=True)
class Choice:
    """The form of a weight, and why."""

    form: str | None
    """The name of a form, such as "int4" or "palette3"; None: the weight stays as it is."""
    why: str
    inputs: bool = False
    """Are the inputs of its ops quantized to 8 bits too?"""


def bounds_of(positions: Iterable[int]) -> frozenset[str]:
    """Return what bounds the products of a weight, given the number of positions of each."""
    return frozenset(READING if count <= FEW else COMPUTING for count in positions)


def choose(
    bits: int, target: Target, bounds: frozenset[str], version: int, purpose: str, rows: Sequence[Evidence] = ()
) -> Choice:
    """Choose the form of a weight.

    For speed it is, of the forms with as few bits as possible, the fastest that is known not to be slower than
    fp16 on this target; or else one that was not measured there, if it was never slower elsewhere.

    Args:
        bits: that were asked for; for speed a form may have more.
        target: chips.
        bounds: what bounds the products that read it.
        version: the specification version: int4 and palettes of 3 bits begin at iOS 18.
        purpose: "speed" takes no form that was measured slower; "size" takes a palette.
        rows: the evidence; all published pairs by default.
    """
    levels = [[f for f in level if version >= read_form(f).version] for level in _levels(bits, purpose)]
    if not any(levels):
        return Choice(None, f"{bits} bits need iOS 18; convert the model for that, or take 4 or 8")
    if purpose == "size":
        return Choice(levels[0][0], "size alone was asked for")
    slow: list[str] = []
    for level in levels:
        fast: list[tuple[float, str, str]] = []
        unknown: list[str] = []
        for form in level:
            here = _evidence_of(form, bounds, target.families, rows or evidence())
            worst = min(here, key=_speed, default=None)
            if worst is not None and worst.speed < 1:
                slow.append(str(worst))
            elif worst is not None and _covers(form, here, bounds, target):
                fast.append((worst.speed, form, str(worst)))
            elif all(one.speed >= 1 for one in _evidence_of(form, bounds, None, rows or evidence())):
                unknown.append(form)
        fewer = _why_not_fewer(bits, level, slow) if fast or unknown else ""
        if fast:
            _, form, words = max(fast)
            return Choice(form, f"{words}{fewer}")
        if unknown:
            return Choice(unknown[0], f"{_unmeasured(target, bounds)}{fewer}")
    return Choice(
        None, f"slower than fp16: {'; '.join(slow)}" if slow else "each form is slower on other chips"
    )


def _unmeasured(target: Target, bounds: frozenset[str]) -> str:
    """Return the reason for a form that was not measured on this target."""
    products = " and ".join(POSITIONS[bound] for bound in sorted(bounds))
    where = "any chip" if target.name == "any" else target.name
    return f"no speed was published on {where} for layers of {products}"


def _why_not_fewer(bits: int, level: Sequence[str], slow: Sequence[str]) -> str:
    """Return why a weight gets more bits than were asked for; empty where it does not."""
    if level[0].endswith(str(bits)):
        return ""
    reason = "slower than fp16 on other chips, or newer than the opset"
    if slow:
        reason = f"slower than fp16 ({'; '.join(slow)})"
    return f'; forms of {bits} bits are {reason}: for_="size" takes one'


REPORTS = {
    ("sparse palette", "A19"): "a palette with zeros was slower than one without (john-rocky/CoreML-LLM)"
}
"""(form, chip) -> a published finding without a time."""


def choose_form(name: str, target: Target, bounds: frozenset[str], version: int, purpose: str) -> Choice:
    """Check a form that was asked for by name, such as "sparse-50-palette4"; see `choose`.

    "speed" refuses a form that was measured slower; "size" takes it and says so.
    """
    form, here = read_form(name), _evidence_of(name, bounds, target.families, evidence())
    if version < form.version:
        return Choice(None, f"{name} needs iOS 18; convert the model for that")
    slow = [str(one) for one in here if one.speed < 1]
    reports = {family_of(chip): words for (kind, chip), words in REPORTS.items() if kind == form.evidence}
    slow += [f"{words}, on this engine" for family, words in reports.items() if family in target.families]
    if slow and purpose == "speed":
        return Choice(None, f'slower than fp16: {"; ".join(slow)}: for_="size" takes it')
    if slow:
        return Choice(name, f"asked for, though slower: {'; '.join(slow)}")
    if here and _covers(name, here, bounds, target):
        return Choice(name, str(min(here, key=_speed)))
    return Choice(name, f"asked for; {_unmeasured(target, bounds)}")


def choose_activations(target: Target, bounds: frozenset[str], purpose: str) -> Choice:
    """Choose 8 bits for weights and inputs, unless the published times are slower on average (geometric mean).

    The arguments are those of `choose`.
    """
    here = _evidence_of(W8A8, bounds, target.families, _published((W8A8,)))
    if not here:
        return Choice("int8", f"asked for; nothing is known of the speed of {W8A8} on {target.name}", True)
    mean = math.exp(fmean(math.log(one.speed) for one in here))
    slowest, fastest = min(here, key=_speed), max(here, key=_speed)
    words = f"{W8A8} is {mean:.2f} times as fast as fp16 on average ({slowest}; {fastest})"
    is_chosen = mean >= 1 or purpose == "size"
    return Choice("int8" if is_chosen else None, words, is_chosen)


def _speed(one: Evidence) -> float:
    """Return the sort key of pairs by speed."""
    return one.speed


def _covers(form: str, rows: Sequence[Evidence], bounds: frozenset[str], target: Target) -> bool:
    """Was the form, or a slower one, measured on each generation of the target and for each bound?

    Slower is one with fewer zeros, or a dense one of more bits.
    """
    asked = read_form(form)
    counting = [one for one in rows if one.zeros <= asked.zeros and (asked.zeros or one.bits >= asked.bits)]
    measured = {(one.family, one.bound) for one in counting}
    return all((family, bound) in measured for family in target.families for bound in bounds)


def _levels(bits: int, purpose: str) -> list[list[str]]:
    """Return the forms of so many bits, and for speed then those of each larger number of bits."""
    if purpose == "size":
        return [[f"{kind}{bits}" for kind in ("palette", "int") if bits in BITS[kind]]]
    counts = sorted({n for some in BITS.values() for n in some if n >= bits})
    return [[f"{kind}{n}" for kind in ("int", "palette") if n in BITS[kind]] for n in counts]


def _evidence_of(
    form: str, bounds: frozenset[str], families: frozenset[int] | None, rows: Sequence[Evidence]
) -> list[Evidence]:
    """Return the rows for a form, for some bounds and generations of the engine; None: for all generations."""
    kind = form if form == W8A8 else read_form(form).evidence
    return [
        one
        for one in rows
        if one.form == kind and one.bound in bounds and (families is None or one.family in families)
    ]


def unknown_chips(forms: Iterable[str], target: Target) -> list[str]:
    """Return a note for each form about the chips of a target for which no speed was published."""
    notes = []
    for form in sorted(set(forms)):
        rows = _evidence_of(form, frozenset((READING, COMPUTING)), None, evidence())
        families = {one.family for one in rows}
        chips = [chip for chip in target.chips if family_of(chip) not in families]
        if chips:
            notes.append(f"no speed of {form} was published for {', '.join(chips)}")
    return notes

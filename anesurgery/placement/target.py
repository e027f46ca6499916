"""Parse and describe a target: chips, an OS, compute units, and the limits of the chips.

`Target.parse("M1/macOS 14")` names one chip and one OS; "M1-M3", "M4+" and "any" name several chips, and a
verdict then holds for each of them. Limits come from the table `CHIPS`; the source of each is in `SOURCES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from anesurgery.display import GB
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.placement.corrections import Corrections
from anesurgery.semantics.analysis_cache import cached

PRODUCTS: dict[str, str] = {
    product.strip(): chip
    for chip, products in {
        "A12": "iPhone XS, iPhone XS Max, iPhone XR, iPad mini 5, iPad Air 3, iPad 8",
        "A13": "iPhone 11, iPhone 11 Pro, iPhone 11 Pro Max, iPhone SE 2, iPad 9",
        "A14": "iPhone 12 mini, iPhone 12, iPhone 12 Pro, iPhone 12 Pro Max, iPad Air 4, iPad 10",
        "A15": "iPhone 13 mini, iPhone 13, iPhone 13 Pro, iPhone 13 Pro Max, iPhone SE 3, iPhone 14, "
        "iPhone 14 Plus, iPad mini 6",
        "A16": "iPhone 14 Pro, iPhone 14 Pro Max, iPhone 15, iPhone 15 Plus",
        "A17 Pro": "iPhone 15 Pro, iPhone 15 Pro Max, iPad mini 7",
        "A18": "iPhone 16, iPhone 16 Plus, iPhone 16e",
        "A18 Pro": "iPhone 16 Pro, iPhone 16 Pro Max",
        "A19": "iPhone 17",
        "A19 Pro": "iPhone Air, iPhone 17 Pro, iPhone 17 Pro Max",
        "M1": "iPad Air 5",
    }.items()
    for product in products.split(",")
}
"""Product -> its chip, by the full name: "A17 Pro"."""
IDENTIFIERS: dict[str, str] = {
    identifier: product
    for product, identifiers in {
        "iPhone XS": "iPhone11,2",
        "iPhone XS Max": "iPhone11,4 iPhone11,6",
        "iPhone XR": "iPhone11,8",
        "iPhone 11": "iPhone12,1",
        "iPhone 11 Pro": "iPhone12,3",
        "iPhone 11 Pro Max": "iPhone12,5",
        "iPhone SE 2": "iPhone12,8",
        "iPhone 12 mini": "iPhone13,1",
        "iPhone 12": "iPhone13,2",
        "iPhone 12 Pro": "iPhone13,3",
        "iPhone 12 Pro Max": "iPhone13,4",
        "iPhone 13 mini": "iPhone14,4",
        "iPhone 13": "iPhone14,5",
        "iPhone 13 Pro": "iPhone14,2",
        "iPhone 13 Pro Max": "iPhone14,3",
        "iPhone SE 3": "iPhone14,6",
        "iPhone 14": "iPhone14,7",
        "iPhone 14 Plus": "iPhone14,8",
        "iPhone 14 Pro": "iPhone15,2",
        "iPhone 14 Pro Max": "iPhone15,3",
        "iPhone 15": "iPhone15,4",
        "iPhone 15 Plus": "iPhone15,5",
        "iPhone 15 Pro": "iPhone16,1",
        "iPhone 15 Pro Max": "iPhone16,2",
        "iPhone 16": "iPhone17,3",
        "iPhone 16 Plus": "iPhone17,4",
        "iPhone 16e": "iPhone17,5",
        "iPhone 16 Pro": "iPhone17,1",
        "iPhone 16 Pro Max": "iPhone17,2",
        "iPhone 17": "iPhone18,3",
        "iPhone 17 Pro": "iPhone18,1",
        "iPhone 17 Pro Max": "iPhone18,2",
        "iPhone Air": "iPhone18,4",
        "iPad mini 5": "iPad11,1 iPad11,2",
        "iPad Air 3": "iPad11,3 iPad11,4",
        "iPad 8": "iPad11,6 iPad11,7",
        "iPad 9": "iPad12,1 iPad12,2",
        "iPad Air 4": "iPad13,1 iPad13,2",
        "iPad Air 5": "iPad13,16 iPad13,17",
        "iPad 10": "iPad13,18 iPad13,19",
        "iPad mini 6": "iPad14,1 iPad14,2",
        "iPad mini 7": "iPad16,1 iPad16,2",
    }.items()
    for identifier in identifiers.split()
}
"""Identifier that a device reports -> the product, from yuetyam/jyutping (UIDevice+modelName.swift)."""


def _plain(words: str) -> str:
    """Normalise a name: "iphone13", "iPhone-13" and "iPhone 13" become one, and "A15 Bionic" becomes "a15"."""
    return re.sub(r"[\s_-]+|bionic", "", words.lower())


_PLAIN: dict[str, tuple[str, str]] = {
    **{_plain(chip): (chip, "") for chip in PRODUCTS.values()},
    **{_plain(product): (chip, product) for product, chip in PRODUCTS.items()},
    **{_plain(identifier): (PRODUCTS[product], product) for identifier, product in IDENTIFIERS.items()},
}
"""Name as `_plain` writes it -> chip, and the product where it names one."""
LINES = re.compile(
    r"(?P<product>macbook(?: air| pro)?|mac (?:mini|studio|pro)|imac|ipad (?:pro|air))\s+(?P<chip>[am]\d+.*)",
    re.IGNORECASE,
)
"""Products that came with several chips: the chip is named behind them, as in "MacBook Air M2"."""
_GENERATION = re.compile(r"\s*\((\d+)(?:st|nd|rd|th) generation\)", re.IGNORECASE)
_WITH_CHIP = re.compile(r"(?P<product>.*\S)\s*\((?P<chip>[am]\d+[^()]*)\)", re.IGNORECASE)
"""As reports write a product: "iPhone 13 (A15)"."""


def named(words: str) -> tuple[str, str]:
    """Return the chip and the product that words name.

    Returns:
        ("A17 Pro", "iPhone 15 Pro") for "iPhone 15 Pro", "iphone15pro", "iPhone16,1" and "iPhone 15 Pro
        (A17 Pro)"; the words as they are and "" where they name no product.
    """
    plain = " ".join(_GENERATION.sub(r" \1", words).split())
    if both := _WITH_CHIP.fullmatch(plain):
        chip, product = named(both["product"])
        if product and chip.lower() == both["chip"].lower():
            return chip, product
        plain = plain if product else f"{both['product']} {both['chip']}"
    if line := LINES.fullmatch(plain):
        return line["chip"], line["product"]
    return _PLAIN.get(_plain(plain), (words, ""))


def products_of(chip: str) -> list[str]:
    """Return the products with a chip or a variant of it, phones first: the iPhone 15 Pro for A17."""
    named_so = [product for product, own in PRODUCTS.items() if own.split()[0] == chip]
    return sorted(named_so, key=lambda product: not product.startswith("iPhone"))


COMPUTE_UNITS = ("CPU_AND_NE", "ALL", "CPU_ONLY", "CPU_AND_GPU")


@dataclass(frozen=True)
class Chip:
    """A chip: the generation of its Neural Engine, and its limits.

    Lengths are in elements, memory in bytes; None if unknown. `SOURCES` says where each number comes from.
    """

    name: str
    family: int
    """Generation of the engine in the compiler's numbering: 13 for A14 and M1."""
    platform: str
    first_os: int
    """The oldest OS that runs on it, counted from the oldest that this library knows (iOS 15, macOS 12)."""
    axis: int | None
    """The longest last or second last axis (width, height); channels reach 65536 everywhere."""
    kernel_w: int | None
    kernel_h: int | None
    program: int
    """The bytes of weights that one program may hold."""
    address_space: int | None = None
    """The bytes that all loaded programs share."""
    working_set: int = 2 << 20
    """The bytes of on-chip memory, which the largest operand should fit."""
    cores: int = 16
    """The number of cores of the plain chip's engine, as Apple counts them; an Ultra has twice as many."""
    bandwidth: str | None = None
    """The measured rate at which weights are read, in GB/s, in words: "64 to 67; Max 119"."""


def _row(names: str, family: int, platform: str, first_os: int, **limits: Any) -> list[Chip]:
    return [Chip(n, family, platform, first_os, **limits) for n in names.split()]


IPHONE: dict[str, Any] = {"platform": "iOS", "program": GB}
MAC: dict[str, Any] = {"platform": "macOS", "program": 2 * GB}
H13: dict[str, Any] = {"axis": 16384, "kernel_w": 13, "kernel_h": 29}
H14: dict[str, Any] = {"axis": 16384, "kernel_w": 16, "kernel_h": 32}
H16: dict[str, Any] = {"axis": 65536, "kernel_w": 15, "kernel_h": 31}

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in [
        *_row("A12 A13", 12, first_os=15, cores=8, **H13, **IPHONE),
        *_row("A14", 13, first_os=15, **H13, **IPHONE),
        *_row("A15", 14, first_os=15, **H14, **IPHONE),
        *_row("A16", 15, first_os=16, **H14, **IPHONE),
        *_row("A17", 16, first_os=17, **H16, **IPHONE),
        *_row("A18", 16, first_os=18, **H16, **IPHONE),
        *_row("A19", 17, first_os=26, **H16, **{**IPHONE, "program": int(1.45 * GB)}),
        *_row("M1", 13, first_os=12, **H13, **MAC, address_space=int(3.75 * GB), bandwidth="51 to 61"),
        *_row("M2", 14, first_os=12, **H14, **MAC, address_space=34 * GB, bandwidth="60 to 62"),
        *_row("M3", 15, first_os=14, **H14, **MAC, bandwidth="63; Max 120"),
        *_row("M4", 16, first_os=15, **H16, **MAC, bandwidth="64 to 67; Max 119, Pro 126"),
        *_row("M5", 17, first_os=26, **H16, **MAC, working_set=4_950_000, bandwidth="70; Pro 145"),
        *_row("M6", 18, first_os=26, cores=32, **H16, **MAC, bandwidth="about 150"),
    ]
}
"""Every chip whose engine Core ML uses; Pro, Max and Ultra count as the plain chip."""

SOURCES = {
    "axis": "16384 up to H15: more-ane-transformers (M1 Max), ane-guide; 65536 on M4: 751K, macOS 27.0.1",
    "engine": "compiler targets: ane-guide (M1, M2, M5), 751K (M4, M6); A12 to A19 by the generation of "
    "their silicon",
    "cores": "Apple; A12 to M5 collected by hollance/neural-engine and ane-guide, M6 (two engines of 16) "
    "by 751K",
    "bandwidth": "Anemll/anemll-bench (M1 to M5), ane-guide (M5 Pro), 751K (M6)",
    "since": "oldest release counted from iOS 15 and macOS 12, with which the chip's first devices came",
    "kernel": "M4: 751K, macOS 27.0.1, through Core ML; M1 to M3: ane-guide and ANEForge, compiler tables",
    "program": "1 GB on iOS: coremltools guide; A19 Pro: 1.4 GB ran, 1.8 GB failed "
    "(john-rocky/CoreML-LLM); about 2 GB on "
    "macOS: ANEForge, reports on M1 and M5",
    "address_space": "more-ane-transformers: M1 (3 to 3.75 GB, where programs failed); M2 (34 GB, as ioreg "
    "says, not tried)",
    "working_set": "ane-guide: about 2.1 MB on M1, 4.95 MB on M5",
}
"""Where the numbers of `CHIPS` come from."""

MEASURED, MEASURED_ON = "M4", ("macOS", 27)
"""The chip, without Pro or Max, and the OS on which most rules were measured through Core ML (751K, 27.0.1)."""

GROUPS: dict[str, tuple[str, ...]] = {
    "any": tuple(CHIPS),
    "M1-M3": ("M1", "M2", "M3"),
    "M4+": ("M4", "M5", "M6"),
    "A12-A16": ("A12", "A13", "A14", "A15", "A16"),
    "A17+": ("A17", "A18", "A19"),
    "iPhone": tuple(c.name for c in CHIPS.values() if c.platform == "iOS"),
    "Mac": tuple(c.name for c in CHIPS.values() if c.platform == "macOS"),
}
"""Names of several chips."""

OS_VERSIONS = {"iOS": (15, 16, 17, 18, 26, 27), "macOS": (12, 13, 14, 15, 26, 27)}
"""Releases that this library knows; 16 to 25 were skipped on the Mac and 19 to 25 on the iPhone."""

_MARKETED = re.compile(r"\s*(pro|max|ultra)\b", re.IGNORECASE)


def family_of(chip: str) -> int:
    """Return the generation of the engine of a chip by the name under which it is sold: "M4 Pro"."""
    return CHIPS[chip.split()[0]].family


@dataclass(frozen=True)
class Target:
    """Chips, an OS and compute units.

    Attributes:
        chips: names of `CHIPS`; statements about a target hold for each of them.
        platform: "macOS" or "iOS"; None without an OS.
        os: the major version; None for any.
        compute_units: one of `COMPUTE_UNITS`, as in coremltools.
        label: the words of the user, with the chip in place of a product.
        product: the device that the user named, "iPhone 13"; "" for a chip or an OS.
        rates: a user's own table, learned from plans.

    Raises:
        UnknownName: there are no such compute units.
    """

    chips: tuple[str, ...] = GROUPS["any"]
    platform: str | None = None
    os: int | None = None
    compute_units: str = "CPU_AND_NE"
    label: str = "any"
    rates: Corrections | None = field(default=None, compare=False)
    product: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.compute_units not in COMPUTE_UNITS:
            raise UnknownName("compute units", str(self.compute_units), COMPUTE_UNITS)

    @classmethod
    def parse(cls, text: str | Target | None, compute_units: Any = None) -> Target:
        """Return the target that words name: "M1/macOS 14", "iPhone 15 Pro/iOS 18", "M4+", "macOS 15", "any".

        Args:
            text: chip, product or group, and OS, with a slash between them; None for any.
            compute_units: a name or a coremltools `ComputeUnit`; CPU_AND_NE when absent.

        Raises:
            UnknownName: no such chip, OS or compute units; near matches are listed.
            SurgeryError: an OS that does not run on the chip.
        """
        units = str(getattr(compute_units, "name", compute_units or "CPU_AND_NE"))
        if isinstance(text, Target):
            return text if compute_units is None else replace(text, compute_units=units)
        if not (text is None or isinstance(text, str)):
            raise SurgeryError(f'target={text!r} is no name; write it as "M1/macOS 14", "M1" or "macOS 14"')
        words = [w.strip() for w in ("any" if text is None else text).split("/")]
        (words[0], product), asked = named(words[0]), words[0]
        if len(words) > 2 or not all(words):
            raise SurgeryError(f'target {text!r}: write it as "M1/macOS 14", "M1" or "macOS 14"')
        chips, system = words[0], (words[1] if len(words) == 2 else "")
        if not system and re.match(r"(i|mac|ipad)os(?![a-z])", chips, re.IGNORECASE):
            chips, system = "any", chips
        names, (platform, version) = _chips(chips), _os(system)
        fitting = tuple(n for n in names if _runs(CHIPS[n], platform, version))
        if not fitting:
            raise SurgeryError(
                f"target {text!r}: {platform} {version or ''} does not run on {chips}".replace("  ", " ")
            )
        label = "/".join(words) if words[0] != asked else (text or "any").strip()
        return cls(fitting, platform, version, units, label, product=product)

    @classmethod
    def newest(cls) -> list[Target]:
        """Return the newest chip of each generation of the engine, oldest first, on the newest OS."""
        last = {chip.family: chip for chip in sorted(CHIPS.values(), key=lambda chip: chip.first_os)}
        chips = [last[family] for family in sorted(last)]
        return [cls.parse(f"{c.name}/{c.platform} {OS_VERSIONS[c.platform][-1]}") for c in chips]

    def __str__(self) -> str:
        units = "" if self.compute_units == "CPU_AND_NE" else f" ({self.compute_units})"
        return f"{self.name}{units}"

    @property
    def name(self) -> str:
        """The target as reports write it, and as `parse` reads it: "iPhone 13 (A15)/iOS 17", "M1/macOS 14"."""
        chip, *system = self.label.split("/")
        return "/".join([f"{self.product} ({chip})" if self.product else chip, *system])

    @property
    def devices(self) -> list[str]:
        """Products with this chip, for whoever named a chip; empty for several chips, and for a product."""
        return [] if self.product or len(self.chips) != 1 else products_of(self.chips[0])

    @property
    def device(self) -> str:
        """One device with this chip, the plainest: "iPhone 13" for A15; "" where none is known by name."""
        return self.product or min(self.devices, key=lambda d: (not d.startswith("iPhone"), len(d)), default="")

    @property
    def words(self) -> str:
        """The target as a sentence has it: "M1/macOS 14", "any chip"."""
        return str(self).replace("any", "any chip", 1) if self.label == "any" else str(self)

    @cached_property
    def families(self) -> frozenset[int]:
        """The generations of the engine."""
        return frozenset(CHIPS[n].family for n in self.chips)

    @property
    def marketed(self) -> tuple[str, ...]:
        """The chips by the names under which they are sold, as far as the label says: "M1 Max"."""
        variant = _MARKETED.search(self.label)
        return tuple(f"{n} {variant[1].title()}" for n in self.chips) if variant else self.chips

    @property
    def on_measured_chip(self) -> bool:
        """Is it an M4 of any kind, the chip on which Core ML was measured op by op?"""
        return self.chips == (MEASURED,)

    @property
    def extrapolated(self) -> str:
        """What measurements are extrapolated to, in words; "" for a base M4 on the macOS that was measured."""
        if not self.on_measured_chip or _MARKETED.search(self.label):
            return self.name
        if self.os is None:
            return f"{self.name} on other systems"
        return "" if (self.platform, self.os) == MEASURED_ON else self.name

    @property
    def uses_ane(self) -> bool:
        """May Core ML use the Neural Engine at all?"""
        return self.compute_units in ("CPU_AND_NE", "ALL")

    @property
    def uses_gpu(self) -> bool:
        """May Core ML use the GPU?"""
        return self.compute_units in ("CPU_AND_GPU", "ALL")

    @property
    def gpu_fitted(self) -> bool:
        """Is it ALL on the chips to which the guess about the GPU was fitted, M4 and M4 Pro?"""
        larger = re.search(r"\b(max|ultra)\b", self.label, re.IGNORECASE)
        return self.compute_units == "ALL" and self.on_measured_chip and self.platform != "iOS" and not larger

    def least(self, limit: str) -> tuple[int, str]:
        """Return the smallest value of a limit over the chips, and the chip that has it.

        Raises:
            KeyError: the limit is unknown on all of them.
        """
        return _least(self.chips, limit)


@cached
def _least(chips: tuple[str, ...], limit: str) -> tuple[int, str]:
    """Return the result of `Target.least`, cached since rules ask for it at every op."""
    limits = [(v, n) for n in chips if (v := getattr(CHIPS[n], limit)) is not None]
    if not limits:
        raise KeyError(limit)
    return min(limits, key=lambda pair: pair[0])


def spans(families: Iterable[int]) -> str:
    """Return the chips of some generations of the engine, in words: "A14 to A16 and M1 to M3"."""
    wanted, words = set(families), list[str]()
    for letter in "AM":
        numbers = sorted(int(c.name[1:]) for c in CHIPS.values() if c.name[0] == letter and c.family in wanted)
        for number in numbers:
            if number - 1 not in numbers:
                last = next(n for n in range(number, 99) if n + 1 not in numbers)
                words.append(f"{letter}{number}" + (f" to {letter}{last}" if last > number else ""))
    return " and ".join(", ".join(words).rsplit(", ", 1))


def _runs(chip: Chip, platform: str | None, version: int | None) -> bool:
    if platform is None:
        return True
    tablet = platform == "iOS" and chip.platform == "macOS"  # M chips are in iPads too
    return tablet or (chip.platform == platform and (version is None or version >= chip.first_os))


def _chips(text: str) -> tuple[str, ...]:
    plain = _MARKETED.sub("", text, count=1).strip()
    named: dict[str, tuple[str, ...]] = {**GROUPS, **{n: (n,) for n in CHIPS}}
    chips = {k.lower(): v for k, v in named.items()}.get(plain.lower())
    return chips if chips is not None else _spread(plain, text, named)


def _spread(plain: str, text: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the chips of a range that `GROUPS` does not name, as "M2+"; `text` is quoted in the error."""
    match = re.fullmatch(r"([AM])(\d+)(?:\+|-\1?(\d+))", plain, re.IGNORECASE)
    chosen: tuple[str, ...] = ()
    if match:
        letter, low, high = match[1].upper(), int(match[2]), int(match[3] or 99)
        chosen = tuple(n for n in CHIPS if n[0] == letter and low <= int(n[1:]) <= high)
    if not chosen:
        known = [*names, *PRODUCTS, *IDENTIFIERS]
        raise UnknownName("chip or device", text, known, "`anesurgery chips` lists what target takes")
    return chosen


def _os(text: str) -> tuple[str | None, int | None]:
    if not text:
        return None, None
    match = re.fullmatch(r"(?P<name>[A-Za-z]+)\s*(?P<major>\d+)?(\.\d+)*", text)
    platforms = {"ios": "iOS", "ipados": "iOS", "macos": "macOS"}
    platform = platforms.get(match["name"].lower()) if match else None
    systems = [f"{p} {v}" for p, versions in OS_VERSIONS.items() for v in versions]
    if match is None or platform is None:
        raise UnknownName("OS", text, systems)
    oldest = OS_VERSIONS[platform][0]
    if match["major"] is not None and int(match["major"]) < oldest:
        raise SurgeryError(
            f"nothing is known about {text}; the oldest release is {platform} {oldest}: give that"
        )
    if match["major"] is None or int(match["major"]) not in OS_VERSIONS[platform]:
        raise UnknownName("OS", text, [k for k in systems if k.startswith(platform)])
    return platform, int(match["major"])

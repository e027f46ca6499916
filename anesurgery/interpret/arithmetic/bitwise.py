"""The arithmetic of bits: an element is a hash of how it is computed, rounding included.

Equal hashes mean equal bits, also for infinities and NaN, if equal sums are added in the same order. A sum of
products is a hash of its ordered terms, whichever op spells it; operands that commute are sorted; the sign of a
product is taken out, since IEEE arithmetic does so too.
"""

from __future__ import annotations

from anesurgery.interpret.arithmetic import bit_rules, extremes, list_rules
from anesurgery.interpret.arithmetic.bit_rules import Bitwise

Bitwise.rules = bit_rules.RULES | extremes.RULES | list_rules.RULES

__all__ = ["Bitwise"]

"""The arithmetic of a prime field: both sides of an edit are evaluated at random points (Schwartz, Zippel).

Sums, products, quotients and what is made of them are exact, and so are constants, which are m * 2^e. The
absolute value stands for all that is made of it (relu, clip, max), so that its identities hold. Every other
function is a random one.
"""

from __future__ import annotations

from anesurgery.interpret.arithmetic import element_rules, list_rules, recurrent_rules, sum_rules
from anesurgery.interpret.arithmetic.element_rules import Algebraic

Algebraic.rules = element_rules.RULES | sum_rules.RULES | list_rules.RULES | recurrent_rules.RULES

__all__ = ["Algebraic"]

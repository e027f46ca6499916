"""The numbers of fp16 (binary16 of IEEE 754), and where sums of products end on the engine."""

import math

LARGEST = 65504.0
"""The largest number: (2 - 2^-10) * 2^15. Beyond it a value is infinite."""
LARGEST_EXPONENT = math.log(LARGEST)
"""From here on, 11.09, an exponential is infinite."""
NORMAL = 2.0**-14
"""The least normal number, 6.1e-5: below it digits are lost, and units may give 0."""
LEAST = 2.0**-24
"""The least number above 0, 6e-8, which is subnormal."""
EPSILON = 2.0**-10
"""From 1 to the next number."""
HALF_STEP = EPSILON / 2
"""How far a number is off after rounding at most, as a share of it."""
LAST_INTEGER = 2048
"""Every integer up to here is a number of fp16; the next one, 2049, is not."""
CEILING = 32768.0
"""Magnitude at which a sum of products becomes infinite on the engine (measured, M1 to M6)."""

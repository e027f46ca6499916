"""Which chip is in which product, so that a target can be named as people name their devices.

Source: Apple's technical specifications of each product (support.apple.com/specs), documented by Apple.
"""

from __future__ import annotations

import re

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
"""Product -> its chip, by the name that says which."""
_PLAIN = {product.lower(): chip for product, chip in PRODUCTS.items()}
LINES = re.compile(
    r"(?:macbook(?: air| pro)?|mac (?:mini|studio|pro)|imac|ipad (?:pro|air))\s+(?P<chip>[am]\d+.*)",
    re.IGNORECASE,
)
"""Products that came with several chips: the chip is named behind them, as in "MacBook Air M2"."""
_GENERATION = re.compile(r"\s*\((\d+)(?:st|nd|rd|th) generation\)", re.IGNORECASE)


def chip_of(words: str) -> str:
    """The chip of a product, or the words as they are where they name none: "iPhone 15 Pro" is "A17 Pro"."""
    plain = " ".join(_GENERATION.sub(r" \1", words).split())
    line = LINES.fullmatch(plain)
    return line["chip"] if line else _PLAIN.get(plain.lower(), words)

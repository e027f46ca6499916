"""Targets by the names of devices."""

from __future__ import annotations

import pytest

import anesurgery as ane
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.placement.target import IDENTIFIERS, PRODUCTS, Target, chip_of


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("iPhone 15 Pro", "A17 Pro"),
        ("iphone 13 pro/iOS 17", "A15/iOS 17"),
        ("iPhone SE (3rd generation)", "A15"),
        ("iphone13", "A15"),
        ("iphone-15-pro-max", "A17 Pro"),
        ("iPhone14,5/iOS 17", "A15/iOS 17"),
        ("iphone18,1", "A19 Pro"),
        ("iPad13,16", "M1"),
        ("A15 Bionic", "A15"),
        ("a17pro", "A17 Pro"),
        ("MacBook Air M2", "M2"),
        ("Mac mini M4 Pro/macOS 15", "M4 Pro/macOS 15"),
        ("iPad Pro M4/iOS 18", "M4/iOS 18"),
        ("M1/macOS 14", "M1/macOS 14"),
    ],
)
def test_a_product_is_its_chip(text: str, said: str) -> None:
    target = Target.parse(text)
    assert str(target) == said
    assert target == Target.parse(said)


def test_every_product_has_a_chip_that_is_known() -> None:
    assert all(len(Target.parse(product).chips) == 1 for product in PRODUCTS)
    assert {chip_of(product) for product in PRODUCTS} == set(PRODUCTS.values())


def test_every_product_says_what_it_calls_itself() -> None:
    """Of iPad Pros and other iPad Airs a line of products is known only, whose chip is named."""
    assert set(IDENTIFIERS.values()) == set(PRODUCTS)


def test_what_is_no_product_says_what_is_near() -> None:
    with pytest.raises(UnknownName, match="iPhone 15"):
        ane.Target.parse("iPhone 15 Pr")
    with pytest.raises(SurgeryError, match="iOS 16 does not run on"):
        Target.parse("iPhone 15 Pro/iOS 16")

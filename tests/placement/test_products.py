"""Targets by the names of devices."""

from __future__ import annotations

import pytest

import anesurgery as ane
from anesurgery.errors import SurgeryError, UnknownName
from anesurgery.placement.target import IDENTIFIERS, PRODUCTS, Target, named


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
    assert target.label == said
    assert target == Target.parse(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("iphone14,5/iOS 17", "iPhone 13 (A15)/iOS 17"),
        ("iPhone 13 (A15)/iOS 17", "iPhone 13 (A15)/iOS 17"),
        ("iPhone SE (3rd generation)", "iPhone SE 3 (A15)"),
        ("iPhone 15 Pro", "iPhone 15 Pro (A17 Pro)"),
        ("MacBook Air M2", "MacBook Air (M2)"),
        ("A15 Bionic", "A15"),
        ("M1/macOS 14", "M1/macOS 14"),
    ],
)
def test_reports_name_the_device_that_was_asked_for(text: str, said: str) -> None:
    assert str(Target.parse(text)) == said
    assert str(Target.parse(said)) == said, "what a report prints can be given back"


def test_the_variant_of_a_phone_is_none_of_its_chip() -> None:
    assert Target.parse("iPhone 13 Pro").marketed == ("A15",)
    assert Target.parse("iPhone 15 Pro").marketed == ("A17 Pro",)


def test_a_chip_says_which_devices_have_it() -> None:
    assert Target.parse("A15/iOS 17").devices[:2] == ["iPhone 13 mini", "iPhone 13"]
    assert Target.parse("A17").devices[0] == "iPhone 15 Pro"
    assert Target.parse("iPhone 13").devices == Target.parse("A17+").devices == []


def test_every_product_has_a_chip_that_is_known() -> None:
    assert all(len(Target.parse(product).chips) == 1 for product in PRODUCTS)
    assert {named(product) for product in PRODUCTS} == {(chip, product) for product, chip in PRODUCTS.items()}


def test_every_product_says_what_it_calls_itself() -> None:
    """Of iPad Pros and other iPad Airs a line of products is known only, whose chip is named."""
    assert set(IDENTIFIERS.values()) == set(PRODUCTS)


def test_what_is_no_product_says_what_is_near() -> None:
    with pytest.raises(UnknownName, match="iPhone 15"):
        ane.Target.parse("iPhone 15 Pr")
    with pytest.raises(UnknownName, match="iPhone14,5"):
        Target.parse("iPhone14,55")
    with pytest.raises(UnknownName, match="iPhone 13"):
        Target.parse("iPhone 13 (A17)")
    with pytest.raises(SurgeryError, match="iOS 16 does not run on"):
        Target.parse("iPhone 15 Pro/iOS 16")

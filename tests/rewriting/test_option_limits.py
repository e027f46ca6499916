"""Options beyond their limits are errors where the pass is made, and say what they may be."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import pytest

from anesurgery import registry
from anesurgery.authoring import Pass, option
from anesurgery.errors import PassError
from anesurgery.placement.target import Target
from anesurgery.rewriting.passes import Limits


@dataclass(frozen=True)
class Limited(Pass):
    """One option of each kind."""

    name: ClassVar[str] = "limited"
    count: int | None = option(None, least=1)
    rows: int = option(4, least=2)
    width: int = option(4, least=1, most=8)
    fill: float = option(-1.0, least=-2.0, most=0.5)
    share: float = option(1.0, above=0.0)
    form: str | None = option(None, among=("one", "other"))
    free: int = 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"count": 0}, "limited: count=0; it must be a positive integer"),
        ({"count": 1.0}, "count=1.0; it must be a positive integer"),
        ({"count": True}, "count=True; it must be a positive integer"),
        ({"rows": 1}, "rows=1; it must be an integer of at least 2"),
        ({"rows": None}, "rows=None; it must be an integer of at least 2"),
        ({"width": 9}, "width=9; it must be an integer from 1 to 8"),
        ({"fill": 1}, "fill=1; it must lie in [-2, 0.5]"),
        ({"fill": float("nan")}, "fill=nan; it must lie in [-2, 0.5]"),
        ({"fill": "deep"}, "fill='deep'; it must lie in [-2, 0.5]"),
        ({"share": 0}, "share=0; it must be above 0"),
        ({"form": "third"}, "form='third'; it may be 'one' or 'other'"),
    ],
)
def test_an_option_beyond_its_limits_is_an_error(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PassError) as error:
        Limited(**given)
    assert words in str(error.value)


def test_ends_and_defaults_are_allowed() -> None:
    counts: Any = np.int64(1)
    Limited(count=counts, rows=2, width=8, fill=-2, share=1e-9, form="other", free=-3)
    assert str(Limited()) == "limited"
    assert str(Limited(rows=5)) == "limited(rows=5)"


def test_defaults_of_all_passes_keep_to_their_limits() -> None:
    limited = 0
    for name in registry.pass_names():
        for field in fields(registry.pass_class(name)):
            limits = field.metadata.get("limits")
            limited += limits is not None
            if isinstance(limits, Limits) and field.default is not None:
                assert limits.hold(field.default), f"{name}: {field.name}={field.default!r}"
    assert limited > 30


@dataclass(frozen=True)
class Fitted(Limited):
    """An option that is a limit of the target."""

    name: ClassVar[str] = "fitted"
    longest: int = option(4, least=1, of_target="axis")


@dataclass(frozen=True)
class Asked(Fitted):
    """Only callers ask for it."""

    name: ClassVar[str] = "asked"
    asked_for: ClassVar[bool] = True


def test_auto_takes_limits_of_the_target_and_leaves_out_what_must_be_asked_for() -> None:
    targets = [Target.parse(chip) for chip in ("M1", "M4")]
    assert [Fitted.variants(t) for t in targets] == [
        (Fitted(longest=int(t.least("axis")[0])),) for t in targets
    ]
    assert Fitted.variants(targets[0]) != Fitted.variants(targets[1])
    assert [Limited.variants(t) for t in targets] == [(Limited(),)] * 2
    assert [Asked.variants(t) for t in targets] == [()] * 2

"""Predict where each op runs, say why, and name the pass that repairs it.

What this takes is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anesurgery.placement.evidence import Finding as Finding
    from anesurgery.placement.evidence import Grade as Grade
    from anesurgery.placement.evidence import Rule as Rule
    from anesurgery.placement.evidence import Scope as Scope
    from anesurgery.placement.inspection import Estimate as Estimate
    from anesurgery.placement.inspection import Inspection as Inspection
    from anesurgery.placement.inspection import Memory as Memory
    from anesurgery.placement.inspection import OpRow as OpRow
    from anesurgery.placement.inspection import Segment as Segment
    from anesurgery.placement.target import Target as Target

HOMES = {
    "evidence": ("Finding", "Grade", "Rule", "Scope"),
    "inspection": ("Estimate", "Inspection", "Memory", "OpRow", "Segment"),
    "target": ("Target",),
}
"""Module -> what it gives to this package."""


def __getattr__(name: str) -> Any:
    for module, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The interpreter: MIL programs as numbers, on any machine with torch.

What runs ops is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anesurgery.interpret.core import Evaluator as Evaluator
    from anesurgery.interpret.core import Executable as Executable
    from anesurgery.interpret.core import evaluate as evaluate
    from anesurgery.interpret.predictor import Predictor as Predictor
    from anesurgery.interpret.predictor import run as run
    from anesurgery.interpret.table import TABLE as TABLE
    from anesurgery.interpret.table import Listener as Listener
    from anesurgery.interpret.table import Unsupported as Unsupported
    from anesurgery.interpret.table import impl as impl

HOMES = {
    "core": ("Evaluator", "Executable", "evaluate"),
    "predictor": ("Predictor", "run"),
    "table": ("TABLE", "Listener", "Unsupported", "impl"),
}
"""Module -> what it gives to this package."""


def __getattr__(name: str) -> Any:
    for module, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

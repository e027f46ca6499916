"""Record Core ML's own plan of a model on a Mac, with what was expected, so that others can learn from it.

The file is JSON: `format` ("anesurgery.plan/1"), `host` (chip and OS), `compute_units`, `model`, and `ops` in
file order. Each op has `name`, `op` (its type), `unit` (chosen; null: none named), `supported` (units), `cost`
(its share of the whole), and what was expected: `legal`, `expected`, `ane_us`, `cpu_us`. It holds no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anesurgery.errors import SurgeryError
from anesurgery.placement import compute_plan
from anesurgery.placement.inspection import OpRow
from anesurgery.placement.inspector import inspect
from anesurgery.placement.learning import FORMAT
from anesurgery.placement.target import Target


def measure(model: Any, target: Target, function: str | None = None) -> dict[str, Any]:
    """Ask Core ML on this Mac, and put its answers beside what is expected.

    Args:
        model: path of an ML Program.
        target: what is expected is said for it; its compute units are asked for.
        function: of a model that has several.

    Raises:
        SurgeryError: this is no Mac with macOS 14.4 or later, or Core ML names no unit for any op.
        LoadError: the model cannot be read, compiled or loaded.
    """
    if not compute_plan.available():
        raise SurgeryError(f"{compute_plan.NOT_HERE}; run this on such a Mac, and take the file along")
    answers = compute_plan.answers(compute_plan.ask(model, target), function)
    rows = compute_plan.by_spelling(inspect(model, target, function=function).ops)
    ops = [_op(answer, rows.get(answer.name)) for answer in answers]
    if not any(op["unit"] for op in ops):
        raise SurgeryError(f"{compute_plan.NO_ANSWER}; --compute-units CPU_AND_NE asks for the Neural Engine")
    return {
        "format": FORMAT,
        "host": compute_plan.host(),
        "compute_units": target.compute_units,
        "model": Path(str(model)).name,
        "ops": ops,
    }


def _op(answer: compute_plan.Answer, row: OpRow | None) -> dict[str, Any]:
    estimate = None if row is None else row.estimate
    return {
        **vars(answer),
        "supported": list(answer.supported),
        "legal": None if row is None else row.legal,
        "expected": None if row is None else row.preferred,
        "ane_us": None if estimate is None else estimate.ane,
        "cpu_us": None if estimate is None else estimate.cpu,
    }

"""The interpreter: MIL programs as numbers, on any machine with torch."""

from anesurgery.interpret.core import Evaluator, Executable, evaluate
from anesurgery.interpret.listener import Listener
from anesurgery.interpret.ops import load_meanings
from anesurgery.interpret.predictor import Predictor, run
from anesurgery.interpret.table import TABLE, Unsupported, impl

load_meanings()

__all__ = [
    "TABLE",
    "Evaluator",
    "Executable",
    "Listener",
    "Predictor",
    "Unsupported",
    "evaluate",
    "impl",
    "run",
]

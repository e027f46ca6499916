"""The interpreter: MIL programs as numbers, on any machine with torch."""

from anesurgery.interpret.core import Evaluator as Evaluator
from anesurgery.interpret.core import Executable as Executable
from anesurgery.interpret.core import evaluate as evaluate
from anesurgery.interpret.listener import Listener as Listener
from anesurgery.interpret.ops import load_meanings
from anesurgery.interpret.predictor import Predictor as Predictor
from anesurgery.interpret.predictor import run as run
from anesurgery.interpret.table import TABLE as TABLE
from anesurgery.interpret.table import Unsupported as Unsupported
from anesurgery.interpret.table import impl as impl

load_meanings()

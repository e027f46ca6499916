"""The interpreter: MIL programs as numbers, on any machine with torch."""

from anesurgery.interpret import (  # noqa: F401 - importing them fills the table
    attention,
    blocks,
    conv,
    decisions,
    elementwise,
    image,
    indexing,
    linear,
    normalization,
    pooling,
    quantization,
    recurrent,
    reduction,
    sampling_ops,
    tensor,
)
from anesurgery.interpret.core import Executable, evaluate
from anesurgery.interpret.listener import Listener
from anesurgery.interpret.predictor import Predictor, run
from anesurgery.interpret.table import TABLE, Unsupported, impl

__all__ = ["TABLE", "Executable", "Listener", "Predictor", "Unsupported", "evaluate", "impl", "run"]

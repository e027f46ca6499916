"""The table of lowerings: MIL op type -> a function whose parameters are the op's MIL inputs.

Operands arrive as `Value`s, constants among them with their numbers in `known`; what only describes the op
arrives as plain Python. A function that needs more names it: `op`, `mode` or `writer`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from anesurgery.interpret.table import TABLE as INTERPRETED
from anesurgery.ops import names

F = TypeVar("F", bound=Callable[..., Any])

EXTRAS = ("op", "mode", "writer")
"""Parameters of a lowering that are no inputs of the op: the op, the `Mode`, and who writes the function."""


@dataclass(frozen=True)
class Lowering:
    """How an op type is written."""

    function: Callable[..., Any]
    extras: frozenset[str]
    """Which of `EXTRAS` it takes."""


TABLE: dict[str, Lowering] = {}
"""Op type -> lowering."""

NO_RANDOM = "Core AI has no random numbers; make them outside, and give them as an input"
MISSING: dict[str, str] = {
    **dict.fromkeys(("random_uniform", "random_normal", "random_bernoulli", "random_categorical"), NO_RANDOM),
    "non_maximum_suppression": "Core AI has no such op; cut the model before it, and suppress boxes in the app",
    "conv_quantized": "it is an old form; `anesurgery apply` with compress_weights stores the weight anew",
    "custom_layer": "a custom layer has code of its own, which no program holds",
}
"""Op type without a lowering -> why, and what to do."""

UNARY = names("acos asin atan atanh cos cosh erf exp sin sinh sqrt tan tanh sigmoid silu round abs")
"""Ops of one operand that have one name and one meaning in both formats."""
BINARY = {k: k for k in names("add mul pow maximum minimum equal not_equal greater")} | {
    "real_div": "divide",
    "floor_div": "floor_divide",
    "logical_and": "and",
    "logical_or": "or",
    "logical_xor": "xor",
}
"""Op of MIL of two operands -> Core AI's of the same meaning."""
GELU = {"EXACT": "none", "TANH_APPROXIMATION": "tanh", "SIGMOID_APPROXIMATION": "sigmoid"}
"""Mode of gelu in MIL -> in Core AI."""

OWN = "mil."
"""How the name of a composite begins that `COMPOSED` makes; the name of the op follows."""
COMPOSED = names(
    "layer_norm instance_norm batch_norm l2_norm local_response_norm scaled_dot_product_attention lstm gru rnn "
    "softplus softplus_parametric softsign elu reduce_log_sum_exp depth_to_space space_to_depth pixel_shuffle "
    "pixel_unshuffle space_to_batch batch_to_space upsample_bilinear resize_bilinear upsample_nearest_neighbor "
    "resize_nearest_neighbor resize resample affine crop_resize"
)
"""Ops that are written as private graphs: each has the op's name and attributes, and is read as that op."""

FROM_IMAGE, TO_IMAGE = "anesurgery.from_image", "anesurgery.to_image"
"""Composites between bytes [height, width, BGRA] and an image of MIL, whose channels their attribute says."""

MERGED_INTO = {"pad": names("conv conv_transpose max_pool avg_pool l2_pool")}
"""Op -> ops that a reader would merge it into. In front of one of these it is a private graph too."""


def lowers(*op_types: str) -> Callable[[F], F]:
    """Enter a function into the table for some op types."""

    def enter(function: F) -> F:
        extras = frozenset(EXTRAS) & set(inspect.signature(function).parameters)
        for op_type in op_types:
            TABLE[op_type] = Lowering(function, extras)
        return function

    return enter


def register(lowerings: Mapping[str, Callable[..., Any]]) -> None:
    """Enter functions that are one expression each, by op type."""
    for op_type, function in lowerings.items():
        lowers(op_type)(function)


FORMULAS: set[str] = set()
"""Ops that `as_interpreted` entered. What Apple's runtime makes of them judges the runtime, not the formula."""


def as_interpreted(*op_types: str) -> None:
    """Let the interpreter's own functions write some ops: they are given tensors of the file."""
    register({op_type: INTERPRETED[op_type].function for op_type in op_types})
    FORMULAS.update(op_types)


def load_families(package: str) -> None:
    """Import every file of `lowerings` or `lifts`, so that its table knows the ops of all."""
    room = importlib.import_module(f"anesurgery.coreai.{package}")
    for family in pkgutil.iter_modules(room.__path__):
        importlib.import_module(f"{room.__name__}.{family.name}")

"""The table of lowerings: MIL op type -> a function that writes the op in Core AI.

The parameters of such a function are the op's MIL inputs. Tensors arrive as `values.Value`, constants with
their numbers in `known`; inputs that only configure the op arrive as plain Python. A function that needs more
names it as a parameter: `op`, `mode` or `writer`. Each file here, a family of ops, fills the table.

A `Mode` decides between forms of a lowering: "ship" is for Apple's devices, "check" for its runtime on Linux.
Other workarounds are always written; a comment beside each says why, and docs/core-ai-problems.md lists all.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from anesurgery.coreai.names import enters
from anesurgery.errors import UnknownName
from anesurgery.interpret.table import TABLE as INTERPRETED
from anesurgery.ops import names

EXTRAS = ("op", "mode", "writer")
"""Parameters of a lowering that are no inputs of the op: the op, the `Mode`, and the `FunctionWriter`."""


MODES = ("ship", "check")
FORMS = {
    # the runtime of coreai-core 1.0.0b3 on Linux adds the terms of an fp16 product or running sum in fp16, one
    # after the other: 4,096 ones give 2,048. What rounds differently at each op hides what is wrong.
    "compute fp16 models in fp32": "check",
    # that runtime takes only tensors; an image is a `CVPixelBuffer`
    "write images as tensors": "check",
    # argmax of fp16 values gives a wrong class map on the A19 Pro, iOS 27.0 (reported:
    # https://github.com/apple/coreai-torch/issues/116); of fp32 values it is right
    "take argmax in fp32": "ship",
}
"""Form in which ops are written -> the mode that uses it."""


@dataclass(frozen=True)
class Mode:
    """The mode of a program, which decides the forms of its ops."""

    name: str

    def __post_init__(self) -> None:
        """Check that there is such a mode."""
        if self.name not in MODES:
            raise UnknownName("mode", self.name, MODES)

    def dtype(self, name: str) -> str:
        """Return the element type in which values of a MIL dtype are written."""
        return "fp32" if name == "fp16" and self.has("compute fp16 models in fp32") else name

    def has(self, form: str) -> bool:
        """Return whether ops are written in a form."""
        return FORMS[form] == self.name


TABLE: dict[str, Callable[..., Any]] = {}
"""Op type -> its lowering."""

NO_RANDOM = "Core AI has no random numbers; make them outside, and give them as an input"
MISSING: dict[str, str] = {
    **dict.fromkeys(("random_uniform", "random_normal", "random_bernoulli", "random_categorical"), NO_RANDOM),
    "non_maximum_suppression": "Core AI has no such op; cut the model before it, and suppress boxes in the app",
    "conv_quantized": "it is an old form; `anesurgery apply` with compress_weights stores the weight anew",
    "custom_layer": "a custom layer has code of its own, which no program holds",
}
"""Op type without a lowering -> why, and what to do."""

COMPOSED = names(
    "layer_norm instance_norm batch_norm l2_norm local_response_norm scaled_dot_product_attention lstm gru rnn "
    "softplus softplus_parametric softsign elu reduce_log_sum_exp depth_to_space space_to_depth pixel_shuffle "
    "pixel_unshuffle space_to_batch batch_to_space upsample_bilinear resize_bilinear upsample_nearest_neighbor "
    "resize_nearest_neighbor resize resample affine crop_resize"
)
"""Ops that are written as composites: private graphs with the op's name and attributes."""

MERGED_INTO = {"pad": names("conv conv_transpose max_pool avg_pool l2_pool")}
"""Op -> ops that `reading` would merge it into; upstream of one of these it is a composite too."""


lowers = enters(TABLE)


@cache
def extras_of(function: Callable[..., Any]) -> frozenset[str]:
    """Return which of `EXTRAS` a lowering takes."""
    return frozenset(EXTRAS) & set(inspect.signature(function).parameters)


def as_interpreted(*op_types: str) -> None:
    """Let the interpreter's own functions write some ops, from `Value`s instead of torch tensors."""
    TABLE.update({op_type: INTERPRETED[op_type].function for op_type in op_types})


for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")

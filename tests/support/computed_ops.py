"""One op of dynamic inputs, computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from anesurgery.interpret import evaluate
from anesurgery.mil import Array, Var, ct, mb, types

OneOp = Callable[..., list[Array]]


NEWEST: Any = ct.target.iOS18


def computed(op_type: str, values: dict[str, Array], opset: Any = NEWEST, **fixed: Any) -> list[Array]:
    """The results of an op whose inputs are dynamic, so that coremltools folds nothing."""
    specs = [
        mb.TensorSpec(v.shape, types.int32 if v.dtype == np.int32 else types.fp32) for v in values.values()
    ]
    made: list[Var] = []
    inputs: list[Var] = []

    def body(*given: Var) -> Any:
        result = getattr(mb, op_type)(**dict(zip(values, given, strict=True)), **fixed)
        inputs.extend(given)
        made.extend(result if isinstance(result, (tuple, list)) else [result])
        return made[-1]

    names = ", ".join(values)
    scope: dict[str, Any] = {"body": body}
    exec(f"def program({names}): return body({names})", scope)  # the builder reads the names
    mb.program(input_specs=specs, opset_version=opset)(scope["program"])
    bound = {v: torch.from_numpy(a) for v, a in zip(inputs, values.values(), strict=True)}
    assert made[0].op is not None
    return [v.numpy() for v in evaluate([made[0].op], bound, made)]

"""Torch modules as coremltools converts them, by trace and by export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from anesurgery.mil import ct, quiet_host


def convert(
    module: torch.nn.Module,
    examples: Mapping[str, torch.Tensor],
    how: str,
    target: str,
    precision: str,
    **options: Any,
) -> Any:
    """The model of a module whose inputs have names, shapes and dtypes of the examples; int64 becomes int32."""
    given = tuple(examples.values())
    kinds = [np.float32 if v.is_floating_point() else np.int32 for v in given]
    with torch.no_grad(), quiet_host():
        graph: Any = (
            torch.jit.trace(module, given, check_trace=False)  # type: ignore[no-untyped-call]
            if how == "trace"
            else torch.export.export(module, given).run_decompositions({})
        )
        return ct.convert(
            graph,
            inputs=[
                ct.TensorType(name, tuple(v.shape), dtype=kind)
                for (name, v), kind in zip(examples.items(), kinds, strict=True)
            ],
            minimum_deployment_target=getattr(ct.target, target),
            compute_precision=getattr(ct.precision, precision),
            skip_model_load=True,
            **options,
        )

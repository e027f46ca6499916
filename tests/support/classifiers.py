"""A small classifier, as `ct.ClassifierConfig` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.mil import Var, ct, mb, quiet_host, types

LABELS: list[Any] = ["cat", "dog", "owl"]
FEATURES = 64


def classifier(folder: Path, classes: list[Any] = LABELS) -> Path:
    """Save a product of 64 numbers with a matrix, whose largest result is the label."""
    weight = np.random.default_rng(0).normal(0, 1, (len(classes), FEATURES)).astype(np.float32)

    @mb.program(input_specs=[mb.TensorSpec((1, FEATURES), dtype=types.fp32)], opset_version=ct.target.iOS16)
    def program(x: Var) -> Any:
        return mb.softmax(x=mb.linear(x=x, weight=weight), axis=-1)

    with quiet_host():
        labels = ct.ClassifierConfig(classes)
        path = folder / "classifier.mlpackage"
        options: dict[str, Any] = {"minimum_deployment_target": ct.target.iOS18, "skip_model_load": True}
        ct.convert(program, classifier_config=labels, **options).save(str(path))
    return path

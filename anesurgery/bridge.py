"""Our passes inside a coremltools PassPipeline, for `ct.convert(pass_pipeline=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anesurgery import registry
from anesurgery.errors import PassError
from anesurgery.mil import ct
from anesurgery.surgery import Pass

ANCHOR = "common::topological_reorder"
"""Ours run behind the last of these: the graph has its final form and dtypes there."""


def pass_pipeline(steps: Sequence[Pass], base: Any = None) -> Any:
    """A new pipeline: `base` (coremltools' default one) with the steps behind the anchor, or at the end.

    Args:
        steps: passes with their options; a name may occur once.
        base: a `ct.PassPipeline`; it is not changed.

    Raises:
        PassError: the same pass occurs twice (coremltools keeps options by name).
    """
    registry.register_with_coremltools()
    base = ct.PassPipeline.DEFAULT if base is None else base
    passes, ids = list(base.passes), [f"{registry.NAMESPACE}::{step.name}" for step in steps]
    if len(set(ids)) < len(ids):
        raise PassError("a pipeline of coremltools can hold each pass once; merge the repeated steps")
    passes = [name for name in passes if name not in ids]
    at = max((i + 1 for i, name in enumerate(passes) if name == ANCHOR), default=len(passes))
    pipeline = ct.PassPipeline([*passes[:at], *ids, *passes[at:]], f"{base.pipeline_name}+anesurgery")
    for name, options in base.get_all_options().items():
        if name not in ids:
            pipeline.set_options(name, {o.option_name: o.option_val for o in options})
    for pass_id, step in zip(ids, steps, strict=True):
        if options := step.options():
            pipeline.set_options(pass_id, options)
    return pipeline

"""Our passes inside a coremltools PassPipeline, for `ct.convert(pass_pipeline=...)`, and what they report."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from anesurgery import registry
from anesurgery.errors import PassError
from anesurgery.mil import Program, ct, exclusive, quiet_host
from anesurgery.rewriting.passes import Pass, run_pass
from anesurgery.rewriting.session import Report, Session

with quiet_host():
    from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

NAMESPACE = "anesurgery"
P = TypeVar("P", bound=type[Pass])

ANCHOR = "common::topological_reorder"
"""Ours run after the last of these: the graph has its final form and dtypes there."""

REPORTS_TO = "reports_to"
"""The option of every pass of ours that holds the pipeline."""


class ReportingPipeline(ct.PassPipeline):  # type: ignore[misc]
    """A pipeline of coremltools that keeps what our passes report of a conversion."""

    def __init__(self, passes: Sequence[str], name: str) -> None:
        super().__init__(list(passes), name)
        self._session = Session()
        self._program: weakref.ref[Program] | None = None

    @property
    def report(self) -> Report:
        """What our passes did in the last conversion."""
        return self._session

    def session(self, program: Program) -> Session:
        """Return the session of the conversion of a program; a new one for each program."""
        if self._program is None or self._program() is not program:
            self._session, self._program = Session(), weakref.ref(program)
        return self._session

    def set_options(self, pass_name: str, options: Mapping[str, Any], override: bool = True) -> None:
        """Set the options of a pass; those of ours keep reporting to this pipeline."""
        ours = pass_name.startswith(f"{NAMESPACE}::")
        super().set_options(pass_name, {**options, REPORTS_TO: self} if ours else dict(options), override)


@exclusive()
def pass_pipeline(steps: Sequence[Pass], base: Any = None) -> ReportingPipeline:
    """Return a new pipeline: `base` (coremltools' default one) with the steps after the anchor, or at the end.

    Args:
        steps: passes with their options; a name may occur once.
        base: a `ct.PassPipeline`; it is not changed.

    Raises:
        PassError: the same pass occurs twice (coremltools keeps options by name).
    """
    for step in steps:
        add_pass(type(step))
    base = ct.PassPipeline.DEFAULT if base is None else base
    passes, ids = list(base.passes), [f"{NAMESPACE}::{step.name}" for step in steps]
    if len(set(ids)) < len(ids):
        raise PassError("a pipeline of coremltools can hold each pass once; merge the repeated steps")
    passes = [name for name in passes if name not in ids]
    at = max((i + 1 for i, name in enumerate(passes) if name == ANCHOR), default=len(passes))
    pipeline = ReportingPipeline([*passes[:at], *ids, *passes[at:]], f"{base.pipeline_name}+anesurgery")
    for name, options in base.get_all_options().items():
        if name not in ids:
            pipeline.set_options(name, {o.option_name: o.option_val for o in options})
    for pass_id, step in zip(ids, steps, strict=True):
        pipeline.set_options(pass_id, step.options())
    return pipeline


def add_pass(cls: type[Pass]) -> None:
    """Put a pass into coremltools' PASS_REGISTRY, as `anesurgery::<name>`; a second time replaces it."""
    PASS_REGISTRY.add(NAMESPACE, _graph_pass(cls), override=True, name=cls.name)


def _graph_pass(cls: type[Pass]) -> Any:
    """Return a coremltools graph pass whose attributes are the options of ours."""
    fields = [f.name for f in dataclasses.fields(cls)]

    def apply(self: Any, program: Any) -> None:
        pipeline = self.reports_to
        session = Session() if pipeline is None else pipeline.session(program)
        run_pass(cls(**{field: getattr(self, field) for field in fields}), program, session)

    body: dict[str, Any] = {"apply": apply, "__doc__": cls.__doc__, "__str__": lambda self: cls.name}
    body |= {**cls().options(), REPORTS_TO: None}
    return type(cls.name, (AbstractGraphPass,), body)


def register(cls: P) -> P:
    """Register your own pass by its name, here and in coremltools. A second call replaces it.

    Args:
        cls: the class of the pass, which has a `name`.

    Returns:
        The class, so that you can use this as a decorator.

    Raises:
        SurgeryError: the name belongs to a pass of the library.
    """
    registry.keep(cls)
    register_with_coremltools()
    return cls


def register_with_coremltools() -> None:
    """Put every pass over ops into coremltools' PASS_REGISTRY, as `anesurgery::<name>`; twice is harmless."""
    for name in registry.op_pass_names():
        add_pass(registry.pass_class(name))

"""What tests leave out of the libraries below, where it takes long and tells about those libraries only."""

from __future__ import annotations

import functools
import threading
import typing
from types import SimpleNamespace
from typing import Any


class _Quick(threading.local):
    """Is this thread inside a pipeline that is nobody's but coremltools'?"""

    inside = False


def convert_quickly() -> None:
    """Leave out what costs coremltools half of a conversion, and tells about coremltools only.

    It validates the program after each of its 110 passes, writes its text for a log that is off, and collects
    garbage. Here it validates once for each pipeline, unless passes of ours are in it. What a type is called it
    works out anew whenever it asks; the types themselves it keeps, so here their descriptions are kept too.
    """
    from coremltools.converters import _converters_entry
    from coremltools.converters.mil.mil import Program
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager
    from coremltools.converters.mil.mil.types import type_list, type_mapping

    apply, validate, text = PassPipelineManager.apply_pipeline, Program.validate, Program.__str__
    quick = _Quick()

    def apply_pipeline(prog: Any, pass_pipeline: Any) -> None:
        quick.inside = not any(name.startswith("anesurgery::") for name in pass_pipeline.passes)
        try:
            apply(prog, pass_pipeline)
        finally:
            quick.inside = False
        prog.validate()

    PassPipelineManager.apply_pipeline = staticmethod(apply_pipeline)
    Program.validate = lambda self, *given, **named: None if quick.inside else validate(self, *given, **named)
    Program.__str__ = lambda self: "" if quick.inside else text(self)
    for module in (type_mapping, type_list):
        module.get_type_info = functools.cache(module.get_type_info)
    _converters_entry.gc = SimpleNamespace(collect=lambda: 0)
    _infer_constants_once()
    _list_composites_once()


def _infer_constants_once() -> None:
    """Let a constant look at its value once: its type and its value are both made from it."""
    from coremltools.converters.mil.mil.ops.defs.iOS15.control_flow import Const

    infer = Const._get_type_val

    def once(self: Any, value: Any) -> Any:
        seen = self.__dict__.get("_seen")
        if seen is None or seen[0] is not value:
            seen = self._seen = (value, infer(self, value))
        return seen[1]

    Const._get_type_val = once


def _list_composites_once() -> None:
    """Let torch.export look for the composite ops of a namespace once, and not twice for each decomposition.

    An annotation that it evaluates 11,000 times for each is taken from `typing`, which keeps it.
    """
    from torch import _ops
    from torch._export import utils

    _ops.Callable = typing.Callable  # type: ignore[attr-defined]

    name = "_collect_all_valid_cia_ops_for_namespace"
    setattr(utils, name, functools.cache(getattr(utils, name)))


def command_quickly() -> None:
    """Let typer make the commands of an application once, and not again for each call within one process."""
    import typer.main
    import typer.testing

    get = functools.cache(typer.main.get_command)
    typer.main.get_command = get
    typer.testing._get_command = get  # type: ignore[attr-defined]

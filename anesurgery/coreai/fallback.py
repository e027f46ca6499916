"""Write the Core ML package for devices without Core AI: `anesurgery.to_coreml`.

An `.aimodel` is read once (`reading.AssetGraphs`) and lifted to the oldest opset that has all its ops.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anesurgery import registry
from anesurgery.coreai.asset import SUFFIX
from anesurgery.coreai.lifts.indexing import MOST_AXES
from anesurgery.coreai.reading import AssetGraphs
from anesurgery.doors import door
from anesurgery.errors import LoadError, SurgeryError, UnknownName
from anesurgery.files.package import Loaded, save
from anesurgery.files.writing import check_target
from anesurgery.mil import Program, Var, any_symbolic, ct, dtype_name, exclusive, types, walk_ops
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session

OPSETS = {release: getattr(ct.target, f"iOS{release}") for release in (15, 16, 17, 18)}
"""Oldest release of iOS -> the opset of a package that runs on it and all later ones."""
HALF = 16
"""The first release of iOS with fp16 inputs and outputs."""
MACOS = {15: 12, 16: 13, 17: 14, 18: 15}
"""Release of iOS -> the release of macOS of the same year."""


LONGEST = 2048
"""The default for the largest size of a dynamic axis, as in most published packages."""


@dataclass(frozen=True)
class Fallback:
    """The result of `to_coreml`."""

    path: Path
    """The `.mlpackage` that was written."""
    ios: int
    """The first release of iOS that runs it."""
    notes: tuple[str, ...]
    """What is called or typed differently than in the Core AI model, in words."""

    def __str__(self) -> str:
        first = f"{self.path}: runs on iOS {self.ios}, macOS {MACOS[self.ios]} and later"
        return "\n".join([first, *(f"  {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"path": str(self.path), "ios": self.ios, "notes": list(self.notes)}


@door()
@exclusive()
def to_coreml(
    model: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    ios: int | None = None,
    longest: int = LONGEST,
    overwrite: bool = False,
) -> Fallback:
    """Write an ML Program of a Core AI model, for devices with iOS 15 to 26.

    Args:
        model: path of an `.aimodel`.
        path: where to write it; ends in .mlpackage.
        ios: the first release of iOS that must run it: 15, 16, 17 or 18. Default: the oldest that has all its
            ops.
        longest: the largest size of each dynamic axis; Core ML needs a bound.
        overwrite: may what is there be replaced?

    Returns:
        The path of the package, the first release that runs it, and the names that changed.

    Raises:
        LoadError: the model cannot be read, the release lacks an op of it, an op keeps more axes than Core ML
            stores, or the place cannot be written to.
        SurgeryError: an argument is not what the call takes; or `longest` is below 1.
        UnknownName: no such release.
    """
    source, target = Path(model).expanduser(), Path(path).expanduser().absolute()
    if source.suffix.lower() != SUFFIX:
        raise LoadError(f"{source} is no {SUFFIX}; give a model of Core AI")
    if ios is not None and ios not in OPSETS:
        raise UnknownName("release of iOS", str(ios), map(str, OPSETS))
    if longest < 1:
        raise SurgeryError(f"longest={longest}: give the largest size of the axes that the model leaves open")
    check_target(source, target, overwrite)
    walked = AssetGraphs.of(source, longest)
    release, loaded = _oldest_release(walked, sorted(OPSETS) if ios is None else [ios])
    _merge_axes(loaded)
    notes = (*loaded.notes, *_input_notes(loaded, longest))
    return Fallback(save(loaded, target, overwrite=overwrite), release, notes)


def _oldest_release(walked: AssetGraphs, releases: Sequence[int]) -> tuple[int, Loaded]:
    """Return the oldest release that has all ops of the model, and the program for it."""
    *older, last = releases
    for release in older:
        try:
            loaded = walked.program(OPSETS[release])
        except LoadError:
            continue
        if release >= HALF or not _fp16_port(loaded):
            return release, loaded
    loaded = walked.program(OPSETS[last])
    if last < HALF and (name := _fp16_port(loaded)):
        raise LoadError(f"{walked.asset.path}: {name} is fp16, which iOS {last} does not take; give ios={HALF}")
    return last, loaded


def _merge_axes(loaded: Loaded) -> None:
    """Write ops of more axes than a tensor of Core ML has with fewer; Core AI has no such limit.

    Raises:
        LoadError: an op keeps too many axes.
    """
    session = Session()
    if _with_many_axes(loaded.program):
        run_pass(registry.make_pass("rerank"), loaded.program, session)
    if over := _with_many_axes(loaded.program):
        why = next((f": {refusal.reason}" for _, refusal in session.refusals if refusal.where is over.op), "")
        words = f"%{over.name} has {over.rank} axes, and Core ML stores at most {MOST_AXES}"
        raise LoadError(f"{words}{why}; reshape it in the model")


def _with_many_axes(program: Program) -> Var | None:
    """Return the first value with too many axes; None where there is none."""
    values = (v for op in walk_ops(program) for v in op.outputs if not types.is_list(v.sym_type))
    return next((v for v in values if v.rank > MOST_AXES), None)


def _fp16_port(loaded: Loaded) -> str:
    """Return the name of an input or output in fp16; "" where there is none."""
    functions = loaded.program.functions.values()
    ports = [v for f in functions for v in (*f.inputs.values(), *f.outputs)]
    return next((v.name for v in ports if dtype_name(v) == "fp16"), "")


def _input_notes(loaded: Loaded, longest: int) -> list[str]:
    """Return a sentence for each state whose dtype Core ML does not take, and each input with dynamic axes."""
    inputs = [v for f in loaded.program.functions.values() for v in f.inputs.values()]
    states = [v for v in inputs if types.is_state(v.sym_type)]
    wide = [v for v in states if dtype_name(v) != "fp16"]
    opened = [v for v in inputs if v not in states and any_symbolic(v.shape)]
    return [
        *(f"state {v.name} holds {dtype_name(v)}; Core ML takes fp16: export it so" for v in wide),
        *(f"open axes of {v.name} take 1 to {longest}" for v in opened),
    ]

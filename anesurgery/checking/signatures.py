"""Say where two models are not called alike: functions that one lacks, and other inputs, outputs and states."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from anesurgery.checking.lengths import declared_lengths, sizes_of
from anesurgery.files.package import Loaded
from anesurgery.mil import Function, Program, Var, function_of, is_symbolic, np_dtype, static_shape, types
from anesurgery.text import type_text


def differences(a: Program, b: Program, function: str | None, declared: Collection[str] = ()) -> list[str]:
    """How the second model is called differently from the first, in words.

    Where each has one function its name does not matter: nobody gives it.

    Args:
        a: the first model.
        b: the second.
        function: the only one that counts; all by default.
        declared: inputs, outputs and states that differ on purpose.
    """
    words = []
    if function is None and max(len(a.functions), len(b.functions)) > 1:
        words += [f"the second model has no function {n}" for n in a.functions if n not in b.functions]
        words += [f"only the second model has a function {n}" for n in b.functions if n not in a.functions]
    words += signature_apart(function_of(a, function), function_of(b, function), declared)
    for name in common(a, b) if function is None else ():
        apart = signature_apart(a.functions[name], b.functions[name], declared)
        words += [f"function {name}: {difference}" for difference in apart]
    return words


def common(a: Program, b: Program) -> list[str]:
    """The functions that both models have by name, but the default one of the first."""
    default = function_of(a, None)
    return [n for n, f in a.functions.items() if f is not default and n in b.functions]


def signature_apart(a: Function, b: Function, declared: Collection[str] = ()) -> list[str]:
    """How one function is called differently from another, in words."""
    words = []
    for kind, old, new in zip(("input", "state", "output"), _values(a), _values(b), strict=True):
        for name in sorted((old.keys() | new.keys()) - set(declared)):
            if difference := _apart(old.get(name), new.get(name)):
                words.append(f"{kind} {name} {difference}")
    return words


def _values(function: Function) -> tuple[Mapping[str, Var], ...]:
    """The inputs, states and outputs of a function by name."""
    states = {n: v for n, v in function.inputs.items() if types.is_state(v.sym_type)}
    inputs = {n: v for n, v in function.inputs.items() if n not in states}
    return inputs, states, {v.name: v for v in function.outputs}


def _apart(old: Var | None, new: Var | None) -> str:
    """What differs of a value by its name; nothing where its numbers can be the same."""
    if old is None or new is None:
        return f"is only in the {'second' if old is None else 'first'} model"
    if types.is_state(old.sym_type):
        same = old.sym_type.wrapped_type().get_shape() == new.sym_type.wrapped_type().get_shape()
    elif types.is_tensor(old.sym_type) and types.is_tensor(new.sym_type):
        shapes = static_shape(old), static_shape(new)
        same = None in shapes or shapes[0] == shapes[1]
        same = same and len(old.shape) == len(new.shape) and _holds(np_dtype(new), np_dtype(old))
    else:
        same = True
    return "" if same else f"is {type_text(old)} in the first model and {type_text(new)} in the second"


def _holds(new: np.dtype[Any], old: np.dtype[Any]) -> bool:
    """Can numbers of one type be given as the other? Floats are rounded, which numbers show."""
    return np.can_cast(old, new) if old.kind in "iu" and new.kind in "iu" else old.kind == new.kind


def described_apart(a: Any, b: Any, declared: Collection[str] = ()) -> list[str]:
    """How two specifications describe what has one name differently, in words; nothing without one of them.

    Args:
        a: the specification of the first model, or None.
        b: that of the second.
        declared: what differs on purpose.
    """
    if a is None or b is None:
        return []
    words = []
    for kind in ("input", "output"):
        old, new = ({f.name: _described(f) for f in getattr(spec.description, kind)} for spec in (a, b))
        for name in sorted((old.keys() & new.keys()) - set(declared)):
            apart = [k for k in old[name] if old[name][k] != new[name][k]]
            words += [
                f"{kind} {name} has another {what}: {old[name][what]}, then {new[name][what]}" for what in apart
            ]
    return words


def lengths_apart(a: Loaded, b: Loaded, declared: Collection[str] = ()) -> list[str]:
    """The lengths that the first model takes along a dynamic axis and the second does not, in words.

    Args:
        a: the first model.
        b: the second.
        declared: inputs that differ on purpose.
    """
    first, second = (declared_lengths(model.program, model.spec) for model in (a, b))
    old, new = (function_of(model.program, None).inputs for model in (a, b))
    words = []
    for name in sorted((old.keys() & new.keys()) - set(declared) if a.spec and b.spec else ()):
        for axis, (d, e) in enumerate(zip(sizes_of(old[name]), sizes_of(new[name]), strict=False)):
            if not (is_symbolic(d) and is_symbolic(e)):
                continue
            (low, high), (least, most) = first.range_of(d), second.range_of(e)
            if low < least or (most is not None and (high is None or most < high)):
                words.append(
                    f"input {name} takes {_ends(low, high)} along axis {axis}, then {_ends(least, most)}"
                )
    return words


def _ends(low: int, high: int | None) -> str:
    return f"{low} or more" if high is None else f"{low} to {high}"


def _described(feature: Any) -> dict[str, str]:
    """What a caller has to know of a value beside its shape and type of numbers."""
    form = feature.type.WhichOneof("Type") or "unknown"
    picture, array = feature.type.imageType, feature.type.multiArrayType
    colors = picture.ColorSpace.Name(picture.colorSpace) if form == "imageType" else "none"
    default = array.WhichOneof("defaultOptionalValue") if form == "multiArrayType" else None
    given = "none" if default is None else f"{getattr(array, default):g}"
    return {"form": form, "order of colors": colors, "default": given}

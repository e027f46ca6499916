"""Say in words where two models are called differently: functions, inputs, outputs, states and lengths.

`compare` reports these beside the numbers. A contract (`Surgery.contract`) declares those that are meant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from anesurgery.checking.lengths import declared_lengths, sizes_of
from anesurgery.files.package import Loaded
from anesurgery.mil import Function, Program, Var, function_of, is_symbolic, np_dtype, static_shape, types
from anesurgery.text import type_text

# Say where two models are not called alike: functions that one lacks, and other inputs, outputs and states.


def call_differences(a: Program, b: Program, function: str | None, declared: Collection[str] = ()) -> list[str]:
    """Return how the second model is called differently from the first, in words.

    If both have a single function, its name does not matter, since callers need not give it.

    Args:
        a: the first model.
        b: the second model.
        function: the only function that counts; all by default.
        declared: inputs, outputs and states that differ on purpose.
    """
    words = []
    if function is None and max(len(a.functions), len(b.functions)) > 1:
        words += [f"the second model has no function {n}" for n in a.functions if n not in b.functions]
        words += [f"only the second model has a function {n}" for n in b.functions if n not in a.functions]
    words += signature_differences(function_of(a, function), function_of(b, function), declared)
    for name in functions_in_common(a, b) if function is None else ():
        apart = signature_differences(a.functions[name], b.functions[name], declared)
        words += [f"function {name}: {difference}" for difference in apart]
    return words


def functions_in_common(a: Program, b: Program) -> list[str]:
    """Return the names of functions that both models have, without the first model's default one."""
    default = function_of(a, None)
    return [n for n, f in a.functions.items() if f is not default and n in b.functions]


def signature_differences(a: Function, b: Function, declared: Collection[str] = ()) -> list[str]:
    """Return how one function is called differently from another, in words."""
    words = []
    for kind, old, new in zip(("input", "state", "output"), _ports(a), _ports(b), strict=True):
        for name in sorted((old.keys() | new.keys()) - set(declared)):
            if difference := _value_difference(old.get(name), new.get(name)):
                words.append(f"{kind} {name} {difference}")
    return words


def _ports(function: Function) -> tuple[Mapping[str, Var], ...]:
    """Return the inputs, states and outputs of a function by name."""
    states = {n: v for n, v in function.inputs.items() if types.is_state(v.sym_type)}
    inputs = {n: v for n, v in function.inputs.items() if n not in states}
    return inputs, states, {v.name: v for v in function.outputs}


def _value_difference(old: Var | None, new: Var | None) -> str:
    """Return how two values of one name differ, in words; "" where they can hold the same numbers."""
    if old is None or new is None:
        return f"is only in the {'second' if old is None else 'first'} model"
    if types.is_state(old.sym_type):
        same = old.sym_type.wrapped_type().get_shape() == new.sym_type.wrapped_type().get_shape()
    elif types.is_tensor(old.sym_type) and types.is_tensor(new.sym_type):
        shapes = static_shape(old), static_shape(new)
        same = None in shapes or shapes[0] == shapes[1]
        same = same and len(old.shape) == len(new.shape) and _can_hold(np_dtype(new), np_dtype(old))
    else:
        same = True
    return "" if same else f"is {type_text(old)} in the first model and {type_text(new)} in the second"


def _can_hold(new: np.dtype[Any], old: np.dtype[Any]) -> bool:
    """Return whether numbers of the old dtype can be given as the new one; floats may be rounded."""
    return np.can_cast(old, new) if old.kind in "iu" and new.kind in "iu" else old.kind == new.kind


def description_differences(a: Any, b: Any, declared: Collection[str] = ()) -> list[str]:
    """Return how two specifications describe values of the same name differently, in words.

    Args:
        a: the specification of the first model, or None: then nothing is compared.
        b: that of the second.
        declared: inputs and outputs that differ on purpose.
    """
    if a is None or b is None:
        return []
    words = []
    for kind in ("input", "output"):
        old, new = ({f.name: _feature_facts(f) for f in getattr(spec.description, kind)} for spec in (a, b))
        for name in sorted((old.keys() & new.keys()) - set(declared)):
            apart = [k for k in old[name] if old[name][k] != new[name][k]]
            words += [
                f"{kind} {name} has another {what}: {old[name][what]}, then {new[name][what]}" for what in apart
            ]
    return words


def length_differences(a: Loaded, b: Loaded, declared: Collection[str] = ()) -> list[str]:
    """Return the lengths that the first model takes along a dynamic axis and the second does not, in words.

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
                    f"input {name} takes {_range_words(low, high)} along axis {axis}, "
                    f"then {_range_words(least, most)}"
                )
    return words


def _range_words(low: int, high: int | None) -> str:
    return f"{low} or more" if high is None else f"{low} to {high}"


def _feature_facts(feature: Any) -> dict[str, str]:
    """Return what a caller must know of a value besides its shape and dtype."""
    form = feature.type.WhichOneof("Type") or "unknown"
    picture, array = feature.type.imageType, feature.type.multiArrayType
    colors = picture.ColorSpace.Name(picture.colorSpace) if form == "imageType" else "none"
    default = array.WhichOneof("defaultOptionalValue") if form == "multiArrayType" else None
    given = "none" if default is None else f"{getattr(array, default):g}"
    return {"form": form, "order of colors": colors, "default": given}

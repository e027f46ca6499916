"""The interface of a model, compared before and after surgery, and what passes change of it on purpose.

The old model is fed the old inputs; `adapt_inputs` turns them into the inputs of the new model, and
`adapt_outputs` turns the old model's outputs into what the new model should give.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anesurgery.errors import warn
from anesurgery.files.protobuf import proto
from anesurgery.mil import Array, Function, Program, Var, dtype_name, is_symbolic, types


@dataclass(frozen=True)
class Port:
    """One input, output or state."""

    name: str
    kind: str
    """Element type as MIL prints it, with "state" or "list" in front where it is one."""
    shape: tuple[int | None, ...]
    """None for a flexible dimension."""

    def __str__(self) -> str:
        dims = "x".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.name} ({dims or 'scalar'} {self.kind})"


@dataclass(frozen=True)
class Signature:
    """Inputs (states included) and outputs of a function, in order."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


VERSION = "specification version"
"""What a declared change names when the model needs a newer OS."""


@dataclass(frozen=True)
class Interface:
    """Everything of a model that its callers depend on."""

    functions: dict[str, Signature]
    description: Mapping[str, bytes] = field(default_factory=dict)
    """The parts of the description that is saved with the model, as `files.description.parts` names them."""
    specification_version: int = 0

    @property
    def images(self) -> frozenset[str]:
        """The inputs and outputs that the description calls images."""
        kinds = {k: data for k, data in self.description.items() if k.split(" ")[0] in ("input", "output")}
        features = [proto.Model_pb2.FeatureDescription.FromString(data) for data in kinds.values()]
        return frozenset(f.name for f in features if f.type.WhichOneof("Type") == "imageType")

    def difference(self, other: Interface, ignore: Collection[str] = ()) -> str:
        """What differs in `other`, in words; "" when nothing does.

        Args:
            other: the interface after.
            ignore: names of inputs, outputs and functions that may differ.
        """
        apart = self.functions.keys() ^ other.functions.keys()
        words = [
            f"function {name!r} {'is gone' if name in self.functions else 'is new'}"
            for name in sorted(apart - set(ignore))
        ]
        for name in self.functions.keys() & other.functions.keys():
            a, b = self.functions[name], other.functions[name]
            words += _ports("input", a.inputs, b.inputs, ignore)
            words += _ports("output", a.outputs, b.outputs, ignore)
        if self.description and other.description:
            words += _parts(self.description, other.description, ignore)
        if self.specification_version != other.specification_version and VERSION not in ignore:
            words.append(f"{VERSION} {self.specification_version} became {other.specification_version}")
        return "; ".join(words)


def _parts(a: Mapping[str, bytes], b: Mapping[str, bytes], ignore: Collection[str]) -> list[str]:
    """How two descriptions differ, part by part; the last word of a part is the name of its feature."""
    old, new = ([p for p in parts if not {p.split()[-1], p.split(": ")[0]} & set(ignore)] for parts in (a, b))
    words = [f"the description of {part} is gone" for part in old if part not in b]
    words += [f"the description of {part} is new" for part in new if part not in a]
    words += [f"the description of {part} changed" for part in old if part in b and a[part] != b[part]]
    if not words and old != new:
        words.append(f"the description of {', '.join(old)} became that of {', '.join(new)}")
    return words


def _ports(word: str, a: tuple[Port, ...], b: tuple[Port, ...], ignore: Collection[str]) -> list[str]:
    old = {p.name: p for p in a if p.name not in ignore}
    new = {p.name: p for p in b if p.name not in ignore}
    words = [f"{word} {p} is gone" for n, p in old.items() if n not in new]
    words += [f"{word} {p} is new" for n, p in new.items() if n not in old]
    words += [f"{word} {old[n]} became {new[n]}" for n in old if n in new and old[n] != new[n]]
    if not words and list(old) != list(new):
        words.append(f"the order of {word}s {', '.join(old)} became {', '.join(new)}")
    return words


def signatures(program: Program) -> dict[str, Signature]:
    """The signature of every function."""
    return {name: _signature(f) for name, f in program.functions.items()}


def _signature(function: Function) -> Signature:
    inputs = tuple(port(name, var) for name, var in function.inputs.items())
    return Signature(inputs, tuple(port(v.name, v) for v in function.outputs))


def port(name: str, var: Var) -> Port:
    """A value as a caller sees it."""
    if types.is_state(var.sym_type):
        wrapped = var.sym_type.wrapped_type()
        kind = f"state {types.builtin_to_string(wrapped.get_primitive())}"
        return Port(name, kind, _dims(wrapped.get_shape()))
    if not (types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)):
        return Port(name, str(var.sym_type.__type_info__()), ())
    return Port(name, dtype_name(var), _dims(var.shape or ()))


def _dims(shape: tuple[object, ...]) -> tuple[int | None, ...]:
    return tuple(None if is_symbolic(d) else int(str(d)) for d in shape)


Values = Mapping[str, Array]


def _unchanged(values: Values) -> Values:
    return values


def _unchanged_outputs(outputs: Values, inputs: Values) -> Values:
    return outputs


@dataclass(frozen=True)
class InterfaceChange:
    """One declared change of inputs or outputs."""

    words: str
    """What the caller must change, in a sentence."""
    names: tuple[str, ...]
    """The inputs and outputs that are added, dropped or changed."""
    inputs: Callable[[Values], Values] = _unchanged
    """From the old model's inputs to the new model's (numpy arrays by name)."""
    outputs: Callable[[Values, Values], Values] = _unchanged_outputs
    """From the old model's (outputs, inputs) to the outputs expected of the new model."""
    retypes: bool = False
    """Is the element type all that changes, of numbers that stay the same?"""
    call: Callable[[Any, Values, str], Values] | None = None
    """Where one call becomes several: from (new model, old model's inputs, precision) to the old outputs."""


def adapt_inputs(changes: Iterable[InterfaceChange], inputs: Values) -> Values:
    """The new model's inputs for a set of the old model's."""
    for change in changes:
        inputs = change.inputs(inputs)
    return inputs


def call_of(changes: Iterable[InterfaceChange]) -> Callable[[Any, Values, str], Values] | None:
    """How the new model is called, where one call became several."""
    return next((change.call for change in reversed(list(changes)) if change.call is not None), None)


def adapt_outputs(changes: Iterable[InterfaceChange], outputs: Values, inputs: Values) -> Values:
    """What the new model should give, from what the old model gave for `inputs` (the old model's)."""
    for change in changes:
        outputs = change.outputs(outputs, inputs)
    return outputs


IDENTIFIERS = "MIL takes identifiers only"
"""Why an input or output is renamed: in ML Programs coremltools refuses any but [a-zA-Z_][a-zA-Z0-9_]*."""


def warn_of_names(notes: Iterable[str]) -> None:
    """Warn of the inputs and outputs that got other names, by what the notes of a network's import say."""
    if renamed := [words for words in notes if words.endswith(IDENTIFIERS)]:
        warn(f"the interface changes; give and read the new names: {'; '.join(renamed)}")

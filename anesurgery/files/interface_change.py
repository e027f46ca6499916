"""Changes of a model's interface that a pass makes on purpose, with what is needed to still compare models.

The old model is fed the old inputs; `adapt_inputs` turns them into the inputs of the new model, and
`adapt_outputs` turns the old model's outputs into what the new model should give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from anesurgery.errors import warn
from anesurgery.mil import Array

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

"""What a program by itself does not tell of the model that it was read from: its description and its format.

Kept beside the program for as long as it lives, so that `load(path).program` is inspected as the path is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from anesurgery.files.protobuf import proto
from anesurgery.mil import Program


@dataclass(frozen=True)
class Origin:
    """The model of a program.

    Attributes:
        description: `ModelDescription` message, with the default shapes of the inputs.
        version: of its specification.
        network: is the program the translation of a neural network?
    """

    description: Any
    version: int
    network: bool = False


_ORIGINS: WeakKeyDictionary[Program, Origin] = WeakKeyDictionary()


def remember(program: Program, spec: Any) -> None:
    """Note the model of a program; whether it was a neural network is kept."""
    description = proto.Model_pb2.ModelDescription()
    description.CopyFrom(spec.description)
    before = _ORIGINS.get(program)
    network = before is not None and before.network
    _ORIGINS[program] = Origin(description, int(spec.specificationVersion), network)


def translated(program: Program) -> None:
    """Note that a program, of which the model is known, is the translation of a neural network."""
    _ORIGINS[program] = replace(_ORIGINS[program], network=True)


def origin_of(program: Program) -> Origin | None:
    """The model that a program was read from; None for one that was built or converted."""
    return _ORIGINS.get(program)

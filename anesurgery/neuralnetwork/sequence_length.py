"""State how long a sequence is: networks of specification 1 to 3 take any length, and their files name none."""

from __future__ import annotations

from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files.protobuf import proto
from anesurgery.neuralnetwork.spec import is_legacy, network_of


def with_sequence(spec: Any, length: int, what: str) -> Any:
    """A copy of a specification whose inputs are sequences of a length, with a batch of 1.

    Optional inputs are states, which have no sequence; images have none either.

    Args:
        spec: of a network in the mapping of five axes (sequence, batch, channel, height, width).
        length: number of steps, at least 1.
        what: the model in words, for errors.

    Raises:
        LoadError: the length is below 1, or the network has no such mapping or no such input.
    """
    if length < 1:
        raise LoadError(f"{what}: sequence={length}; a sequence has at least 1 step")
    if not is_legacy(network_of(spec)):
        raise LoadError(
            f"{what}: its arrays have the shapes that are stated; sequence= is for the rank 5 mapping"
        )
    longer = proto.Model_pb2.Model()
    longer.CopyFrom(spec)
    arrays = [
        f.type.multiArrayType
        for f in longer.description.input
        if f.type.WhichOneof("Type") == "multiArrayType" and not f.type.isOptional
    ]
    for array in arrays:
        sizes = list(array.shape)[-3:]
        array.shape[:] = [length, 1, *sizes, *(1,) * (3 - len(sizes))]
        array.ClearField("ShapeFlexibility")
    if not arrays:
        raise LoadError(f"{what}: no input is a sequence; leave sequence= out")
    return longer

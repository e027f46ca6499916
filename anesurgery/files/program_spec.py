"""Walk the protobuf of an ML Program: its ops, the values in them, and the weight files that these name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def weight_files(program: Any) -> list[str]:
    """Return the paths of the weight files that a MIL_pb2.Program refers to, starting with `@model_path`."""
    return list(dict.fromkeys(blob.fileName for blob in blob_values(program)))


def blob_values(program: Any) -> Iterator[Any]:
    """Yield the places in weight files that a MIL_pb2.Program refers to."""
    values = (value for op in operations(program) for value in literal_values(op))
    return (v.blobFileValue for v in values if v.WhichOneof("value") == "blobFileValue")


def literal_values(op: Any) -> Iterator[Any]:
    """Yield the values stored in an op itself: its attributes, and inputs given as a value, not by name."""
    yield from op.attributes.values()
    for argument in op.inputs.values():
        yield from (b.value for b in argument.arguments if b.WhichOneof("binding") == "value")


def operations(program: Any) -> Iterator[Any]:
    """Yield every op of a MIL_pb2.Program, including those of nested blocks."""
    pending = [b for f in program.functions.values() for b in f.block_specializations.values()]
    while pending:
        block = pending.pop()
        for op in block.operations:
            yield op
            pending.extend(op.blocks)

"""The MIL text of a model: its program as protobuf, and that as text."""

from __future__ import annotations

import numpy as np

from anesurgery.files.compiled import operations, values_of
from anesurgery.files.mil_writer import VERSION, write_mil
from anesurgery.files.package import Loaded
from anesurgery.files.protobuf import to_proto
from anesurgery.mil import Var


def program_text(loaded: Loaded, version: str = VERSION) -> str:
    """The MIL text of a model (no trailing newline).

    A weight that stands unchanged in the model's weight file is written as its place there, every other
    constant in full.

    Args:
        loaded: the model.
        version: of the text, see `write_mil`.
    """
    weights = loaded.weights

    def place(var: Var) -> int | None:
        blob = None if weights is None else weights.holds(np.asarray(var.val))
        return None if blob is None else blob.place

    source = None if loaded.spec is None else loaded.spec.mlProgram
    spec = to_proto(loaded.program, loaded.version, place, source)
    if weights is not None:
        for op in operations(spec):
            for value in values_of(op):
                if value.WhichOneof("value") == "blobFileValue":
                    value.blobFileValue.fileName = f"@model_path/weights/{weights.path.name}"
    return write_mil(spec, version)

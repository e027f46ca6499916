"""Chunks of a model, which `ane.split` made, as one subject of passes: a folder of packages, or a `Chain`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anesurgery.errors import SurgeryError
from anesurgery.files.sequence import Chain, check_folder, is_chunked, is_network
from anesurgery.files.writing import check_target
from anesurgery.loading import load_chain
from anesurgery.rewriting.ml_program import MLProgram, ProgramSequence, Subject


def read_chunks(model: Any) -> ProgramSequence:
    """The chunks of a chain, or of the folder that it is in.

    Raises:
        SurgeryError: one of them is a neural network.
    """
    chain = model if isinstance(model, Chain) else load_chain(model)
    for number, chunk in enumerate(chain.chunks, 1):
        if is_network(chunk):
            raise SurgeryError(
                f"chunk {number} is a neural network; make an ML Program of the model by "
                "anesurgery.upgrade, and cut that"
            )
    return ProgramSequence(chain)


def check_out(
    model: str | os.PathLike[str], place: Path, overwrite: bool, suffix: str = MLProgram.suffix
) -> None:
    """Refuse a place that the result cannot be written to, before any work is done.

    Raises:
        LoadError: it may not; chunks go into a folder, or as a pipeline into a package.
    """
    source, target = Path(model).expanduser(), place.expanduser().absolute()
    if is_chunked(source) and not target.suffix:
        check_folder(source, target, overwrite)
    else:
        check_target(source, target, overwrite, suffix)


def read_subject(model: Any, kind: type[Subject] = MLProgram) -> Any:
    """A model as passes of a kind edit it, chunks one after the other; one that was read already is itself."""
    if isinstance(model, Subject):
        return model
    return read_chunks(model) if kind is MLProgram and is_chunked(model) else kind.read(model)

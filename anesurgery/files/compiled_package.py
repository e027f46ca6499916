"""Give back the package of a compiled model: `decompile("x.mlmodelc", "x.mlpackage")`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from anesurgery.doors import door
from anesurgery.errors import LoadError
from anesurgery.files.compiled import is_compiled, literal_values, operations, read_compiled, weight_files
from anesurgery.files.package import WEIGHTS, write_spec
from anesurgery.files.weights import WeightFile
from anesurgery.files.writing import check_target, write_atomically

IN_MODEL = "@model_path/weights/"
"""The start of the path of a weight file in the program."""


@dataclass(frozen=True)
class Decompiled:
    """What `decompile` wrote."""

    path: Path
    notes: tuple[str, ...]
    """What could not be recovered, or came from another file than usual."""

    def __str__(self) -> str:
        return "\n".join([f"wrote {self.path}", *(f"note: {note}" for note in self.notes)])


@door()
def decompile(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, overwrite: bool = False
) -> Decompiled:
    """Write the package of a compiled ML Program.

    Every op and attribute is kept, even if coremltools does not know it. Weight files are copied.

    Args:
        source: the .mlmodelc folder; it is never changed.
        target: the path of the package, which ends in .mlpackage.
        overwrite: may an existing package be replaced?

    Returns:
        Where the package is, and notes on what a compiled model does not hold.

    Raises:
        LoadError: the source is not a compiled ML Program or is damaged; or the target cannot be written.
        SurgeryError: an argument is not what the call takes.
    """
    folder, place = Path(source).expanduser(), Path(target).expanduser().absolute()
    if not is_compiled(folder):
        raise LoadError(f"{folder} is not a compiled model; give an .mlmodelc folder")
    check_target(folder, place, overwrite)
    compiled = read_compiled(folder)
    weights = _weights(compiled.spec.mlProgram, folder)

    def write(package: Path) -> None:
        (package / "Data" / WEIGHTS).mkdir(parents=True)
        for name, file in weights.items():
            copy = package / "Data" / WEIGHTS / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("wb") as weight_file:
                file.copy_to(weight_file)
        compiled.source.check_place()  # else the weights may be those of another model
        write_spec(compiled.spec, package)

    return Decompiled(write_atomically(place, write, overwrite), compiled.notes)


def _weights(program: Any, folder: Path) -> dict[str, WeightFile]:
    """Return {name in the package: weight file} of a program.

    Raises:
        LoadError: one is missing, lacks a weight that the program reads, or is outside of the folder.
    """
    by_path = {}
    for path in weight_files(program):
        name = path.removeprefix(IN_MODEL)
        if name == path or ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise LoadError(
                f"{folder} has weights at {path!r}, outside of its folder weights/; do not trust it"
            )
        file = folder / "weights" / name
        if not file.is_file():
            raise LoadError(f"{folder} lacks its weight file weights/{name}; copy the compiled model again")
        by_path[path] = name, WeightFile(file)
    for op in operations(program):
        for value in literal_values(op):
            if value.WhichOneof("value") == "blobFileValue":
                by_path[value.blobFileValue.fileName][1].blob(value.blobFileValue.offset)
    return dict(by_path.values())

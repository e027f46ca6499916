"""The weights that are finished, in a folder: a run that was killed goes on where it was, to the same bytes.

Each is named by all that decides it: its numbers, the form, what its ops read, and the program that corrects.
So a folder may serve any number of models and settings; what nobody asks for again may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.compressing import correcting, grids, second_order, weight_rows
from anesurgery.compressing.correcting import Candidate, Corrected, correct, size_of
from anesurgery.errors import SurgeryError
from anesurgery.files.writing import write_atomically
from anesurgery.mil import Array, types
from anesurgery.regions import clusters
from anesurgery.regions.compressed_weights import Form, Result
from anesurgery.regions.reencoding import numbers_of

PROGRAM = (correcting, grids, second_order, weight_rows, clusters)
"""The modules that decide what a weight becomes."""
TOLD = "about"
"""The entry of a file that says what the arrays are."""


@dataclass(frozen=True)
class Finished:
    """Corrects weights, or takes them from a folder.

    Args:
        folder: of the finished weights, made where it is missing; None keeps nothing.

    Raises:
        SurgeryError: there is a file in the place of the folder, or it cannot be made.
    """

    folder: Path | None = None

    def __post_init__(self) -> None:
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SurgeryError(f"{self.folder} cannot hold the finished weights: {error}") from error

    def correct(
        self, one: Candidate, kind: str, hessians: Array, version: int, plain: Array | None = None
    ) -> Corrected:
        """What `correct` makes of these."""
        if self.folder is None:
            return correct(one, kind, hessians, version, plain)
        path = self.folder / f"{_key(one, kind, hessians, version, plain)}.npz"
        if (held := _read(path, one, kind)) is not None:
            return held
        made = correct(one, kind, hessians, version, plain)
        write_atomically(path, lambda place: _write(place, made), overwrite=True)
        return made


@lru_cache(maxsize=1)
def _program() -> bytes:
    """A digest of the modules that correct: another version of them makes other weights."""
    digest = hashlib.blake2b()
    for module in PROGRAM:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.digest()


def _key(one: Candidate, kind: str, hessians: Array, version: int, plain: Array | None) -> str:
    reader = one.readers[0]
    told = (kind, version, reader.layout, correcting.ROUNDS, reader.shape)
    digest = hashlib.blake2b(_program() + repr(told).encode(), digest_size=20)
    for array in (np.asarray(one.var.val), reader.channels, hessians, hessians if plain is None else plain):
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def _write(path: Path, made: Corrected) -> None:
    """The inputs of the op that decodes, and the errors."""
    inputs = {name: np.asarray(value) for name, value in made.form.inputs.items()}
    kinds = {n: types.builtin_to_string(types.numpy_type_to_builtin_type(a.dtype)) for n, a in inputs.items()}
    arrays: dict[str, Any] = {name: array.view(array.dtype.str) for name, array in inputs.items()}
    about = {"op": made.form.op_type, "kinds": kinds, "error": made.error, "rounded": made.rounded}
    arrays[TOLD] = np.array(json.dumps(about))
    with path.open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, one: Candidate, kind: str) -> Corrected | None:
    """A finished weight; None where there is none, or the file is broken."""
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            held = {name: file[name] for name in file.files}
        about: Mapping[str, Any] = json.loads(str(held.pop(TOLD)))
        inputs = {name: _typed(array, about["kinds"][name]) for name, array in held.items()}
        form = Form(about["op"], inputs)
        array = np.asarray(numbers_of(Result(form))).reshape(one.readers[0].shape)
        return Corrected(one, kind, form, array, about["error"], size_of(form), about["rounded"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _typed(array: Array, kind: str) -> Array:
    """With the type that coremltools marks numbers of less than a byte by, which no file keeps."""
    dtype = types.nptype_from_builtin(types.string_to_builtin(kind))
    return array if array.dtype == dtype and np.dtype(dtype).metadata is None else array.view(dtype)

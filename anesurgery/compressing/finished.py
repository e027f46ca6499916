"""The weights that are finished, in a folder: a run that was killed goes on where it was, to the same bytes.

Each is named by all that decides it: its numbers, the form, what its ops read, and the program that corrects.
So a folder may serve any number of models and settings; what nobody asks for again may be deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.compressing import correcting, fitting, grids, second_order, tables, weight_rows, zeros
from anesurgery.compressing.correcting import Candidate, Corrected, correct, decoded, size_of
from anesurgery.errors import SurgeryError
from anesurgery.files.sharing import Workers, result
from anesurgery.files.writing import write_atomically
from anesurgery.mil import Array, types
from anesurgery.regions import clusters
from anesurgery.regions.compressed_weights import Form, Result

PROGRAM = (correcting, fitting, grids, fitting, second_order, tables, weight_rows, zeros, clusters)
"""The modules that decide what a weight becomes."""
NONE: Array = np.empty(0)
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
    workers: Workers = field(default_factory=Workers)
    """That correct them."""

    def __post_init__(self) -> None:
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SurgeryError(f"{self.folder} cannot hold the finished weights: {error}") from error

    def hand_in(
        self,
        one: Candidate,
        kind: str,
        hessians: Array,
        version: int,
        centres: Array | None = None,
        crossed: Array | None = None,
    ) -> Callable[[], Corrected]:
        """Begin with what `correct` makes of these, and give what waits for it."""
        if self.folder is None:
            return self._due(one, kind, (hessians, version, centres, crossed), None)
        met = [NONE if each is None else each for each in (hessians, centres, crossed)]
        path = self.folder / f"{_key(one, kind, met, version)}.npz"
        if (held := _read(path, one, kind)) is not None:
            return lambda: held
        return self._due(one, kind, (hessians, version, centres, crossed), path)

    def _due(
        self, one: Candidate, kind: str, matrices: tuple[Any, ...], path: Path | None
    ) -> Callable[[], Corrected]:
        if self.workers.here:
            future = self.workers.submit(correct, one, kind, *matrices)
        else:
            future = self.workers.submit(_sent, portable(one), kind, *matrices)

        def due() -> Corrected:
            answer = result(future)
            corrected = answer if self.workers.here else _unpacked(answer, one, kind)
            if path is not None:
                write_atomically(path, lambda place: _write(place, corrected), overwrite=True)
            return corrected

        return due


@dataclass(frozen=True)
class _Numbers:
    """What `correct` asks of a weight, for another process."""

    val: Array


def portable(one: Candidate) -> Candidate:
    """A weight and how its first reader reads it, without the program that they are in."""
    nothing: Any = None
    numbers: Any = _Numbers(np.array(one.var.val))
    return Candidate(numbers, (replace(one.readers[0], op=nothing, inputs=nothing),))


@lru_cache(maxsize=1)
def _program() -> bytes:
    """A digest of the modules that correct: another version of them makes other weights."""
    digest = hashlib.blake2b()
    for module in PROGRAM:
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.digest()


def _key(one: Candidate, kind: str, met: Sequence[Array], version: int) -> str:
    reader = one.readers[0]
    told = (kind, version, reader.layout, fitting.ROUNDS, reader.shape)
    digest = hashlib.blake2b(_program() + repr(told).encode(), digest_size=20)
    for array in (np.asarray(one.var.val), reader.channels, *met):
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def _sent(*arguments: Any) -> dict[str, Any]:
    """What `correct` makes, as plain data: types of less than a byte do not travel."""
    return _packed(correct(*arguments))


def _packed(corrected: Corrected) -> dict[str, Any]:
    """The arrays of a form, what they are, and the errors."""
    arrays: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    op = _told(corrected.form, arrays, kinds)
    about = {"op": op, "kinds": kinds, "error": corrected.error, "rounded": corrected.rounded}
    return {**arrays, TOLD: np.array(json.dumps(about))}


def _unpacked(content: Mapping[str, Any], one: Candidate, kind: str) -> Corrected:
    """What `_packed` was given."""
    about: Mapping[str, Any] = json.loads(str(content[TOLD]))
    arrays = {name: _typed(content[name], each) for name, each in about["kinds"].items()}
    form = _form(about["op"], arrays)
    array = decoded(form).reshape(one.readers[0].shape)
    return Corrected(one, kind, form, array, about["error"], size_of(form), about["rounded"])


def _write(path: Path, corrected: Corrected) -> None:
    """Write a finished weight, and see that it is on the disk."""
    with path.open("wb") as file:
        np.savez(file, **_packed(corrected))
        file.flush()
        os.fsync(file.fileno())


def _told(form: Form, arrays: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    """A form as plain data; its arrays are put aside under numbers."""
    inputs: dict[str, Any] = {}
    inner: dict[Form, dict[str, Any]] = {}
    for name, value in form.inputs.items():
        if isinstance(value, Result):
            if value.form not in inner:
                inner[value.form] = _told(value.form, arrays, kinds)
            inputs[name] = {"of": inner[value.form], "number": value.number}
            continue
        array, key = np.asarray(value), f"array{len(arrays)}"
        kinds[key] = types.builtin_to_string(types.numpy_type_to_builtin_type(array.dtype))
        arrays[key], inputs[name] = array.view(array.dtype.str), key
    return {"type": form.op_type, "inputs": inputs}


def _form(op: Mapping[str, Any], arrays: Mapping[str, Array]) -> Form:
    """The form that `_told` told of; what two of its inputs are results of is one."""
    inner: dict[str, Form] = {}
    inputs: dict[str, Any] = {}
    for name, value in op["inputs"].items():
        if isinstance(value, str):
            inputs[name] = arrays[value]
        else:
            key = json.dumps(value["of"])
            inner.setdefault(key, _form(value["of"], arrays))
            inputs[name] = Result(inner[key], value["number"])
    return Form(op["type"], inputs)


def _read(path: Path, one: Candidate, kind: str) -> Corrected | None:
    """A finished weight; None where there is none, or the file is broken."""
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            return _unpacked({name: file[name] for name in file.files}, one, kind)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _typed(array: Array, kind: str) -> Array:
    """With the type that coremltools marks numbers of less than a byte by, which no file keeps."""
    dtype = types.nptype_from_builtin(types.string_to_builtin(kind))
    return array if array.dtype == dtype and np.dtype(dtype).metadata is None else array.view(dtype)

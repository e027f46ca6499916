"""Correct weights by workers, and keep them in a folder, so that a killed run goes on and ends the same.

`compress(work=folder)` uses it. The name of a file is a digest of all that decides the weight: its numbers, the
form, the moments of what its ops read, and the source of the modules that correct it. So a folder may serve any
models and settings, and any file may be deleted.
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
from types import SimpleNamespace
from typing import Any

import numpy as np

from anesurgery.compressing import fitting
from anesurgery.compressing.correcting import Candidate, CorrectedWeight, correct, decode, form_bytes
from anesurgery.errors import SurgeryError
from anesurgery.files.sharing import Workers, result
from anesurgery.files.writing import write_atomically
from anesurgery.mil import Array, types
from anesurgery.ops import names
from anesurgery.regions.compressed_weights import Form, Result

PROGRAM = names(
    "correcting fitting grids input_moments running_samples second_order tables weight_rows ../regions/clusters"
)
"""The modules that decide what a weight becomes, seen from here."""
NO_ARRAY: Array = np.empty(0)
ABOUT = "about"
"""The entry of a file with the JSON that describes its arrays."""


@dataclass(frozen=True)
class Finished:
    """Corrects weights, or reads them from a folder.

    Args:
        folder: of the finished weights, created if missing; None keeps none.

    Raises:
        SurgeryError: the folder cannot be created, or is a file.
    """

    folder: Path | None = None
    workers: Workers = field(default_factory=Workers)
    """They correct the weights."""

    def __post_init__(self) -> None:
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SurgeryError(f"{self.folder} cannot hold the finished weights: {error}") from error

    def begin(
        self,
        candidate: Candidate,
        kind: str,
        hessians: Array,
        version: int,
        centres: Array | None = None,
        crossed: Array | None = None,
    ) -> Callable[[], CorrectedWeight]:
        """Begin `correct` with these arguments, and return a function that waits for the result."""
        arguments = hessians, version, centres, crossed
        if self.folder is None:
            return self._submit(candidate, kind, arguments, None)
        arrays = [NO_ARRAY if each is None else each for each in (hessians, centres, crossed)]
        path = self.folder / f"{_file_key(candidate, kind, arrays, version)}.npz"
        finished = _read(path, candidate, kind)
        if finished is not None:
            return lambda: finished
        return self._submit(candidate, kind, arguments, path)

    def _submit(
        self, candidate: Candidate, kind: str, arguments: tuple[Any, ...], path: Path | None
    ) -> Callable[[], CorrectedWeight]:
        """Let a worker correct a weight; the function that waits for it also writes the file."""
        if self.workers.here:
            future = self.workers.submit(correct, candidate, kind, *arguments)
        else:
            future = self.workers.submit(_correct_remotely, portable(candidate), kind, *arguments)

        def wait() -> CorrectedWeight:
            answer = result(future)
            corrected = answer if self.workers.here else _unpack(answer, candidate, kind)
            if path is not None:
                write_atomically(path, lambda place: _write(place, corrected), overwrite=True)
            return corrected

        return wait


def portable(candidate: Candidate) -> Candidate:
    """Return a weight and how its first op reads it, without the program, to send to another process."""
    nothing: Any = None
    numbers: Any = SimpleNamespace(val=np.array(candidate.var.val))  # `correct` reads only this of a `Var`
    return Candidate(numbers, (replace(candidate.readers[0], op=nothing, inputs=nothing),))


@lru_cache(maxsize=1)
def _program_digest() -> bytes:
    """Return a digest of the source of `PROGRAM`: another version of it may give other weights."""
    digest = hashlib.blake2b()
    for module in sorted(PROGRAM):
        digest.update((Path(__file__).parent / f"{module}.py").read_bytes())
    return digest.digest()


def _file_key(candidate: Candidate, kind: str, arrays: Sequence[Array], version: int) -> str:
    """Return a digest of all that decides the corrected weight: see the module."""
    reader = candidate.readers[0]
    settings = (kind, version, reader.layout, fitting.ROUNDS, reader.shape)
    digest = hashlib.blake2b(_program_digest() + repr(settings).encode(), digest_size=20)
    for array in (np.asarray(candidate.var.val), reader.channels, *arrays):
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data.cast("B"))
    return digest.hexdigest()


def _correct_remotely(*arguments: Any) -> dict[str, Any]:
    """Call `correct` in another process, and pack the result: types of less than a byte do not pickle."""
    return _pack(correct(*arguments))


def _pack(corrected: CorrectedWeight) -> dict[str, Any]:
    """Return a weight as plain arrays and one entry of JSON, as a file or another process holds it."""
    arrays: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    op = _form_to_json(corrected.form, arrays, kinds)
    about = {"op": op, "kinds": kinds, "error": corrected.error, "rounded": corrected.nearest_error}
    return {**arrays, ABOUT: np.array(json.dumps(about))}


def _unpack(content: Mapping[str, Any], candidate: Candidate, kind: str) -> CorrectedWeight:
    """Return the weight that `_pack` was given."""
    about: Mapping[str, Any] = json.loads(str(content[ABOUT]))
    arrays = {name: _with_type(content[name], each) for name, each in about["kinds"].items()}
    form = _form_from_json(about["op"], arrays)
    array = decode(form).reshape(candidate.readers[0].shape)
    return CorrectedWeight(
        candidate,
        kind,
        form,
        array,
        error=about["error"],
        bytes=form_bytes(form),
        nearest_error=about["rounded"],
    )


def _write(path: Path, corrected: CorrectedWeight) -> None:
    """Write a finished weight, and wait until it is on the disk."""
    with path.open("wb") as file:
        np.savez(file, **_pack(corrected))
        file.flush()
        os.fsync(file.fileno())


def _form_to_json(form: Form, arrays: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    """Return a form as plain data.

    Args:
        form: whose inputs may be results of other forms.
        arrays: gets its arrays, as "array0", ...
        kinds: gets the name of the type of each array, such as "uint4".
    """
    inputs: dict[str, Any] = {}
    inner: dict[Form, dict[str, Any]] = {}
    for name, value in form.inputs.items():
        if isinstance(value, Result):
            if value.form not in inner:
                inner[value.form] = _form_to_json(value.form, arrays, kinds)
            inputs[name] = {"of": inner[value.form], "number": value.number}
            continue
        array, key = np.asarray(value), f"array{len(arrays)}"
        kinds[key] = types.builtin_to_string(types.numpy_type_to_builtin_type(array.dtype))
        arrays[key], inputs[name] = array.view(array.dtype.str), key
    return {"type": form.op_type, "inputs": inputs}


def _form_from_json(op: Mapping[str, Any], arrays: Mapping[str, Array]) -> Form:
    """Return the form of `_form_to_json`; an op with two results that it reads becomes one form again."""
    inner: dict[str, Form] = {}
    inputs: dict[str, Any] = {}
    for name, value in op["inputs"].items():
        if isinstance(value, str):
            inputs[name] = arrays[value]
        else:
            key = json.dumps(value["of"])
            inner.setdefault(key, _form_from_json(value["of"], arrays))
            inputs[name] = Result(inner[key], value["number"])
    return Form(op["type"], inputs)


def _read(path: Path, candidate: Candidate, kind: str) -> CorrectedWeight | None:
    """Read a finished weight; None where there is no file, or a broken one."""
    try:
        with path.open("rb") as stored, np.load(stored, allow_pickle=False) as file:
            return _unpack({name: file[name] for name in file.files}, candidate, kind)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _with_type(array: Array, kind: str) -> Array:
    """Return an array with its type, such as uint4, which is numpy metadata that no file keeps."""
    dtype = types.nptype_from_builtin(types.string_to_builtin(kind))
    return array if array.dtype == dtype and np.dtype(dtype).metadata is None else array.view(dtype)

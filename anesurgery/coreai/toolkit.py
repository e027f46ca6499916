"""The one door to Apple's package `coreai-core`, of which this library needs parts that Apple does not version.

Nothing else here imports `coreai`. Without the package this file can be imported, and `require` says how to
get it. Public and versioned are `coreai.authoring` and `coreai.runtime`; `UNVERSIONED` lists what is not, and a
test looks for each, so that an update of the package is read in one place.

`coreai.authoring` is imported first: the other way round the package imports itself in a circle.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.errors import LoadError
from anesurgery.files.sub_byte import pack
from anesurgery.mil import Array

VERSION = "1.0.0b3"
"""The version of `coreai-core` that this library was written for."""

ABSENT = ""
"""Why the package cannot be imported; empty where it can."""
try:
    from coreai.authoring import AIModelAsset, AIProgram, Context, Module, TensorSpec
    from coreai.runtime import AIModelAssetMetadata, NDArray

    from coreai._compiler import ir  # isort: skip
    from coreai._compiler._mlir_libs._coreaiIR._bindings.compiler import (  # isort: skip
        serialize_module_to_bytecode,
    )
    from coreai._compiler.dialects import coreai as ops  # isort: skip
except ImportError as error:  # pragma: no cover - Python 3.10, or without the extra
    ABSENT = str(error)
    AIModelAsset = AIProgram = AIModelAssetMetadata = Context = Module = NDArray = TensorSpec = None
    ir = ops = serialize_module_to_bytecode = None

UNVERSIONED = {
    "ops": """
        ConstantOp GraphOp condition if_ while_ yield_ HandleType invoke
        add sub mul divide floor_divide modulo pow_ maximum minimum
    """,
    "ir": """
        ArrayAttr Attribute DenseResourceElementsAttr DictAttr F16Type F32Type InsertionPoint IntegerType
        Location RankedTensorType StringAttr
    """,
}
"""Where a name that Apple does not version lives, and the names that are used here."""

FLOATS: dict[str, type[np.generic]] = {"fp16": np.float16, "fp32": np.float32}
"""dtype of MIL -> dtype of numpy; `fp64` has no values in a program of Core ML."""
RESOURCE = 64
"""Elements from which on a constant is a resource of the file. A choice: shapes, axes and paddings, which the
compiler folds, have fewer."""
MUTATED = "MutableBuffers.buffer_mutation"
"""The attribute that makes an argument a state; its value names the result that becomes the new state."""
BYTECODE_VERSION = 6
"""The version of MLIR's bytecode that `AIProgram.save_asset` of coreai-core 1.0.0b3 writes."""
PIECE = 1 << 24
"""Bytes of a file that are hashed at once."""


def require() -> None:
    """Refuse to go on without Apple's package.

    Raises:
        LoadError: it is not installed; says how to get it.
    """
    if ABSENT:
        raise LoadError(
            f"Core AI needs Apple's package coreai-core ({ABSENT}): "
            "pip install 'anesurgery[coreai]', with Python 3.11 or later"
        )


def element(dtype: str) -> Any:
    """The element type of a dtype of MIL, such as `fp16`, `int32`, `bool` or `uint4`; a context must be open.

    Raises:
        KeyError: Core AI has none of this name (`string`).
    """
    if dtype in ("fp16", "fp32", "fp64"):
        return ir.F16Type.get() if dtype == "fp16" else ir.F32Type.get()
    if dtype == "bool":
        return ir.IntegerType.get_signless(1)
    signed, digits = dtype.startswith("int"), dtype.removeprefix("u").removeprefix("int")
    if not digits.isdigit():
        raise KeyError(dtype)
    return ir.IntegerType.get_signed(int(digits)) if signed else ir.IntegerType.get_unsigned(int(digits))


def tensor(shape: Sequence[int], dtype: Any) -> Any:
    """The type of a tensor; a length of -1 is dynamic, `dtype` is one of MIL or an element type."""
    kind = element(dtype) if isinstance(dtype, str) else dtype
    dynamic = ir.ShapedType.get_dynamic_size()
    return ir.RankedTensorType.get([length if length >= 0 else dynamic for length in shape], kind)


def stored(values: Array, dtype: str) -> Any:
    """What a constant op holds. Large values are not copied: the array must stay as it is until it is saved.

    Apple's own `constant` does not pack elements of few bits, and reads wrong values or crashes, so that these
    are given as packed bytes, the lowest bits first.
    """
    bits = int("".join(filter(str.isdigit, dtype)) or 8)
    if bits >= 8 and (values.size <= RESOURCE or dtype == "bool"):
        return ops.create_constant_attr(np.array(values), element(dtype))
    return stored_bytes(pack(values, bits) if bits < 8 else values, values.shape, dtype)


def stored_bytes(numbers: Array, shape: Sequence[int], dtype: str) -> Any:
    """As `stored`, of numbers that are packed already."""
    whole = np.ascontiguousarray(numbers)
    return ir.DenseResourceElementsAttr.get_from_buffer(whole, "weight", tensor(shape, dtype))


def constant(attribute: Any) -> Any:
    """A constant op of what `stored` made."""
    return ops.ConstantOp(value=attribute).result


@contextmanager
def module() -> Iterator[Any]:
    """A new, empty program: graphs that are made inside belong to it; afterwards Apple's rewrites have run."""
    with Context():
        made = Module.create()
        with made:
            yield made


def graph(
    name: str,
    inputs: Mapping[str, Any],
    body: Callable[[Sequence[Any]], Mapping[str, Any]],
    states: Mapping[str, str] | None = None,
) -> None:
    """Write a function into the open program.

    Args:
        name: its name.
        inputs: name -> type, in order.
        body: builds the ops on the values of the inputs, and returns name -> value of the results.
        states: input -> the result that becomes its new state.
    """
    made = ops.GraphOp(name, list(inputs.values()), [], input_names=list(inputs), result_names=[])
    with made.block:
        made.set_outputs_spec_from_dict(dict(body(list(made.arguments))))
    if states:
        named = zip(inputs, made.arg_attrs, strict=True)
        made.arg_attrs = ir.ArrayAttr.get([_with_state(given, states.get(key)) for key, given in named])


def _with_state(given: Iterable[Any], result: str | None) -> Any:
    kept = {item.name: item.attr for item in given}
    return ir.DictAttr.get(kept | ({MUTATED: ir.StringAttr.get(result)} if result else {}))


def save(program: Any, path: Path, metadata: Any = None) -> None:
    """Write a finished program to a folder that does not exist.

    `AIProgram.save_asset` reads the whole file back into memory to hash it; this hashes it in pieces.
    """
    asset = AIModelAsset._create(path, metadata)._model_asset
    code, written = asset._program_bytecode_path, hashlib.sha256()
    program.verify()
    version = type(asset)._dialect_version_for_os("v27")
    serialize_module_to_bytecode(
        module=program._mlir_module,
        package_path=code,
        dialect_version=version,
        bytecode_version=BYTECODE_VERSION,
    )
    with open(code, "rb") as file:
        while piece := file.read(PIECE):
            written.update(piece)
    Path(asset._program_hash_path).write_bytes(written.digest())
    asset.update_metadata(updates=_stamp)


def _stamp(metadata: Any) -> None:
    metadata.creation_date = time.time()
    metadata._producer = f"coreai-core {VERSION}"

"""The only module that imports Apple's package `coreai-core`.

It builds programs for `translating` (types, constants, graphs, composites, `save`). In the child process it
runs a model or reads it as plain data (`run_asset`, `walk_asset`). Without the package this module can still be
imported, and `require` says how to get it. Apple versions only `coreai.authoring` and `coreai.runtime`; a test
looks for the names of `ir` and `ops` that this room uses.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anesurgery.coreai.names import bits_of
from anesurgery.errors import LoadError
from anesurgery.files.sub_byte import pack

if TYPE_CHECKING:
    from anesurgery.mil import Array  # coremltools, which the child process with the runtime never needs

VERSION = "1.0.0b3"
"""The version of `coreai-core` that this library was written for."""


BINDINGS = "coreai._compiler._mlir_libs._coreaiIR._bindings"
MODULES = (
    "coreai.authoring",  # first: in the other order the package has a circular import
    "coreai.runtime",
    "coreai._compiler.ir",
    "coreai._compiler.dialects.coreai",
    f"{BINDINGS}.compiler",
    f"{BINDINGS}.mlir.dialects.coreai",
    "ml_dtypes",
)
ABSENT = ""
"""Why Apple's package cannot be imported; empty where it can."""
authoring: Any = None
runtime = ir = ops = compiler = dialect = ml_dtypes = authoring
try:
    authoring, runtime, ir, ops, compiler, dialect, ml_dtypes = map(import_module, MODULES)
except ImportError as error:  # Python 3.10, or without the extra
    ABSENT = str(error)

RESOURCE = 64
"""Above this many elements a constant becomes a resource of the file. A choice: shapes, axes and paddings,
which the compiler folds, are smaller."""
MUTATED = "MutableBuffers.buffer_mutation"
"""The attribute that makes an argument a state; its value names the result that becomes the new state."""
BYTECODE_VERSION = 6
"""The version of MLIR's bytecode that `AIProgram.save_asset` of coreai-core 1.0.0b3 writes."""
PIECE = 1 << 24
"""Bytes of a file that are hashed at once."""


def require() -> None:
    """Check that Apple's package is installed; a LoadError says how to get it."""
    if ABSENT:
        raise LoadError(
            f"Core AI needs Apple's package coreai-core ({ABSENT}): "
            "pip install 'anesurgery[coreai]', with Python 3.11 or later"
        )


def element(dtype: str) -> Any:
    """Return the element type of a MIL dtype such as `fp16` or `uint4`, but not `string`, in a context."""
    if dtype == "bool":
        return ir.IntegerType.get_signless(1)
    if dtype.startswith(("int", "uint")):
        integers = ir.IntegerType
        return (integers.get_signed if dtype[0] == "i" else integers.get_unsigned)(bits_of(dtype))
    return {"fp16": ir.F16Type, "fp32": ir.F32Type, "fp64": ir.F32Type}[dtype].get()


def tensor(shape: Sequence[int], dtype: str) -> Any:
    """Return the type of a tensor of a MIL dtype; a length of -1 is dynamic."""
    dynamic = ir.ShapedType.get_dynamic_size()
    return ir.RankedTensorType.get([length if length >= 0 else dynamic for length in shape], element(dtype))


def image(height: int, width: int) -> Any:
    """Return the type of an image of bytes in the order blue, green, red, alpha, as cameras give it."""
    return ir.Type.parse(f"!coreai.image<<k32BGRA> x {height} : i64 x {width} : i64>")


def constant_attribute(values: Array, dtype: str) -> Any:
    """Return the attribute of a constant op. Large arrays are not copied: keep them until the program is saved.

    Apple's own `constant` does not pack elements of less than 8 bits, and then reads wrong values or crashes,
    so these are given as packed bytes, the lowest bits first.
    """
    bits = bits_of(dtype)
    if bits >= 8 and (values.size <= RESOURCE or dtype == "bool"):
        return ops.create_constant_attr(np.array(values), element(dtype))
    return packed_attribute(pack(values, bits) if bits < 8 else values, values.shape, dtype)


def packed_attribute(numbers: Array, shape: Sequence[int], dtype: str) -> Any:
    """Return the attribute of a constant whose bytes are packed already; see `constant_attribute`."""
    whole = np.ascontiguousarray(numbers)
    return ir.DenseResourceElementsAttr.get_from_buffer(whole, "weight", tensor(shape, dtype))


def constant(attribute: Any) -> Any:
    """Write a constant op of such an attribute."""
    return ops.ConstantOp(value=attribute).result


@contextmanager
def module() -> Iterator[Any]:
    """Open a new, empty program; at the end Apple's rewrites run.

    The rewrites fold ops of constants. The hook keeps them from folding large ones: that would copy weights,
    and store a table twice that is read in two layouts.
    """
    COMPILER_MESSAGES.clear()
    with authoring.Context() as context:
        context._mlir_context.attach_diagnostic_handler(_keep_message)
        dialect.register_should_const_folding_hook(callable=_may_be_folded, context=context._mlir_context)
        made = authoring.Module.create()
        with made:
            OPEN_PROGRAMS.append((made, itertools.count()))
            try:
                yield made
            finally:
                OPEN_PROGRAMS.pop()


OPEN_PROGRAMS: list[tuple[Any, Iterator[int]]] = []
"""The program that is being written, with a counter that numbers its private graphs."""
COMPILER_MESSAGES: list[str] = []
"""Messages of Apple's compiler about the program that is being written, which it would print."""
MAX_MESSAGE = 300
"""The most characters of a message in an error: three lines."""


def _keep_message(diagnostic: Any) -> bool:
    COMPILER_MESSAGES.append(diagnostic.message)
    return True


def refusal(error: Exception) -> str:
    """Return why Apple's package refuses what was written, on one line."""
    return " ".join(" ".join([*COMPILER_MESSAGES[-1:], str(error)]).split())[:MAX_MESSAGE]


def _may_be_folded(op: Any) -> bool:
    """Return whether an op has small results only. Never a transpose, which marks a linear layer."""
    return op.name != "coreai.transpose" and all(
        math.prod(getattr(result.type, "shape", ())) <= RESOURCE for result in op.results
    )


def graph(
    name: str,
    inputs: Mapping[str, Any],
    body: Callable[[Sequence[Any]], Mapping[str, Any]],
    states: Mapping[str, str] | None = None,
) -> None:
    """Write a function into the open program.

    `inputs` maps names to types, `body` builds the ops and returns name -> result, and `states` maps an input
    to the result that becomes its new state.
    """
    made = ops.GraphOp(name, list(inputs.values()), [], input_names=list(inputs), result_names=[])
    with made.block:
        made.set_outputs_spec_from_dict(dict(body(list(made.arguments))))
    if states:
        attributes = []
        for key, given in zip(inputs, made.arg_attrs, strict=True):
            state = {MUTATED: ir.StringAttr.get(states[key])} if key in states else {}
            attributes.append(ir.DictAttr.get({item.name: item.attr for item in given} | state))
        made.arg_attrs = ir.ArrayAttr.get(attributes)


def composite(
    name: str,
    operands: Mapping[str, Any],
    attributes: Mapping[str, Any],
    body: Callable[[Sequence[Any]], Sequence[Any]],
) -> list[Any]:
    """Write a private graph that says which op it stands for, and return the results of its call.

    Attributes are numbers, texts, booleans, or lists of these; `body` builds the ops and returns their results.
    """
    program, numbers = OPEN_PROGRAMS[-1]
    with ir.InsertionPoint.at_block_begin(program._mlir_module.body):
        made = ops.GraphOp(
            f"{name}_{next(numbers)}", [v.type for v in operands.values()], [], private=True, no_inline=True
        )
    with made.block:
        results = {f"output_{i}": value for i, value in enumerate(body(list(made.arguments)))}
        made.set_outputs_spec_from_dict(results)
    names = {"input_names": list(operands), "output_names": list(results)}
    declared = _attribute({**names, "op_attrs": dict(attributes)})
    made.attributes["composite_decl"] = ir.Attribute.parse(
        f'#coreai.composite_declaration<"{name}" = {declared}>'
    )
    return list(made(*operands.values()))


def _attribute(value: Any) -> Any:
    """Return plain data as an attribute of a composite."""
    if isinstance(value, dict):
        return ir.DictAttr.get({key: _attribute(v) for key, v in value.items()})
    if isinstance(value, (list, tuple)):
        return ir.ArrayAttr.get([_attribute(v) for v in value])
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signed(64), value)
    return ir.FloatAttr.get(ir.F32Type.get(), value) if isinstance(value, float) else ir.StringAttr.get(value)


def save(program: Any, path: Path, metadata: Any = None) -> None:
    """Write a finished program to a folder that does not exist yet.

    Apple's `AIProgram.save_asset` reads the whole file back into memory to hash it; this hashes it in pieces.
    """
    asset = authoring.AIModelAsset._create(path, metadata)._model_asset
    code, written = asset._program_bytecode_path, hashlib.sha256()
    program.verify()
    version = type(asset)._dialect_version_for_os("v27")
    how = {"dialect_version": version, "bytecode_version": BYTECODE_VERSION}
    compiler.serialize_module_to_bytecode(module=program._mlir_module, package_path=code, **how)
    with open(code, "rb") as file:
        while piece := file.read(PIECE):
            written.update(piece)
    Path(asset._program_hash_path).write_bytes(written.digest())
    asset.update_metadata(updates=_stamp)


def _stamp(metadata: Any) -> None:
    metadata.creation_date = time.time()
    metadata._producer = f"coreai-core {VERSION}"


# -- running a model; only the child process does it ------------------------------------------------------


def run_asset(path: Path, arrays: dict[str, Array], function: str | None) -> tuple[None, dict[str, Array]]:
    """Run a model once. Arrays "input:NAME" and "state:NAME" go in, "output:NAME" and "state:NAME" come out."""
    return None, asyncio.run(_run(path, arrays, function))


async def _run(path: Path, arrays: dict[str, Array], function: str | None) -> dict[str, Array]:
    async with authoring.AIModelAsset.load(path).executable() as model:
        names = list(model.function_names)
        chosen = function or ("main" if "main" in names else names[0])
        if chosen not in names:
            raise ValueError(f"it has no function {chosen!r}, but {', '.join(names)}")
        call = model.load_function(chosen)
        stated = call.desc
        inputs = {n: stated.input_descriptor(n) for n in stated.input_names}
        states = {n: stated.state_descriptor(n) for n in stated.state_names}
        given = _as_ndarrays("input", inputs, arrays)
        zeros = {f"state:{n}": np.zeros([max(d, 1) for d in s.shape], np.float32) for n, s in states.items()}
        held = _as_ndarrays("state", states, zeros | arrays)
        outputs = await call(given, held)
        found = {f"output:{n}": _storable(v.numpy()) for n, v in outputs.items()}
        return found | {f"state:{n}": _storable(v.numpy()) for n, v in held.items()}


def of_kind(kind: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays named "KIND:NAME", by NAME."""
    return {n.removeprefix(f"{kind}:"): v for n, v in arrays.items() if n.startswith(f"{kind}:")}


def _as_ndarrays(kind: str, wanted: Mapping[str, Any], arrays: dict[str, Array]) -> dict[str, Any]:
    """Return the arrays of one kind, checked, in the dtypes that a function states."""
    values = of_kind(kind, arrays)
    if missing := wanted.keys() - values.keys():
        raise ValueError(f"missing {kind} {sorted(missing)[0]!r}")
    if unknown := values.keys() - wanted.keys():
        raise ValueError(f"unknown {kind} {sorted(unknown)[0]!r}; it takes {', '.join(wanted) or 'none'}")
    for name, array in values.items():
        if not hasattr(wanted[name], "shape"):
            words = "the runtime takes on Apple's systems alone; give the ML Program: it is run with tensors"
            raise ValueError(f"{kind} {name!r} is an image, which {words}")
        shape = wanted[name].shape
        fits = len(shape) == array.ndim and all(
            d is None or d in (-1, n) for d, n in zip(shape, array.shape, strict=True)
        )
        if not fits:
            raise ValueError(f"{kind} {name!r} has shape {array.shape}, expected {tuple(shape)}")
    dtypes = {n: getattr(ml_dtypes, wanted[n].dtype, wanted[n].dtype) for n in values}
    return {n: runtime.NDArray(np.array(v, dtypes[n], order="C")) for n, v in values.items()}


def _storable(array: Array) -> Array:
    """Return an array that an .npz file can hold: short floats as float32, small integers as int8."""
    if array.dtype.kind == "V" or array.dtype.name in vars(ml_dtypes):
        return array.astype(np.float32 if "float" in array.dtype.name else np.int8)
    return np.array(array)


# -- a program as plain data, for `reading` ---------------------------------------------------------------

HINT = re.compile(r'identifiers = \["([^"]*)"\]')
"""The part of a location that names the PyTorch op; the last match is the nearest."""
CALLEE = re.compile(r"@\"?([^\">\s]+)")
RESOURCE_KEY = re.compile(r'dense_resource<"?(.*?)"?> : ')
HANDLE = re.compile(r"handle<(tensor<.*>)>")


def walk_asset(path: Path, arrays: dict[str, Array]) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """Return the graphs of a program as plain data, and number -> small constant."""
    with authoring.Context()._mlir_context:
        module = authoring.AIModelAsset.load(path).program._module._mlir_module
        constants: dict[str, Array] = {}
        return [_GraphWalk(constants).graph(op) for op in _graphs(module.operation)], constants


def _graphs(op: Any) -> Iterator[Any]:
    """Yield every graph, also those in namespaces."""
    if op.name == "coreai.graph":
        yield op
        return
    for block in _blocks(op):
        for inner in block.operations:
            yield from _graphs(inner.operation)


def _blocks(op: Any) -> list[Any]:
    return [block for region in op.regions for block in region.blocks]


class _GraphWalk:
    """Turns one graph into plain data: values are numbered in the order in which they are made."""

    def __init__(self, constants: dict[str, Array]) -> None:
        self.numbers: dict[Any, int] = {}
        self.constants = constants

    def graph(self, op: Any) -> dict[str, Any]:
        attributes = {a.name: a.attr for a in op.attributes}
        (block,) = _blocks(op)
        return {
            "name": attributes["sym_name"].value,
            "private": "priv" in attributes,
            "composite": self.composite(attributes.get("composite_decl")),
            "inputs": [self.attribute(a) for a in attributes.get("arg_attrs", ())],
            "outputs": [self.attribute(a) for a in attributes.get("res_attrs", ())],
            **self.block(block),
        }

    def block(self, block: Any) -> dict[str, Any]:
        arguments = [self.value(v) for v in block.arguments]
        return {"arguments": arguments, "ops": [self.op(o.operation) for o in block.operations]}

    def op(self, op: Any) -> dict[str, Any]:
        hints = HINT.findall(str(op.location))
        return {
            "kind": op.name.removeprefix("coreai.").removeprefix("decomposable."),
            "hint": hints[-1] if hints else "",
            "operands": [self.numbers[v] for v in op.operands],
            "attributes": {a.name: self.attribute(a.attr) for a in op.attributes},
            "blocks": [self.block(b) for b in _blocks(op)],
            "results": [self.value(v) for v in op.results],
        }

    def value(self, value: Any) -> dict[str, Any]:
        number = self.numbers[value] = len(self.numbers)
        return {"number": number, **type_data(value.type)}

    def composite(self, declared: Any) -> dict[str, Any] | None:
        if declared is None:
            return None
        words = str(declared)
        attributes = ir.DictAttr.parse(words[words.index("{") : -1])
        return {"name": words.split('"')[1], **self.attribute(attributes)}

    def attribute(self, attribute: Any) -> Any:
        """Return an attribute as plain data; constants as {"constant": number} or {"resource": key}."""
        if isinstance(attribute, ir.DenseElementsAttr):  # which the file holds in place
            key = str(len(self.constants))
            held = attribute.get_splat_value() if attribute.is_splat else None
            self.constants[key] = _storable(np.array(attribute if held is None else held.value))
            return {"constant": key, **type_data(attribute.type)}
        if isinstance(attribute, (ir.IntegerAttr, ir.FloatAttr, ir.BoolAttr, ir.StringAttr)):
            return attribute.value
        if isinstance(attribute, ir.ArrayAttr):
            return [self.attribute(a) for a in attribute]
        if isinstance(attribute, ir.DictAttr):
            return {a.name: self.attribute(a.attr) for a in attribute}
        words = str(attribute)
        if found := RESOURCE_KEY.match(words):
            return {"resource": found[1], **type_data(ir.DenseResourceElementsAttr(attribute).type)}
        if words.startswith("#param.constant<@"):
            return CALLEE.search(words)[1]  # type: ignore[index]
        found = re.fullmatch(r"#coreai\.\w+<(\w+)>", words)
        return found[1] if found else words


def type_data(kind: Any) -> dict[str, Any]:
    """Return a type as plain data: element type, and shape with None for dynamic sizes; or its text."""
    words = str(kind)
    if (held := HANDLE.search(words)) is not None:
        return {**type_data(ir.Type.parse(held[1])), "state": True}
    try:
        ranked = ir.RankedTensorType(kind)
    except ValueError:
        return {"type": words}
    shape = [None if ranked.is_dynamic_dim(i) else ranked.get_dim_size(i) for i in range(ranked.rank)]
    return {"dtype": str(ranked.element_type), "shape": shape}

"""Write a Core ML model as a Core AI model: `anesurgery.to_coreai`.

The model becomes an ML Program, its ops are checked (`check_ops`), and the folder is saved with its metadata.
`CoreAI` is the result, with a sentence for everything that the new format cannot hold.

The second half writes each function as a graph of a Core AI program (`FunctionWriter`). Each op is written by
its row of `table.TABLE`: a function that takes the inputs of the op and returns tensors (`values.Value`). An op
of `table.COMPOSED` is written as a private graph under its own name, with its formula inside, so that a reader
of the file finds the op again.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery import registry
from anesurgery.coreai import toolkit
from anesurgery.coreai.asset import SUFFIX
from anesurgery.coreai.lowerings import COMPOSED, MERGED_INTO, MISSING, TABLE, Mode, extras_of
from anesurgery.coreai.names import CLASSES, FROM_IMAGE, LABEL, OWN, PREFIX, TO_IMAGE, numpy_of
from anesurgery.coreai.toolkit import require
from anesurgery.coreai.values import Constant, Dense, Value, array, call, concat
from anesurgery.display import byte_words
from anesurgery.doors import door
from anesurgery.errors import IsPipeline, LoadError, NotExpressible, SurgeryError
from anesurgery.files.interface import Port, Signature
from anesurgery.files.package import Loaded
from anesurgery.files.writing import check_target, write_atomically
from anesurgery.loading import clone, load_as_is, load_whole
from anesurgery.mil import (
    Array,
    Block,
    Function,
    Operation,
    Program,
    Var,
    consumers,
    dtype_name,
    exclusive,
    is_constexpr,
    is_symbolic,
    static_shape,
    types,
    walk_ops,
)
from anesurgery.network_editing.upgrade import in_precision
from anesurgery.neuralnetwork.importing import LoadedNetwork
from anesurgery.ops import LISTS, names
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session


@dataclass(frozen=True)
class CoreAI:
    """The result of `to_coreai`: a Core AI model on disk."""

    path: Path
    """The `.aimodel` folder."""
    functions: dict[str, Signature]
    """Name -> inputs (states included) and outputs, in order."""
    stored: int
    """Bytes of the folder."""
    lost: tuple[str, ...] = ()
    """Sentences on parts of the Core ML model that Core AI cannot hold."""

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Copy the folder.

        Raises:
            LoadError: the path does not end in .aimodel, exists, or cannot be written to.
        """
        target = Path(path).expanduser().absolute()
        check_target(self.path, target, overwrite, SUFFIX)
        return write_atomically(target, lambda place: shutil.copytree(self.path, place), overwrite)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        ports = {n: {"inputs": s.inputs, "outputs": s.outputs} for n, s in self.functions.items()}
        functions = {n: {k: list(map(str, v)) for k, v in kinds.items()} for n, kinds in ports.items()}
        return {"path": str(self.path), "bytes": self.stored, "functions": functions, "lost": list(self.lost)}

    def __str__(self) -> str:
        lines = [f"{self.path} ({byte_words(self.stored)})"]
        for name, signature in self.functions.items():
            given, made = (", ".join(map(str, ports)) for ports in (signature.inputs, signature.outputs))
            lines.append(f"  {name}: {given} -> {made}")
        return "\n".join([*lines, *(f"  not kept: {words}" for words in self.lost)])


@door()
@exclusive()
def to_coreai(
    model: Any, path: str | os.PathLike[str], *, mode: str = "ship", overwrite: bool = False
) -> CoreAI:
    """Write a model in Apple's format for iOS and macOS 27, Core AI.

    Names, order, element types, states, functions and dynamic lengths are kept; weights stay as they are
    stored, each once. A neural network becomes a program as by `upgrade`.

    Args:
        model: path, MLModel or MIL program. The models of a pipeline become one.
        path: where to write it; ends in .aimodel.
        mode: "ship", for Apple's devices, or "check", for Apple's runtime on Linux. That runtime sums fp16
            products in fp16, so "check" computes them in fp32.
        overwrite: may what is there be replaced?

    Returns:
        The path, and the parts of the model that Core AI cannot hold.

    Raises:
        LoadError: Apple's package is absent, the model cannot be read, or the place not written to.
        NotExpressible: Core AI lacks an op of the model; nothing was written.
        SurgeryError: an argument is not what the call takes.
        UnknownName: there is no such mode.
    """
    require()
    how = Mode(mode)
    try:
        loaded = _as_program(load_as_is(model))
    except IsPipeline:
        loaded = load_whole(model)
    target = Path(path).expanduser().absolute()
    check_target(loaded.source, target, overwrite, SUFFIX)
    if loaded.absent is not None:
        raise LoadError(loaded.absent)
    check_ops(loaded.program)
    spaces = images_of(loaded.description)
    program, signatures = _write_functions(loaded.program, how, spaces)
    loaded.check_source()
    write_atomically(target, lambda place: toolkit.save(program, place, _metadata(loaded)), overwrite)
    stored = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return CoreAI(target, signatures, stored, tuple(_lost_parts(loaded)))


def _write_functions(
    program: Program, mode: Mode, spaces: Mapping[str, str]
) -> tuple[Any, dict[str, Signature]]:
    """Write the functions of a program; return the Core AI module, and name -> signature."""
    constants, functions = ConstantPool(), program.functions
    try:
        with toolkit.module() as module:
            signatures = {n: FunctionWriter(f, mode, constants, spaces).write(n) for n, f in functions.items()}
            return module, signatures
    except RuntimeError as error:  # of Apple's rewrites, which follow the last op
        raise NotExpressible(f"Apple's package refuses the program: {toolkit.refusal(error)}") from error


def _as_program(loaded: Loaded) -> Loaded:
    """Return a model as an ML Program in ops that the lowerings take.

    Core AI has no lists of tensors with dynamic shapes. Most loops that fill one have a constant number of
    rounds, so such loops are unrolled.
    """
    if isinstance(loaded, LoadedNetwork):
        loaded = in_precision(loaded.imported, None)
    if any(op.op_type in LISTS for op in walk_ops(loaded.program)):
        loaded = clone(loaded)
        run_pass(registry.make_pass("unroll_loop"), loaded.program, Session())
    return loaded


def _metadata(loaded: Loaded) -> Any:
    """Return the description of the model as metadata of Core AI; parts without a field become custom keys."""
    metadata = toolkit.runtime.AIModelAssetMetadata()
    if (description := loaded.description) is None:
        return metadata
    given = description.metadata
    metadata.author, metadata.license = given.author, given.license
    metadata.model_description = given.shortDescription
    custom = dict(given.userDefined) | ({"version": given.versionString} if given.versionString else {})
    features = [*description.input, *description.output, *description.state]
    custom |= {f"feature.{f.name}": f.shortDescription for f in features if f.shortDescription}
    custom |= {f"{PREFIX}{name}": space for name, space in images_of(description).items()}
    for key, value in (custom | _classes(loaded)).items():
        metadata.set_custom(key, value)
    return metadata


def _classes(loaded: Loaded) -> dict[str, Any]:
    """Return `CLASSES` and the name of the probabilities -> the labels, in order; and `LABEL` -> the output."""
    kept = dict[str, Any]()
    for op in (op for op in walk_ops(loaded.program) if op.op_type == "classify"):
        label, probabilities = (var.name for var in op.outputs)
        held = getattr(op.classes.val, "ls", op.classes.val)
        kept[CLASSES + probabilities] = [v.item() if hasattr(v, "item") else v for v in held]
        kept[LABEL + probabilities] = label
    return kept


def _lost_parts(loaded: Loaded) -> Iterator[str]:
    """Yield a sentence for each part of a Core ML description that Core AI has no word for."""
    for name in (key for key in _classes(loaded) if key.startswith(CLASSES)):
        yield f"the label: it is the place of the largest number, whose name is in the metadata ({name})"
    if (description := loaded.description) is None:
        return
    for feature in (*description.input, *description.output):
        kind = feature.type.WhichOneof("Type")
        flexible = kind == "imageType" and feature.type.imageType.WhichOneof("SizeFlexibility")
        if (space := color_space(feature)) and (space not in COLORS or flexible):
            words = "of several sizes" if flexible else f"in {space}"
            yield f"{feature.name} is an image {words}: give its pixels as a tensor"
        if kind == "multiArrayType" and (form := feature.type.multiArrayType.WhichOneof("ShapeFlexibility")):
            yield f"the {form} of {feature.name}: Core AI takes any length on its dynamic axes"
        if feature.type.isOptional:
            yield f"{feature.name} is optional: give it at each call"


# -- images at the interface ----------------------------------------------------------------------------
#
# Core AI has images of bytes in the order blue, green, red, alpha; MIL has arrays [1, 3, height, width].

COLORS = ("RGB", "BGR")
"""Colour spaces of Core ML for which Core AI has a format; it has none for gray."""


def color_space(feature: Any) -> str:
    """Return the colour space of an image feature of Core ML; "" for other features."""
    if feature.type.WhichOneof("Type") != "imageType":
        return ""
    return str(feature.type.imageType.ColorSpace.Name(feature.type.imageType.colorSpace))


def images_of(description: Any) -> dict[str, str]:
    """Return name -> colour space, of all inputs and outputs that are images in a Core ML description."""
    if description is None:
        return {}
    parts = [description, *description.functions]
    features = [feature for part in parts for feature in (*part.input, *part.output)]
    return {feature.name: space for feature in features if (space := color_space(feature))}


def convertible_images(spaces: Mapping[str, str], values: Mapping[str, Var]) -> dict[str, str]:
    """Return the images that stay images in Core AI: those of three channels and a fixed size."""
    shapes = {name: static_shape(var) for name, var in values.items() if spaces.get(name) in COLORS}
    return {n: spaces[n] for n, shape in shapes.items() if shape is not None and (shape[0], shape[1]) == (1, 3)}


def from_image(node: Any, colors: str, dtype: str) -> Value:
    """Return the pixels of an image as an array [1, 3, height, width]."""

    def body(nodes: Any) -> list[Any]:
        pixels = Value(nodes[0]).cast("fp32").along(2, 0, 3)
        pixels = pixels if colors == "BGR" else pixels.flip(2)
        return [pixels.permute([2, 0, 1]).expand([0]).cast(dtype).node]

    (made,) = toolkit.composite(FROM_IMAGE, {"x": toolkit.ops.image_to_tensor(node)}, {"colors": colors}, body)
    return Value(made)


def to_image(x: Value, colors: str) -> Any:
    """Return an image of an array [1, 3, height, width], rounded to bytes: a choice, as Core ML states none."""
    height, width = x.shape[2:]

    def body(nodes: Any) -> list[Any]:
        levels = call("round", Value(nodes[0]).cast("fp32")).maximum(0.0).minimum(255.0)
        pixels = levels.squeeze([0]).permute([1, 2, 0])
        pixels = pixels if colors == "BGR" else pixels.flip(2)
        opaque = array(np.full((height, width, 1), 255.0), "fp32")
        return [concat([pixels, opaque], 2).cast("uint8").node]

    (made,) = toolkit.composite(TO_IMAGE, {"x": x.node}, {"colors": colors}, body)
    return toolkit.ops.tensor_to_image(toolkit.image(height, width), made)


# -- the functions, op by op ---------------------------------------------------------------------------

MOST_FOLDED = 1024
"""The most elements of a computed constant that is written as numbers. Larger ones are computed in the file."""
UNUSED = names("validate_indices output_indices_dtype sort")
"""Inputs of MIL ops that no lowering takes: they check indices, or say the dtype or order of a result."""
NEW_STATE = "_new"
"""Suffix of the graph's result that becomes the new value of a state."""


def check_ops(program: Program) -> None:
    """Check that every op of a program has a lowering; the error lists all that have none, and why."""
    unknown = Counter(op.op_type for op in walk_ops(program) if op.op_type not in {*TABLE, "const"})
    if unknown:
        reasons = (
            f"{n} {kind}: {MISSING.get(kind, 'no lowering is written for it')}" for kind, n in unknown.items()
        )
        raise NotExpressible(f"it has ops that Core AI has not: {'; '.join(reasons)}")


def shape_of(var: Var) -> list[int]:
    """Return the shape of a tensor or state, with -1 for dynamic axes."""
    is_state = types.is_state(var.sym_type)
    shape = var.sym_type.wrapped_type().get_shape() if is_state else var.shape
    return [-1 if is_symbolic(length) else int(length) for length in shape]


class ConstantPool:
    """The constants of a program. Each array is stored once, however many ops and functions read it."""

    def __init__(self) -> None:
        self._attributes: dict[Any, tuple[Array, Any]] = {}

    def attribute(self, numbers: Array, dtype: str) -> Any:
        """Return the attribute of constant ops for an array; views of the same memory share one."""
        address = numbers.__array_interface__["data"][0]
        key = (address, numbers.nbytes, numbers.shape, numbers.strides, dtype)
        if key not in self._attributes:
            made = toolkit.constant_attribute(numbers.astype(numpy_of(dtype), copy=False), dtype)
            self._attributes[key] = numbers, made  # the array keeps its address
        return self._attributes[key][1]


class FunctionWriter:
    """Writes one function of MIL; `color_spaces` are those of inputs and outputs that Core ML calls images."""

    def __init__(
        self, function: Function, mode: Mode, constants: ConstantPool, color_spaces: Mapping[str, str]
    ) -> None:
        self.function, self.mode, self.constants = function, mode, constants
        interface = function.inputs | {var.name: var for var in function.outputs}
        spaces = {} if mode.has("write images as tensors") else color_spaces
        self.images = convertible_images(spaces, interface)
        self.values: dict[Var, Any] = {}
        """MIL value -> its tensor in the graph. None for values that are no tensors, such as class labels."""
        self.states: dict[Var, Value] = {}
        """State -> its latest value."""
        self.depth = 0
        """Number of conditions and loops around the current op."""
        self._constant_ops: dict[Any, Any] = {}

    def write(self, name: str) -> Signature:
        """Write the function as a graph of the open program; return inputs (with states) and outputs of it."""
        inputs = self.function.inputs
        new_states = {n: f"{n}{NEW_STATE}" for n, var in inputs.items() if types.is_state(var.sym_type)}

        def body(arguments: Sequence[Any]) -> Mapping[str, Any]:
            for (key, var), node in zip(inputs.items(), arguments, strict=True):
                (self.states if key in new_states else self.values)[var] = self._input(key, var, node)
            self.operations(self.function)
            results = {var.name: self._output(var) for var in self._outputs()}
            return results | {new: self.states[inputs[key]].node for key, new in new_states.items()}

        kinds = {
            key: toolkit.image(*shape_of(var)[2:]) if key in self.images else self.type_of(var)
            for key, var in inputs.items()
        }
        toolkit.graph(name, kinds, body, new_states)
        given = tuple(self._port(key, var, is_state=key in new_states) for key, var in inputs.items())
        return Signature(given, tuple(self._port(var.name, var) for var in self._outputs()))

    def dtype_of(self, var: Var) -> str:
        """Return the element type of a value in the file."""
        return self.mode.dtype(dtype_name(var))

    def type_of(self, var: Var) -> Any:
        """Return the type of a tensor or state in the file."""
        return toolkit.tensor(shape_of(var), self.dtype_of(var))

    def _outputs(self) -> list[Var]:
        return [var for var in self.function.outputs if self.values.get(var, var) is not None]

    def _input(self, name: str, var: Var, node: Any) -> Value:
        is_image = name in self.images
        return from_image(node, self.images[name], self.dtype_of(var)) if is_image else Value(node)

    def _output(self, var: Var) -> Any:
        value = self.value(var)
        return to_image(value, self.images[var.name]) if var.name in self.images else value.node

    def _port(self, name: str, var: Var, *, is_state: bool = False) -> Port:
        is_dict = types.is_dict(var.sym_type)  # of a classifier: its probabilities are written as a tensor
        kind, lengths = ("fp32", self.value(var).shape) if is_dict else (self.dtype_of(var), shape_of(var))
        kind = f"{self.images[name]} image" if name in self.images else f"state {kind}" if is_state else kind
        return Port(name, kind, tuple(None if length < 0 else length for length in lengths))

    def block(self, block: Block, inputs: Sequence[Value]) -> list[Value]:
        """Write the ops of a nested block at the insertion point; returns its outputs."""
        self.values |= dict(zip(block.inputs, inputs, strict=True))
        self.depth += 1
        self.operations(block)
        self.depth -= 1
        return [self.value(var) for var in block.outputs]

    def operations(self, block: Block) -> None:
        """Write the ops of a block; the error names the op that cannot be written, and why."""
        for op in block.operations:
            if op.op_type == "const" or _is_folded(op):
                continue
            try:
                self._operation(op)
            except Exception as error:
                refused = f"Apple's package refuses it: {toolkit.refusal(error)}"
                reason = error if isinstance(error, SurgeryError) else refused
                raise NotExpressible(f"op {op.name} ({op.op_type}): {reason}") from error

    def _operation(self, op: Operation) -> None:
        extras = {"op": op, "mode": self.mode, "writer": self}
        lowering = TABLE[op.op_type]
        function = partial(lowering, **{name: extras[name] for name in extras_of(lowering)})
        arguments = self._arguments(op)
        write = self._composite if _is_composed(op) else self._plain
        for var, value in zip(op.outputs, write(op, function, arguments), strict=True):
            if value is not None and isinstance(var.val, (np.ndarray, np.generic)):
                value.known = np.asarray(var.val)
            self.values[var] = value

    def _plain(self, op: Operation, function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[Any]:
        """Return the results of a lowering, with the element types and shapes that MIL infers."""
        returned = function(**arguments)
        results = returned if isinstance(returned, (list, tuple)) else [returned]
        return [self._as_inferred(value, var) for value, var in zip(results, op.outputs, strict=True)]

    def _composite(
        self, op: Operation, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> list[Any]:
        """Write the op as a private graph with its name and attributes, and return the results of its call."""
        operands = {name: value for name, value in arguments.items() if isinstance(value, Value)}
        attributes = {name: value for name, value in arguments.items() if name not in operands}

        def body(nodes: Sequence[Any]) -> list[Any]:
            inner = dict(zip(operands, map(Value, nodes), strict=True))
            for name, value in inner.items():
                value.known = operands[name].known
            return [value.node for value in self._plain(op, function, inner | attributes)]

        nodes = {name: value.node for name, value in operands.items()}
        return [Value(node) for node in toolkit.composite(f"{OWN}{op.op_type}", nodes, attributes, body)]

    def _as_inferred(self, value: Value | None, var: Var) -> Value | None:
        """Return a result with the element type and shape that MIL infers, whose lengths it must have."""
        is_tensor = types.is_tensor(var.sym_type) or types.is_scalar(var.sym_type)
        if value is None or not is_tensor or isinstance(value, Dense):
            return value
        value, inferred = value.cast(self.dtype_of(var)), shape_of(var)
        fits = len(value.shape) == len(inferred) and all(
            a == b or min(a, b) < 0 for a, b in zip(value.shape, inferred, strict=True)
        )
        if not fits:
            words = f"it was written with the shape {value.shape}, and MIL infers {inferred}"
            raise SurgeryError(f"{words}; please report it")
        return value.refined(inferred)

    def _arguments(self, op: Operation) -> dict[str, Any]:
        """Return input name -> tensors, or plain Python for inputs that only configure the op."""
        arguments: dict[str, Any] = {}
        for name, given in op.inputs.items():
            if given is None or name.startswith("_") or name in UNUSED:
                continue
            if isinstance(given, (list, tuple)):
                arguments[name] = [self.value(var) for var in given]
            elif types.is_state(given.sym_type):
                arguments[name] = None  # read_state and coreml_update_state look it up in `states`
            else:
                arguments[name] = self._argument(op, name, given)
        return arguments

    def _argument(self, op: Operation, name: str, var: Var) -> Any:
        numbers = var.val
        if numbers is None:
            return self.value(var)
        if isinstance(numbers, str):
            return numbers
        if is_constexpr(op) and not name.endswith("axis"):
            return self._constant(var, dtype_name(var))  # parts of a compressed weight keep their element types
        if not getattr(op.input_spec.input_types.get(name), "const", False):
            return self.value(var)
        if not isinstance(numbers, (np.ndarray, np.generic)):
            return numbers
        is_plain = numbers.ndim == 0 or numbers.dtype.kind != "f"
        return numbers.tolist() if is_plain else self.value(var)

    def value(self, var: Var) -> Value:
        """Return the tensor of a MIL value."""
        if var not in self.values:
            self.values[var] = self._constant(var, self.dtype_of(var))
        return self.values[var]

    def _constant(self, var: Var, dtype: str) -> Constant:
        """Return a constant. Its op is written once in each block that reads it: blocks cannot share ops."""
        if var.val is None or isinstance(var.val, str):
            raise NotExpressible(f"%{var.name} is no tensor")
        numbers = np.asarray(var.val)
        if numbers.dtype == object:  # a shape with symbols, each of which stands for -1
            lengths = [-1 if is_symbolic(v) else int(v) for v in numbers.reshape(-1)]
            numbers = np.array(lengths, np.int32).reshape(numbers.shape)

        def node() -> Any:
            key = (toolkit.ir.InsertionPoint.current.block, var, dtype)
            if key not in self._constant_ops:
                self._constant_ops[key] = toolkit.constant(self.constants.attribute(numbers, dtype))
            return self._constant_ops[key]

        return Constant(numbers, dtype, node)


def _is_folded(op: Operation) -> bool:
    """Return whether an op's results are known, and small enough to be written as constants."""
    known = [var.val for var in op.outputs]
    return not is_constexpr(op) and all(v is not None and np.size(v) <= MOST_FOLDED for v in known)


def _is_composed(op: Operation) -> bool:
    """Return whether an op is written as a private graph of its own name."""
    merging = MERGED_INTO.get(op.op_type, frozenset())
    return op.op_type in COMPOSED or any(c.op_type in merging for var in op.outputs for c in consumers(var))

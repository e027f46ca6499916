"""Read a Core AI model into an ML Program: `load("model.aimodel")`.

A child process with Apple's bindings returns the graphs as plain data (`toolkit.walk_asset`); large weights are
mapped from the file (`asset`). `Reader` builds a MIL function from each graph, and `GraphScope` lifts its
ops one by one by the table in `lifts`. Integers of every width become int32, and so do booleans at the
interface, since Core ML has neither there; `notes` of the result says so.

`anesurgery.to_coreml`, at the end, writes the program as a package for devices without Core AI. It is lifted to
the oldest opset that has all its ops.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import cast as cast_to

import numpy as np

from anesurgery import registry
from anesurgery.coreai.asset import SUFFIX, Asset
from anesurgery.coreai.child import ask
from anesurgery.coreai.lifts import (
    TABLE,
    TOKEN,
    Described,
    LiftedOp,
    Unliftable,
    Value,
    as_var,
    cast,
    image_size,
    mil_type,
)
from anesurgery.coreai.lifts.graphs import as_list, composite_of
from anesurgery.coreai.names import CLASSES, LABEL, OWN, PREFIX, bits_of, name_of, numpy_of
from anesurgery.doors import door
from anesurgery.errors import LoadError, SurgeryError, UnknownName
from anesurgery.files.interface import new_spec
from anesurgery.files.package import Loaded, save
from anesurgery.files.protobuf import version_of
from anesurgery.files.sub_byte import unpack
from anesurgery.files.writing import check_target
from anesurgery.mil import (
    MOST_AXES,
    Array,
    Function,
    Program,
    Var,
    any_symbolic,
    ct,
    dtype_name,
    exclusive,
    is_constexpr,
    is_symbolic,
    mb,
    new_symbol,
    np_dtype,
    producer,
    quiet_host,
    types,
    walk_ops,
)
from anesurgery.neuralnetwork.importing import identifiers, rename
from anesurgery.rewriting.passes import run_pass
from anesurgery.rewriting.session import Session

with quiet_host():
    from coremltools.converters.mil.mil import mil_list
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

OPSET = ct.target.iOS18
"""The first opset with states, attention and weights in blocks."""
CLEANUP = ("fuse_transpose_matmul", "dead_code_elimination", "const_elimination", "dead_code_elimination")
"""Passes of coremltools: Core AI has no transposed products, and lifts leave ops without readers."""
NAME = "coreai.name"
"""Attribute of an input or output that holds its name."""
LARGE = 64
"""Above this size a float constant becomes one value of the program, however often it is read."""
NO_END = -1
"""The upper bound by which coremltools means that an axis has none."""
USUAL = 64
"""The default size of a dynamic axis: a choice."""


@exclusive()
def read(path: Path) -> Loaded:
    """Read a model; its large weights stay mapped.

    Raises:
        LoadError: it is damaged, an op has no form in MIL, or Apple's package is not installed.
    """
    return Reader(*_walked(path), OPSET).program()


def _walked(path: Path) -> tuple[Asset, list[Described], dict[str, Array]]:
    """Return a model on disk, and its graphs and small constants, which the child process reads."""
    asset = Asset.open(path)
    return asset, *ask("read", asset.path, {})


def _set_io_types(function: Function, longest: int, images: Mapping[str, str]) -> None:
    """Set the input and output types that a program does not hold: ranges of dynamic axes, and images."""
    tensors = {n: v for n, v in function.inputs.items() if not types.is_state(v.sym_type)}
    if not images and not any(any_symbolic(v.shape) for v in tensors.values()):
        return
    size = ct.RangeDim(1, longest, default=USUAL if longest == NO_END else min(USUAL, longest))

    def stated(name: str, var: Var, **shape: Any) -> Any:
        if name in images:
            colors = getattr(ct.colorlayout, images[name])
            return ct.ImageType(name=name, color_layout=colors, channel_first=True, **shape)
        return ct.TensorType(name=name, dtype=np_dtype(var).type, **shape)

    function.input_types = [
        stated(n, v, shape=ct.Shape([size if is_symbolic(d) else int(d) for d in v.shape]))
        for n, v in tensors.items()
    ]
    if any(var.name in images for var in function.outputs):
        function.output_types = [stated(var.name, var) for var in function.outputs]


METADATA_FIELDS = {"author": "author", "license": "license", "description": "shortDescription"}
"""Key in the folder's metadata -> field of Core ML's metadata."""
CUSTOM, FEATURE, VERSION = "creatorDefinedMetadata", "feature.", "version"
"""Key of the custom metadata; and in it, the prefix and key under which `to_coreai` keeps descriptions of
inputs and the version."""


def _spec_with_metadata(program: Program, metadata: Mapping[str, Any], classifiers: Collection[str]) -> Any:
    """Return a specification with the folder's metadata, without the labels that the program holds again.

    None where the folder has no metadata.
    """
    done = {prefix + name for name in classifiers for prefix in (CLASSES, LABEL)}
    custom = {k: str(v) for k, v in dict(metadata.get(CUSTOM) or {}).items() if k not in done}
    if not custom and not done and not any(metadata.get(key) for key in METADATA_FIELDS):
        return None
    spec = new_spec(program, version_of(program))
    core_ml, features = spec.description.metadata, [*spec.description.input, *spec.description.output]
    for key, name in METADATA_FIELDS.items():
        setattr(core_ml, name, str(metadata.get(key) or ""))
    core_ml.versionString = custom.pop(VERSION, "")
    for feature in features:
        feature.shortDescription = custom.pop(f"{FEATURE}{feature.name}", "")
        custom.pop(f"{PREFIX}{feature.name}", None)
    core_ml.userDefined.update(custom)
    return spec


class Reader:
    """Builds the ML Program of a model for an opset.

    `longest` is the largest size of dynamic axes. With `labels`, a classifier gets the label again that
    `to_coreai` left out.
    """

    def __init__(
        self,
        asset: Asset,
        graphs: Sequence[Described],
        arrays: Mapping[str, Array],
        opset: Any,
        longest: int = NO_END,
        *,
        labels: bool = False,
    ) -> None:
        self.asset, self.arrays, self.opset, self.longest = asset, arrays, opset, longest
        self.graphs = {graph["name"]: graph for graph in graphs}
        self.notes: dict[str, None] = {}
        noted = dict(asset.metadata.get(CUSTOM) or {})
        self.images = {k.removeprefix(PREFIX): v for k, v in noted.items() if k.startswith(PREFIX)}
        """Input or output that is an image -> its colour space."""
        kept = noted if labels else {}
        self.classes = {k.removeprefix(CLASSES): v for k, v in kept.items() if k.startswith(CLASSES)}
        """Output with probabilities -> the labels, where they become a classifier again."""
        self.decisions = {k.removeprefix(LABEL): v for k, v in kept.items() if k.startswith(LABEL)}
        """Output with probabilities -> the output that holds the label."""

    def program(self) -> Loaded:
        """Return the ML Program; a LoadError names the op that the opset lacks."""
        program = Program()
        for name, graph in self.graphs.items():
            if not graph["private"]:
                program.add_function(name, self.function(graph))
        if not program.functions:
            raise LoadError(f"{self.asset.path} has no function that can be called; export it again")
        cast_to(Any, program).default_function_name = next(iter(program.functions))
        with quiet_host():
            for name in CLEANUP:
                PASS_REGISTRY[f"common::{name}"](program)
        for function in program.functions.values():
            _set_io_types(function, self.longest, self.images)
        spec = _spec_with_metadata(program, self.asset.metadata, self.classes)
        return Loaded(program, spec, source=self.asset.path.resolve(), notes=tuple(self.notes))

    def function(self, graph: Described) -> Function:
        """Build a function of the program from a graph."""
        self._check_kinds(graph)
        wanted = [named.get(NAME) or f"input_{i}" for i, named in enumerate(graph["inputs"])]
        names = identifiers(wanted)
        inputs = {n: self._placeholder(n, a) for n, a in zip(names, graph["arguments"], strict=True)}
        with Function(inputs, opset_version=self.opset) as function:
            scope = GraphScope(self, graph)
            given = [self._given(function.inputs[n], a) for n, a in zip(names, graph["arguments"], strict=True)]
            results = zip(
                graph["outputs"], scope.block(graph, given), graph["ops"][-1]["operands"], strict=True
            )
            named = [  # without the tokens that order states
                (stated.get(NAME) or f"output_{i}", value, scope.types[number])
                for i, (stated, value, number) in enumerate(results)
                if value is not TOKEN
            ]
            outputs = self._outputs(named)
            decided = self._with_labels(outputs)
            function.set_outputs(list(decided))
        rename(function, scope.labels, decided)
        wanted += [name for name, *_ in named]
        for before, after in zip(wanted, [*names, *outputs.values()], strict=True):
            if before != after:
                self.notes[f"{before} is called {after}: MIL takes letters, digits and underscores"] = None
        return function

    def _check_kinds(self, graph: Described) -> None:
        kinds = {op_kind(op) for op in self._ops(graph, set())}
        if lacking := sorted(kinds - TABLE.keys() - ENDS):
            words = f"{self.asset.path}: nothing in MIL stands for {', '.join(lacking)} of Core AI"
            raise LoadError(f"{words}, which {graph['name']} uses; export the model without")

    def _ops(self, block: Described, seen: set[str]) -> Iterator[Described]:
        """Yield the ops of a block, of nested blocks and of called graphs."""
        for op in block["ops"]:
            yield op
            for inner in op["blocks"]:
                yield from () if op_kind(op) == "scatter_nd" else self._ops(inner, seen)
            callee = self.graphs.get(op["attributes"].get("callee", ""))
            if callee is not None and callee["name"] not in seen:
                seen.add(callee["name"])
                yield from self._ops(callee, seen)

    def _placeholder(self, name: str, kind: Described) -> Any:
        if (size := image_size(kind)) is not None:
            self.images.setdefault(name, "RGB")
            return mb.placeholder(shape=[1, 3, *size], dtype=types.fp32, name=name)
        if "dtype" not in kind:
            raise LoadError(f"{self.asset.path}: the input {name} is a {kind['type']}, which Core ML has not")
        dtype = mil_type(kind["dtype"])
        dtype = "int32" if dtype == "bool" else dtype
        if dtype != name_of(kind["dtype"]):
            self.notes[f"input {name} holds {kind['dtype']} in the file, and {dtype} here"] = None
        shape = [new_symbol() if d is None else d for d in kind["shape"]]
        element = types.string_to_builtin(dtype)
        if not shape:
            words = f"the input {name} is a scalar, and inputs of Core ML have an axis"
            raise LoadError(f"{self.asset.path}: {words}; export it with the shape (1,)")
        if kind.get("state"):
            if not types.is_float(element):
                raise LoadError(
                    f"{self.asset.path}: the state {name} holds {dtype}; states of Core ML hold fp16"
                )
            if dtype != "fp16":
                self.notes[f"state {name} holds {dtype} in the file, and fp16 here"] = None
            return mb.state_tensor_placeholder(shape, types.fp16)  # which the function names
        return mb.placeholder(shape=shape, dtype=element, name=name)

    def _given(self, var: Var, kind: Described) -> Value:
        return cast(var, mil_type(kind["dtype"])) if "dtype" in kind and not kind.get("state") else var

    def _outputs(self, named: Sequence[tuple[str, Value, Described]]) -> dict[Var, str]:
        """Return output value -> name, from (name, value, type in the file); each gets an op of its own."""
        outputs, names = dict[Var, str](), identifiers([name for name, *_ in named])
        for name, (_, value, kind) in zip(names, named, strict=True):
            if (var := as_var(value)).dtype is types.bool:
                self.notes[f"output {name} holds truth values in the file, and int32 here"] = None
                var = mb.cast(x=var, dtype="int32")
            made = producer(var)
            own = var.name == name if made is None else made.op_type not in ("const", "read_state")
            outputs[var if own and var not in outputs else mb.identity(x=var)] = name
            if image_size(kind) is not None:
                self.images.setdefault(name, "RGB")
        return outputs

    def _with_labels(self, outputs: dict[Var, str]) -> dict[Var, str]:
        """Return the outputs with a label before the probabilities of a classifier.

        Probabilities stay a tensor if the number of labels differs, or if an output is an image: coremltools
        cannot describe both.
        """
        made, has_image = dict[Var, str](), not self.images.keys().isdisjoint(outputs.values())
        for var, name in outputs.items():
            classes = self.classes.get(name)
            if isinstance(classes, list) and len(classes) == math.prod(var.shape) and not has_image:
                labels = mb.const(val=mil_list([c if isinstance(c, str) else np.int64(c) for c in classes]))
                label, numbers = mb.classify(probabilities=cast(var, "fp32"), classes=labels)
                made |= {label: self.decisions.get(name, "classLabel"), numbers: name}
                continue
            made[var] = name
            if self.classes.pop(name, None) is not None:
                self.notes[f"{name} stays a tensor; its labels are in the metadata ({CLASSES}{name})"] = None
        return made

    def constant(self, held: Described) -> Array:
        """Return the numbers of a constant in the file's dtype; elements of few bits take a byte each."""
        name, shape = name_of(held["dtype"]), tuple(held["shape"])
        if "constant" in held:
            dtype = numpy_of(name.replace("bf16", "fp32"))
            return np.broadcast_to(self.arrays[held["constant"]].astype(dtype), shape)
        count, bits, stored = math.prod(shape), bits_of(name), self.asset.bytecode.array
        if bits < 8:
            packed = stored(held["resource"], np.dtype(np.uint8), -(-count * bits // 8))
            return unpack(packed, bits, name.startswith("int"), shape)
        array = stored(held["resource"], numpy_of(name), count).reshape(shape)
        return (array.astype(np.uint32) << 16).view(np.float32) if name == "bf16" else array


def op_kind(op: Described) -> str:
    """Return the kind of an op as the table names it."""
    return str(op["kind"]).removeprefix("broadcasting_")


ENDS = {"output", "yield", "condition"}
"""The ops that end a block."""


class GraphScope:
    """The values of a graph while its ops are lifted."""

    def __init__(self, reader: Reader, graph: Described, labels: dict[Var, str] | None = None) -> None:
        self.reader, self.name = reader, graph["name"]
        self.values: dict[int, Value] = {}
        """Number of a value in the file -> the program's value."""
        self.types: dict[int, Described] = {}
        """Number of a value in the file -> its type there."""
        self.labels: dict[Var, str] = {} if labels is None else labels
        """Value -> the name that it gets at the end, if no other has it."""
        self.shared: dict[Any, Var] = {}
        """(resource, element type, shape) of a large weight -> its value."""
        self.stated: set[Var] = set()
        """Results of composites that `to_coreai` wrote; see `lifts.Scope`."""
        self.depth = 0
        """Number of blocks around the current op."""

    def take(self, kind: Described, value: Value) -> None:
        """Note the program's value for a value of the file."""
        self.values[kind["number"]], self.types[kind["number"]] = value, kind

    def constant(self, held: Described) -> Value:
        """Return a constant: its numbers, or one value of the program for each large weight."""
        key = (held.get("resource"), held["dtype"], tuple(held["shape"]))  # equal bytes are one resource
        if key in self.shared:
            return self.shared[key]
        array = self.reader.constant(held)
        if array.dtype.kind != "f" or array.size <= LARGE:
            return array
        var = mb.const(val=array)
        if key[0] is not None and not self.depth:
            self.shared[key] = var
        return var

    def block(self, block: Described, values: Sequence[Value] = ()) -> list[Value]:
        """Lift the ops of a block, and return its results."""
        for argument, value in zip(block["arguments"], values, strict=False):
            self.take(argument, value)
        for op in block["ops"]:
            if op["kind"] in ENDS:
                return [self.values[i] for i in op["operands"]]
            self._lift(op)
        raise LoadError(f"{self.reader.asset.path}: a block of {self.name} has no end; export the model again")

    def nested(self, block: Described, values: Sequence[Value] = ()) -> list[Value]:
        """Lift a nested block at the builder's position."""
        self.depth += 1
        try:
            return self.block(block, values)
        finally:
            self.depth -= 1

    def called(self, site: LiftedOp) -> list[Value]:
        """Return the results of a call: one MIL op for a known composite, else the lifted ops of the graph."""
        graph = self.reader.graphs[site.attribute("callee")]
        operands = [site[i] for i in range(len(site.operands))]
        declared = graph["composite"]
        if declared is not None and (make := composite_of(declared["name"])) is not None:
            named = dict(zip(declared["input_names"], operands, strict=True))
            with suppress(Unliftable, ValueError):  # the latter where the opset has no such op
                made = as_list(make(named, declared["op_attrs"]))
                self.stated |= set(map(as_var, made)) if declared["name"].startswith(OWN) else set()
                return made
        inner = GraphScope(self.reader, graph, self.labels)
        inner.depth = self.depth + 1
        return inner.block(graph, list(site.operands))

    def _lift(self, op: Described) -> None:
        site = LiftedOp(op, [self.values[i] for i in op["operands"]], self)
        try:
            made = TABLE[op_kind(op)](site)
            values: list[Value] = list(made) if isinstance(made, (list, tuple)) else [cast_to(Any, made)]
            for kind, value in zip(op["results"], values, strict=True):
                self._note_result(op, kind, value)
        except (LoadError, MemoryError):
            raise
        except Exception as error:  # coremltools raises many kinds, and each says what it does not take
            words = " ".join(str(error).split())[:300]
            why = words if isinstance(error, Unliftable) else f"coremltools refuses it: {words}"
            place = f"{op_kind(op)} ({op['hint']})" if op["hint"] else op_kind(op)
            raise LoadError(
                f"{self.reader.asset.path}: the op {place} of {self.name} has no form in MIL: {why}"
            ) from error

    def _note_result(self, op: Described, kind: Described, value: Value) -> None:
        """Note a result, in the shape that the file states."""
        if value is TOKEN or "dtype" not in kind or kind.get("state"):
            self.take(kind, value)
            return
        now, stated = list(value.shape), kind["shape"]
        differs = len(now) != len(stated) or any(
            b is not None and not is_symbolic(a) and a != b for a, b in zip(now, stated, strict=True)
        )
        if differs:
            raise Unliftable(f"it would give {tuple(now)}, and the file says {tuple(stated)}")
        if any(map(is_symbolic, now)) and None not in stated:
            value = mb.reshape(x=value, shape=np.array(stated, np.int32))
        if isinstance(value, Var):
            self.labels[value] = op["hint"] or op_kind(op)
        self.take(kind, value)


# -- the Core ML package for devices without Core AI ----------------------------------------------------

OPSETS = {release: getattr(ct.target, f"iOS{release}") for release in (15, 16, 17, 18)}
"""Oldest release of iOS -> the opset of a package that runs on it and all later ones."""
HALF = 16
"""The first release of iOS with fp16 inputs and outputs."""
SEVERAL = 18
"""The first release of iOS that takes several functions."""
MACOS = {15: 12, 16: 13, 17: 14, 18: 15}
"""Release of iOS -> the release of macOS of the same year."""


LONGEST = 2048
"""The default for the largest size of a dynamic axis, as in most published packages."""


@dataclass(frozen=True)
class Fallback:
    """The result of `to_coreml`."""

    path: Path
    """The `.mlpackage` that was written."""
    ios: int
    """The first release of iOS that runs it."""
    notes: tuple[str, ...]
    """What is called or typed differently than in the Core AI model, in words."""

    def __str__(self) -> str:
        first = f"{self.path}: runs on iOS {self.ios}, macOS {MACOS[self.ios]} and later"
        return "\n".join([first, *(f"  {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"path": str(self.path), "ios": self.ios, "notes": list(self.notes)}


@door()
@exclusive()
def to_coreml(
    model: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    ios: int | None = None,
    longest: int = LONGEST,
    overwrite: bool = False,
) -> Fallback:
    """Write an ML Program of a Core AI model, for devices with iOS 15 to 26.

    Args:
        model: path of an `.aimodel`.
        path: where to write it; ends in .mlpackage.
        ios: the first release of iOS that must run it: 15, 16, 17 or 18. Default: the oldest that has all its
            ops.
        longest: the largest size of each dynamic axis; Core ML needs a bound.
        overwrite: may what is there be replaced?

    Returns:
        The path of the package, the first release that runs it, and the names that changed.

    Raises:
        LoadError: the model cannot be read, the release lacks an op of it, an op keeps more axes than Core ML
            stores, or the place cannot be written to.
        SurgeryError: an argument is not what the call takes; or `longest` is below 1.
        UnknownName: no such release.
    """
    source, target = Path(model).expanduser(), Path(path).expanduser().absolute()
    if source.suffix.lower() != SUFFIX:
        raise LoadError(f"{source} is no {SUFFIX}; give a model of Core AI")
    if ios is not None and ios not in OPSETS:
        raise UnknownName("release of iOS", str(ios), map(str, OPSETS))
    if longest < 1:
        raise SurgeryError(f"longest={longest}: give the largest size of the axes that the model leaves open")
    check_target(source, target, overwrite)
    release, loaded = _oldest_release(source, longest, sorted(OPSETS) if ios is None else [ios])
    _merge_axes(loaded)
    notes = (*loaded.notes, *_input_notes(loaded, longest))
    return Fallback(save(loaded, target, overwrite=overwrite), release, notes)


def _oldest_release(source: Path, longest: int, releases: Sequence[int]) -> tuple[int, Loaded]:
    """Return the oldest release that has all ops of the model, and the program for it."""
    parts = _walked(source)
    for release in releases:
        try:
            loaded = Reader(*parts, OPSETS[release], longest, labels=True).program()
            if not (why_not := _why_not(loaded, release)):
                return release, loaded
            raise LoadError(f"{source}: {why_not}")
        except LoadError as error:
            refused = error
    raise refused


def _why_not(loaded: Loaded, release: int) -> str:
    """Return why a release that has all ops does not take the interface; "" where it does."""
    if release < HALF and (name := _fp16_port(loaded)):
        return f"{name} is fp16, which iOS {release} does not take; give ios={HALF}"
    if release < SEVERAL and len(loaded.program.functions) > 1:
        return f"it has several functions, which iOS {release} does not take; give ios={SEVERAL}"
    return ""


def _merge_axes(loaded: Loaded) -> None:
    """Write ops of more axes than a tensor of Core ML has with fewer; Core AI has no such limit.

    Raises:
        LoadError: an op keeps too many axes.
    """
    session = Session()
    if _with_many_axes(loaded.program):
        run_pass(registry.make_pass("rerank"), loaded.program, session)
    if over := _with_many_axes(loaded.program):
        why = next((f": {refusal.reason}" for _, refusal in session.refusals if refusal.where is over.op), "")
        words = f"%{over.name} has {over.rank} axes, and Core ML stores at most {MOST_AXES}"
        raise LoadError(f"{words}{why}; reshape it in the model")


def _with_many_axes(program: Program) -> Var | None:
    """Return the first value with too many axes; None where there is none."""
    values = (v for op in walk_ops(program) for v in op.outputs if not types.is_list(v.sym_type))
    wide = (v for v in values if v.rank > MOST_AXES)
    # The palette of a weight with 4 axes has 6, and Core ML stores it.
    return next((v for v in wide if not (v.child_ops and all(map(is_constexpr, v.child_ops)))), None)


def _fp16_port(loaded: Loaded) -> str:
    """Return the name of an input or output in fp16; "" where there is none."""
    ports = (v for f in loaded.program.functions.values() for v in (*f.inputs.values(), *f.outputs))
    return next((v.name for v in ports if dtype_name(v) == "fp16"), "")


def _input_notes(loaded: Loaded, longest: int) -> list[str]:
    """Return a sentence for each input with dynamic axes."""
    inputs = [v for f in loaded.program.functions.values() for v in f.inputs.values()]
    return [f"open axes of {v.name} take 1 to {longest}" for v in inputs if any_symbolic(v.shape)]

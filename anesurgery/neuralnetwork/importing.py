"""Make an ML Program of a neural network: its layers as ops, its interface as it was.

Names, types, images, labels, defaults and metadata of the description are kept. What an ML Program cannot say
is changed, and listed in the notes of the result: 64 bit floats become 32 bit ones, arrays of five axes get the
shapes that are stated, names become identifiers, an optional input without a default gets 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np

from anesurgery.errors import IsPipeline, LoadError, NotExpressible, UnknownName
from anesurgery.files.interface import mark_as_translated
from anesurgery.files.package import PIPELINES, PROGRAM, Loaded, part_names
from anesurgery.files.protobuf import proto
from anesurgery.mil import (
    Block,
    Function,
    Operation,
    Program,
    Var,
    ct,
    exclusive,
    mb,
    operands,
    producer,
    quiet_host,
)
from anesurgery.neuralnetwork import ports
from anesurgery.neuralnetwork.context import Context, Custom
from anesurgery.neuralnetwork.layers import load_families
from anesurgery.neuralnetwork.spec import DAMAGED, NETWORKS, is_legacy, network_of

with quiet_host():
    from coremltools.converters.mil.mil import mil_list
    from coremltools.converters.mil.mil.passes.defs.preprocess import NameSanitizer

load_families()

OPSET = ct.target.iOS17


@exclusive()
def import_network(
    spec: Any,
    what: str = "the model",
    *,
    custom: Custom | None = None,
    source: Path | None = None,
    compute_units: Any = None,
    keep_names: bool = False,
) -> Loaded:
    """Return the ML Program of a neural network.

    Args:
        spec: specification of a model, one of `NETWORKS`.
        what: the model in words; errors begin with it.
        custom: builders of custom layers by class name.
        source: the file it came from.
        compute_units: of the MLModel that comes out.
        keep_names: keep names of inputs and outputs that MIL does not take; then it can be run, but not saved.

    Raises:
        NotExpressible: it may be sound, but cannot be an ML Program.
        LoadError: the network or a layer of it is damaged.
    """
    kind = spec.WhichOneof("Type")
    if kind not in NETWORKS:
        raise _no_network(spec, what, kind)
    try:
        program, described, notes = _import(spec, custom, keep_names)
    except LoadError as error:
        raise type(error)(f"{what}: {error}") from error
    loaded = Loaded(program, described, source, None, compute_units, notes)
    mark_as_translated(program)
    return loaded


def _no_network(spec: Any, what: str, kind: str) -> LoadError:
    """Return why there is nothing to import, and what to do instead."""
    if kind in PIPELINES:
        names = ", ".join(part_names(PIPELINES[kind](spec)))
        cure = "give one of them: as the member, where the call takes one, or its own file"
        return IsPipeline(f"{what} is a pipeline of several models ({names}); {cure}")
    if kind == PROGRAM:
        return LoadError(f"{what} is an ML Program already")
    return LoadError(f"{what} is of type {kind}, which has no tensor ops: nothing to run or to rewrite")


def _import(spec: Any, custom: Custom | None, keep_names: bool) -> tuple[Program, Any, tuple[str, ...]]:
    """Return the program, its specification, and what changed."""
    check(spec)
    if spec.isUpdatable and not keep_names:
        raise NotExpressible(
            "the model is updatable, which an ML Program cannot be; export it with updating switched off"
        )
    if not keep_names:
        _check_no_input_is_output(spec.description)
    network = network_of(spec)
    ctx = Context(is_legacy(network), custom)
    features = [*spec.description.input, *spec.description.output]
    wanted = [f.name for f in features]
    names = dict(zip(wanted, wanted if keep_names else identifiers(wanted), strict=True))
    program = Program()
    with np.errstate(all="ignore"):  # constants are computed, and a damaged layer may divide by zero
        function = _function(ctx, network, spec.description, names)
    program.add_function("main", function)
    program_spec = proto.Model_pb2.Model(specificationVersion=OPSET.value)
    program_spec.description.CopyFrom(spec.description)
    if ctx.legacy:
        ctx.notes += ports.mapping_note(program_spec.description, names, function)
    ports.describe(program_spec.description, names, ctx.notes)
    program_spec.mlProgram.SetInParent()
    return program, program_spec, tuple(ctx.notes)


def _check_no_input_is_output(description: Any) -> None:
    """Refuse an input that is an output too: in an ML Program no two values have one name."""
    for name in {f.name for f in description.input} & {f.name for f in description.output}:
        raise NotExpressible(
            f"{name!r} is an input and an output, which an ML Program cannot have; rename one of them"
        )


def _function(ctx: Context, network: Any, description: Any, names: dict[str, str]) -> Function:
    """Return the function, with its inputs and outputs called by `names`."""
    inputs = {names[f.name]: ports.placeholder(f) for f in description.input}
    has_images = any(f.type.WhichOneof("Type") == "imageType" for f in description.input)
    if not has_images and any(not step.featureName for step in network.preprocessing):
        ctx.notes.append("the preprocessing of all images was left out: no input is an image")
    with Function(inputs, opset_version=OPSET) as function:
        for feature in description.input:
            var = function.inputs[names[feature.name]]
            ctx.env[feature.name] = ports.read(ctx, network, feature, var)
        ctx.build(network)
        outputs = _outputs(ctx, network, description)
        function.set_outputs([outputs[f.name] for f in description.output])
    fixed = {var: names[name] for name, var in outputs.items()}
    rename(function, {var: name for name, var in ctx.env.items()}, fixed)
    return function


def _outputs(ctx: Context, network: Any, description: Any) -> dict[str, Var]:
    """Return the value of each output, made by an op of its own; a classification must come last of all ops."""
    class_names = _classes(network, description)
    outputs: dict[str, Var] = {}
    for feature in description.output:
        if feature.name in class_names:
            continue
        if feature.name not in ctx.env:
            raise LoadError(
                f"output {feature.name!r} is a blob that no layer makes; name one that a layer makes"
            )
        var = ports.give(ctx, feature, ctx.env[feature.name])
        is_computed = producer(var) is not None and producer(var, "const", "placeholder") is None
        is_free = is_computed and var not in outputs.values()
        outputs[feature.name] = var if is_free else mb.identity(x=var)
    return outputs | _classification(ctx, network, class_names)


def _classes(network: Any, description: Any) -> list[str]:
    """Return the names of the label and the probabilities of a classifier; none of another network."""
    if "ClassLabels" not in network.DESCRIPTOR.oneofs_by_name:
        return []
    return [description.predictedFeatureName, description.predictedProbabilitiesName]


def _classification(ctx: Context, network: Any, names: list[str]) -> dict[str, Var]:
    """Return the label and the probabilities of a classifier, by these names."""
    if not names:
        return {}
    labels = list(getattr(network, network.WhichOneof("ClassLabels")).vector)
    blob = network.labelProbabilityLayerName or "".join(network.layers[-1].output[:1])
    if blob not in ctx.env:
        raise LoadError(
            f"the probabilities of the classifier are the blob {blob!r}, which no layer makes; "
            "name one that a layer makes"
        )
    scores = ports.vector(ctx, ctx.env[blob], len(labels), blob)
    classes = [n if isinstance(n, str) else np.int64(n) for n in labels]
    decision = mb.classify(probabilities=scores, classes=mb.const(val=mil_list(classes)))
    return {name: var for name, var in zip(names, decision, strict=True) if name}


def identifier(name: str) -> str:
    """Return a name as MIL takes it: letters, digits and underscores, no digit first, no reserved word."""
    return str(NameSanitizer().sanitize_name(name))


def identifiers(names: Iterable[str]) -> list[str]:
    """Return names as MIL takes them, each once."""
    names, taken = list(names), _Names([n for n in names if identifier(n) == n])
    return [n if identifier(n) == n else taken.fresh(n) for n in names]


class _Names:
    """Hands out each name once."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self.constants: set[Var] = set()
        """The constants that are named."""

    def fresh(self, wish: str) -> str:
        """Return the wish, or the wish with a number appended."""
        name = identifier(wish)
        name = next(n for i in count() if (n := f"{name}_{i}" if i else name) not in self._taken)
        self._taken.add(name)
        return name


def rename(function: Function, labels: Mapping[Var, str], fixed: Mapping[Var, str]) -> None:
    """Name all ops and values of a function after the blobs that they make.

    Args:
        function: what was built.
        labels: the blob that a value is; the ops in front of it that make no blob are named after it.
        fixed: values that keep a name, as outputs do.
    """
    names = _Names([*function.inputs, *fixed.values()])
    _rename(function, labels, fixed, names, "value")


def _rename(
    block: Block, labels: Mapping[Var, str], fixed: Mapping[Var, str], names: _Names, last: str
) -> None:
    """Name the ops of a block after the next blob; those behind the last one after `last`, the blob before."""
    pending: list[Operation] = []
    for op in block.operations:
        if op.op_type == "const":
            continue
        pending.append(op)
        label = next((w for v in op.outputs if (w := fixed.get(v) or labels.get(v))), None)
        if label is not None:
            _name_group(pending, label, labels, fixed, names)
            pending, last = [], label
    _name_group(pending, last, labels, fixed, names)


def _name_group(
    ops: list[Operation], label: str, labels: Mapping[Var, str], fixed: Mapping[Var, str], names: _Names
) -> None:
    for op in ops:
        carried = [names.fresh(f"{label}_carried") for _ in (op.blocks[0].inputs if op.blocks else ())]
        for nested in op.blocks:  # all blocks of a loop read the same values
            for var, name in zip(nested.inputs, carried, strict=True):
                var.name = name
            _rename(nested, labels, fixed, names, label)
        wish = f"{label}_{op.op_type}"
        for i, var in enumerate(op.outputs):
            other = wish if len(op.outputs) == 1 else f"{wish}_{i}"
            var.name = fixed.get(var) or names.fresh(labels.get(var, other))
        op.name = op.outputs[0].name if op.outputs else names.fresh(wish)
        for parameter, var in operands(op):
            if producer(var, "const") and var not in names.constants:
                names.constants.add(var)
                var.name = cast("Operation", var.op).name = names.fresh(
                    labels.get(var, f"{op.name}_{parameter}")
                )


NEWEST = max(int(target.value) for target in ct.target)
"""The newest specification that coremltools knows."""


def check(spec: Any) -> None:
    """Check what the specification says as a whole, before any layer is built.

    Args:
        spec: specification of a model that is a network.

    Raises:
        LoadError: it is too new, without layers, or its description contradicts itself.
    """
    if spec.specificationVersion > NEWEST:
        raise LoadError(
            f"specification {spec.specificationVersion} is newer than {NEWEST}, the newest that coremltools "
            f"{ct.__version__} knows; upgrade coremltools"
        )
    network, description = network_of(spec), spec.description
    if not network.layers:
        raise LoadError(f"the network has no layers; {DAMAGED}")
    if not description.output:
        raise LoadError(f"the model has no outputs; {DAMAGED}")
    _check_names(description)
    _check_preprocessing(network, description)
    if "ClassLabels" in network.DESCRIPTOR.oneofs_by_name:
        _check_classifier(network, description)


def _check_names(description: Any) -> None:
    """Check that all inputs, and all outputs, have different names; an output may be an input as well."""
    for what, features in (("input", description.input), ("output", description.output)):
        for name, uses in Counter(f.name for f in features).items():
            if not name:
                raise LoadError(f"an {what} has no name; {DAMAGED}")
            if uses > 1:
                raise LoadError(f"{uses} {what}s are called {name!r}; give each a name of its own")


def _check_preprocessing(network: Any, description: Any) -> None:
    """Check that each preprocessing is of a known kind, and for an input that exists."""
    inputs = [f.name for f in description.input]
    for step in network.preprocessing:
        if step.featureName and step.featureName not in inputs:
            raise LoadError(
                f"a preprocessing is for no input: {UnknownName('input', step.featureName, inputs)}"
            )
        if step.WhichOneof("preprocessor") is None:
            raise LoadError(
                f"the preprocessing of {step.featureName!r} is neither a scaler nor a mean image; "
                "upgrade coremltools, or export the model again"
            )


def _check_classifier(network: Any, description: Any) -> None:
    """Check that a classifier has labels, and outputs for its decision."""
    if network.WhichOneof("ClassLabels") is None:
        raise LoadError("the classifier has no class labels; export it again with labels")
    if not description.predictedFeatureName:
        raise LoadError("the classifier does not say which output is the label; set predictedFeatureName")
    if description.predictedFeatureName == description.predictedProbabilitiesName:
        raise LoadError(f"{description.predictedFeatureName!r} is the label and the probabilities; {DAMAGED}")
    outputs = [f.name for f in description.output]
    for field in ("predictedFeatureName", "predictedProbabilitiesName"):
        name = getattr(description, field)
        if name and name not in outputs:
            raise LoadError(f"{field} names no output: {UnknownName('output', name, outputs)}")


class LoadedNetwork(Loaded):
    """A neural network as a chunk of a chain; one with a custom layer cannot be run, but all else.

    Args:
        spec: specification of a model, one of `NETWORKS`.
        what: the model in words; errors begin with it.
        source: the file it came from, which is never written to.
    """

    def __init__(self, spec: Any, what: str = "the model", source: Path | None = None) -> None:
        self.spec, self.what, self.source = spec, what, source
        self.weights = self.compute_units = None
        self.notes = self.other_weights = ()

    def __repr__(self) -> str:
        return f"<LoadedNetwork {self.what!r}>"

    @cached_property
    def imported(self) -> Loaded:
        """The ML Program of the network, with the names that its inputs and outputs have.

        Raises:
            LoadError: a layer cannot be built, as a custom one, whose code is not in the file.
        """
        return import_network(self.spec, self.what, source=self.source, keep_names=True)

    @property
    def program(self) -> Program:  # type: ignore[override]
        """The program of `imported`."""
        return self.imported.program

    @property
    def version(self) -> int:
        """The specification version."""
        return int(self.spec.specificationVersion)


def runnable(chunk: Loaded) -> Loaded:
    """Return a chunk as an ML Program.

    Raises:
        LoadError: it is a network with a layer that cannot be built.
    """
    return chunk.imported if isinstance(chunk, LoadedNetwork) else chunk

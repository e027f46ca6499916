"""Write a Core ML model as a Core AI model: `anesurgery.to_coreai`.

The model becomes an ML Program, its ops are checked (`writer.check_ops`), each function is written
(`writer.FunctionWriter`), and the folder is saved with its metadata. `CoreAI` is the result, with a sentence
for everything that the new format cannot hold.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anesurgery import registry
from anesurgery.byte_counts import byte_words
from anesurgery.coreai import toolkit
from anesurgery.coreai.asset import SUFFIX
from anesurgery.coreai.images import COLORS, PREFIX, color_space, images_of
from anesurgery.coreai.modes import Mode
from anesurgery.coreai.toolkit import require
from anesurgery.coreai.writer import ConstantPool, FunctionWriter, check_ops
from anesurgery.doors import door
from anesurgery.errors import LoadError, NotExpressible
from anesurgery.files.interface import Signature
from anesurgery.files.package import Loaded
from anesurgery.files.writing import check_target, write_atomically
from anesurgery.loading import clone, load_as_is
from anesurgery.mil import Program, exclusive, walk_ops
from anesurgery.network_editing.upgrade import in_precision
from anesurgery.neuralnetwork.importing import LoadedNetwork
from anesurgery.ops import LISTS
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
        model: path, MLModel or MIL program.
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
    how, loaded = Mode(mode), _as_program(load_as_is(model))
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
    metadata = toolkit.AIModelAssetMetadata()
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
    """Return "classes." and the name of the probabilities -> the class labels, in order."""
    decisions = [op for op in walk_ops(loaded.program) if op.op_type == "classify"]
    labels = {op.outputs[1].name: getattr(op.classes.val, "ls", op.classes.val) for op in decisions}
    return {f"classes.{n}": [v.item() if hasattr(v, "item") else v for v in held] for n, held in labels.items()}


def _lost_parts(loaded: Loaded) -> Iterator[str]:
    """Yield a sentence for each part of a Core ML description that Core AI has no word for."""
    for name in _classes(loaded):
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

"""A Core ML model as a Core AI one: `to_coreai`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anesurgery.coreai import toolkit
from anesurgery.coreai.modes import Mode
from anesurgery.coreai.writer import Constants, Writer, check_ops
from anesurgery.doors import door
from anesurgery.errors import LoadError
from anesurgery.files.interface import Signature, signatures
from anesurgery.files.package import PROGRAM, Loaded
from anesurgery.files.writing import check_target, write_atomically
from anesurgery.loading import load
from anesurgery.mil import exclusive
from anesurgery.network_editing.upgrade import upgrade

SUFFIX = ".aimodel"


@dataclass(frozen=True)
class CoreAI:
    """A Core AI model that was written."""

    path: Path
    functions: dict[str, Signature]
    """Name -> inputs (states included) and outputs, in order."""
    stored: int
    """Bytes of the folder."""
    lost: tuple[str, ...] = ()
    """What the Core ML model says that the new one does not hold, in words."""

    def __str__(self) -> str:
        lines = [f"{self.path} ({self.stored / 1e6:.1f} MB)"]
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

    Names, order, element types, states, functions and dynamic lengths are kept, weights stay as they are stored,
    each once. A neural network goes through `upgrade` first.

    Args:
        model: path, MLModel or MIL program.
        path: where to write it; ends in .aimodel.
        mode: "ship", for Apple's devices, or "check", for Apple's runtime on Linux: fp16 products are computed
            in fp32 there, which that runtime sums in fp16.
        overwrite: may what is there be replaced?

    Returns:
        What was written, and what of the model it cannot hold.

    Raises:
        LoadError: Apple's package is absent, the model cannot be read, or the place not written to.
        NotExpressible: Core AI lacks an op of the model; nothing was written.
        UnknownName: there is no such mode.
    """
    toolkit.require()
    forms, loaded = Mode(mode), _loaded(model)
    target = Path(path).expanduser().absolute()
    check_target(loaded.source, target, overwrite, SUFFIX)
    if loaded.absent is not None:
        raise LoadError(loaded.absent)
    check_ops(loaded.program)
    constants = Constants()
    with toolkit.module() as program:
        for name, function in loaded.program.functions.items():
            Writer(function, forms, constants).write(name)
    loaded.check_source()
    write_atomically(target, lambda place: toolkit.save(program, place, _metadata(loaded)), overwrite)
    stored = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    return CoreAI(target, signatures(loaded.program), stored, tuple(_lost(loaded)))


def _loaded(model: Any) -> Loaded:
    """The model; a neural network as an ML Program."""
    loaded = load(model)
    kind = None if loaded.spec is None else loaded.spec.WhichOneof("Type")
    return loaded if kind in (None, PROGRAM) else load(upgrade(model))


def _metadata(loaded: Loaded) -> Any:
    """The description of the model, as far as it has one; what has no field of its own stands by name."""
    metadata = toolkit.AIModelAssetMetadata()
    if (description := loaded.description) is None:
        return metadata
    given = description.metadata
    metadata.author, metadata.license = given.author, given.license
    metadata.model_description = given.shortDescription
    custom = dict(given.userDefined) | ({"version": given.versionString} if given.versionString else {})
    features = [*description.input, *description.output, *description.state]
    custom |= {f"feature.{f.name}": f.shortDescription for f in features if f.shortDescription}
    for key, value in custom.items():
        metadata.set_custom(key, value)
    return metadata


def _lost(loaded: Loaded) -> Iterator[str]:
    """What the description of a Core ML model says that a Core AI program has no word for."""
    if (description := loaded.description) is None:
        return
    for feature in (*description.input, *description.output):
        kind = feature.type.WhichOneof("Type")
        if kind == "imageType":
            image = feature.type.imageType
            layout = type(image).DESCRIPTOR.fields_by_name["colorSpace"].enum_type
            colors = layout.values_by_number[image.colorSpace].name
            yield f"{feature.name} is an image ({image.width} x {image.height}, {colors}): give its pixels as a tensor"
        if kind == "multiArrayType" and (form := feature.type.multiArrayType.WhichOneof("ShapeFlexibility")):
            yield f"the {form} of {feature.name}: Core AI takes any length on its dynamic axes"
        if feature.type.isOptional:
            yield f"{feature.name} is optional: give it at each call"

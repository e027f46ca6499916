"""Load a model in any of its forms: a path, an MLModel, a MIL program; a neural network becomes a program."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from anesurgery.doors import door
from anesurgery.errors import IsPipeline, LoadError, UnknownName
from anesurgery.files.compiled import (
    PROGRAM_TEXT,
    WEIGHTS,
    is_compiled,
    is_network,
    is_text,
    read_compiled,
    readable_by_coremltools,
)
from anesurgery.files.copying import copy_program
from anesurgery.files.interface import Interface, saved_description, signatures
from anesurgery.files.joining import joined
from anesurgery.files.mil_text import WRITTEN_VERSION, write_mil
from anesurgery.files.package import PIPELINES, PROGRAM, Loaded, from_spec, locate, part_names, read_spec
from anesurgery.files.protobuf import blob_values, to_proto
from anesurgery.files.sequence import Chain, ModelSequence, is_chain, is_chunked, read_chain
from anesurgery.files.source import SourceFile
from anesurgery.mil import Block, Operation, Program, Var, ct, exclusive
from anesurgery.neuralnetwork.importing import LoadedNetwork, import_network, runnable
from anesurgery.neuralnetwork.spec import NETWORKS
from anesurgery.registry import converter_of, reader_of
from anesurgery.text import to_text as short_text


def program_text(loaded: Loaded, version: str = WRITTEN_VERSION) -> str:
    """The MIL text of a model (no trailing newline).

    A weight that stands unchanged in the model's weight file is written as its place there, every other
    constant in full.

    Args:
        loaded: the model.
        version: of the text, see `write_mil`.
    """
    weights = loaded.weights

    def place(var: Var) -> int | None:
        blob = None if weights is None else weights.blob_of(np.asarray(var.val))
        return None if blob is None else blob.place

    source = None if loaded.spec is None else loaded.spec.mlProgram
    spec = to_proto(loaded.program, loaded.version, place, source)
    if weights is not None:
        for blob in blob_values(spec):
            blob.fileName = f"@model_path/weights/{weights.path.name}"
    return write_mil(spec, version)


@door()
@exclusive()
def load(model: Any, *, compute_units: Any = None) -> Loaded:
    """Read a model.

    Args:
        model: path of an .mlpackage, .mlmodel, compiled .mlmodelc, MIL text (.mil) or Core AI model (.aimodel),
            MLModel, MIL program, or Loaded. Other formats become an ML Program; `notes` says what changed.
        compute_units: `ct.ComputeUnit`, or its name, for the resulting MLModel. Default: that of a given
            MLModel.

    Returns:
        The model: its MIL `program`, its specification, where it came from and `notes`. Weights stay mapped.

    Raises:
        LoadError: it does not exist, is damaged, or is not an ML Program.
        SurgeryError: an argument is not what the call takes.
    """
    return _load(model, _units(compute_units))


@exclusive()
def load_as_is(model: Any) -> Loaded:
    """Load a model; a neural network stays one, and its program is made on demand.

    Raises:
        LoadError: it does not exist, is damaged, or is neither an ML Program nor a neural network.
    """
    return _load(model, None, as_is=True)


def _load(model: Any, compute_units: Any, **network: bool) -> Loaded:
    if isinstance(model, Loaded):
        return model
    if isinstance(model, Program):
        return Loaded(model, compute_units=compute_units)
    if is_chunked(model):
        raise IsPipeline(f"{_words(model)} is a chain of chunks; give one of them: {_chunk_names(model)}")
    if isinstance(model, ct.models.MLModel):
        path = model.package_path
        if path is None:
            units = compute_units or model.compute_unit
            return _network("this MLModel", model.get_spec(), None, units, **network)
        return _load(path, compute_units or model.compute_unit, **network)
    if not isinstance(model, (str, os.PathLike)):
        cure = "give a path, an MLModel or a MIL Program"
        if converter_of(model) is not None:
            cure = "give it to inspect or apply with inputs=, or convert it first"
        raise LoadError(f"cannot load a {type(model).__name__}; {cure}")
    return _load_path(Path(model).expanduser(), compute_units, **network)


@exclusive()
def load_exact(model: Any) -> Loaded:
    """Load a model to run it: a neural network keeps names that MIL does not take, and may be updatable.

    Raises:
        LoadError: it does not exist, is damaged, or is neither an ML Program nor a neural network.
    """
    return _load(model, None, exact=True)


@exclusive()
def load_graph(model: Any) -> Loaded:
    """Load a model even without its weights: `Loaded.absent` says why, and NaN stands in for them.

    Raises:
        LoadError: it does not exist, is damaged, or is not an ML Program.
    """
    if isinstance(model, (str, os.PathLike)) and not is_chain(path := Path(model).expanduser()):
        return _load_path(path, None, graph_only=True)
    return load(model)


def _units(units: Any) -> Any:
    """Compute units, which may be given by name.

    Raises:
        UnknownName: there are none of that name.
    """
    if units is None or isinstance(units, ct.ComputeUnit):
        return units
    if units not in ct.ComputeUnit.__members__:
        raise UnknownName("compute units", str(units), list(ct.ComputeUnit.__members__))
    return ct.ComputeUnit[units]


def _words(model: Any) -> str:
    return str(model) if isinstance(model, (str, os.PathLike)) else "this"


def _chunk_names(chain: Any) -> str:
    """Return the packages of a folder of chunks, or how to get at a chunk in memory."""
    if not isinstance(chain, (str, os.PathLike)):
        return "chain.chunks[0]"
    return ", ".join(sorted(path.name for path in Path(chain).expanduser().glob("*.ml*"))[:4])


def load_chain(folder: str | os.PathLike[str]) -> Chain:
    """The chain in a folder of chunks.

    Raises:
        LoadError: it is damaged.
    """
    return read_chain(Path(folder).expanduser(), load_as_is)


def _load_path(path: Path, compute_units: Any, *, graph_only: bool = False, **network: bool) -> Loaded:
    if (read := reader_of(path)) is not None:
        return replace(read(path), compute_units=compute_units)
    if (is_compiled(path) and not is_network(path)) or is_text(path):
        return _compiled(path, compute_units, graph_only=graph_only)
    file, weights = locate(path)
    opened = SourceFile(file)
    spec = read_spec(opened)
    if spec.WhichOneof("Type") != PROGRAM:
        return _network(str(path), spec, path.resolve(), compute_units, **network)
    loaded = from_spec(spec, path.resolve(), weights, compute_units, graph_only=graph_only)
    opened.check_place()  # else the weights may be those of another package
    return loaded


def _compiled(path: Path, compute_units: Any, *, graph_only: bool = False) -> Loaded:
    """A compiled ML Program, or a MIL text; `notes` says what could not be recovered."""
    folder, name = (path.parent, path.name) if is_text(path) else (path, PROGRAM_TEXT)
    compiled = read_compiled(folder, name)
    spec, left_out = readable_by_coremltools(compiled.spec, str(path))
    loaded = from_spec(spec, path.resolve(), folder / WEIGHTS, compute_units, graph_only=graph_only)
    compiled.source.check_place()  # else the weights may be those of another model
    return replace(loaded, notes=(*compiled.notes, *left_out))


def _network(
    what: str, spec: Any, source: Path | None, units: Any, exact: bool = False, as_is: bool = False
) -> Loaded:
    if as_is and spec.WhichOneof("Type") in NETWORKS:
        return LoadedNetwork(spec, what, source)
    return import_network(spec, what, source=source, compute_units=units, keep_names=exact)


@exclusive()
def load_sequence(path: str | os.PathLike[str]) -> ModelSequence:
    """The ML Programs of a model on disk: one, or those of a pipeline or a chain in order.

    Neural networks are made into ML Programs whose inputs and outputs keep their names.

    Raises:
        LoadError: it cannot be read, or a part is neither an ML Program nor a neural network.
    """
    source = Path(path).expanduser()
    if is_chain(source):
        chain = load_chain(source)
        return ModelSequence.of_parts(chain.spec, list(map(runnable, chain.chunks)))
    if reader_of(source) or (is_compiled(source) and not is_network(source)) or is_text(source):
        loaded = _load_path(source, None)
        return ModelSequence(loaded.spec, {"model": loaded})
    file, weights = locate(source)
    opened = SourceFile(file)
    spec = read_spec(opened)
    parts = _parts(spec, str(path), source.resolve(), weights)
    opened.check_place()
    return ModelSequence.of_parts(spec, parts)


def load_whole(model: Any) -> Loaded:
    """Read a model to run it as `load_exact` does; the models of a pipeline become one.

    Raises:
        LoadError: it cannot be read, or the models of a pipeline have several opsets.
        SurgeryError: a picture passes between the models of a pipeline.
    """
    try:
        return load_exact(model)
    except IsPipeline:
        place = getattr(model, "package_path", model)
        if not isinstance(place, (str, os.PathLike)):
            raise
        return joined(load_sequence(place), Path(place).expanduser())


@exclusive()
def load_member(model: Any, member: str | int) -> Loaded:
    """One model of a pipeline; a neural network is made into an ML Program.

    Args:
        model: path or MLModel of a pipeline.
        member: its name, or its number from 0 (also as text).

    Raises:
        LoadError: it is not a pipeline, or the member cannot be made an ML Program.
        UnknownName: no such member.
    """
    if isinstance(model, ct.models.MLModel) and model.package_path is None:
        spec, source, weights, where = model.get_spec(), Path(), None, "this MLModel"
    else:
        where = str(getattr(model, "package_path", model))
        source = Path(where).expanduser().resolve()
        file, weights = locate(source)
        spec = read_spec(file)
    kind = spec.WhichOneof("Type")
    if kind not in PIPELINES:
        raise LoadError(f"{where} is not a pipeline; leave member={member!r} out")
    models, names = PIPELINES[kind](spec).models, part_names(PIPELINES[kind](spec))
    wanted = str(member)
    if wanted not in names and wanted.isdigit() and int(wanted) < len(names):
        wanted = names[int(wanted)]
    if wanted not in names:
        raise UnknownName("member", wanted, names)
    programs = _parts(models[names.index(wanted)], f"{wanted} of {where}", source, weights)
    if len(programs) > 1:
        raise IsPipeline(f"{wanted} of {where} is a pipeline itself")
    return programs[0]


def _parts(spec: Any, where: str, source: Path, weights: Path | None) -> list[Loaded]:
    """The programs of a model, in the order in which they run."""
    kind = spec.WhichOneof("Type")
    if kind == PROGRAM:
        return [from_spec(spec, source, weights, None)]
    if kind not in PIPELINES:
        return [_network(where, spec, source, None, exact=True)]
    models = enumerate(PIPELINES[kind](spec).models)
    return [p for i, m in models for p in _parts(m, f"model {i} of the pipeline", source, weights)]


def clone(model: Loaded | Program) -> Loaded:
    """A copy whose program can be edited without touching the original; weights are shared."""
    loaded = Loaded.of(model)
    return replace(loaded, program=copy_program(loaded.program))


def interface(model: Loaded | Program) -> Interface:
    """The interface of a model, with the description that `save` would write."""
    loaded = Loaded.of(model)
    return Interface(signatures(loaded.program), saved_description(loaded.spec, loaded.program), loaded.version)


DIALECTS = ("short", "mil")


@door()
def to_text(model: Any, *, dialect: str = "short") -> str:
    """Write a program as text, without a trailing newline.

    Args:
        model: MIL program, function or op; or whatever `load` takes.
        dialect: "short" is made for reading: canonical, without the numbers of large constants. "mil" is the
            text that Apple's compiler writes and `load` reads (`.mil`): every op, attribute and number. A
            weight that is unchanged is written as its offset in the weight file.

    Returns:
        The text, lines parted by newlines.

    Raises:
        UnknownName: there is no such dialect.
        LoadError: the model cannot be read, or is only a part of a program and the dialect is "mil".
        SurgeryError: an argument is not what the call takes.
    """
    if dialect not in DIALECTS:
        raise UnknownName("dialect", dialect, DIALECTS)
    if isinstance(model, (Program, Block, Operation)) and dialect == "short":
        return short_text(model)
    if isinstance(model, (Block, Operation)) and not isinstance(model, Program):
        raise LoadError("a part of a program has no MIL text; give the program")
    loaded = load(model)
    return short_text(loaded.program) if dialect == "short" else program_text(loaded)

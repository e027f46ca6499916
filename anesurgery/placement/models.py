"""Inspect each kind of model in its way: networks by layer, pipelines by part, others in a line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anesurgery.errors import LoadError
from anesurgery.files import package as program
from anesurgery.files.package import PIPELINES, Loaded, part_names, read_spec
from anesurgery.files.sequence import Chain, is_chain, is_network, members
from anesurgery.loading import load_chain
from anesurgery.mil import Program, ct
from anesurgery.neuralnetwork.spec import NETWORKS, networks_of
from anesurgery.placement.durations import Time, total
from anesurgery.placement.inspection import NO_TIME, Inspection
from anesurgery.placement.networks import inspect_network
from anesurgery.placement.rules.loading import of_version
from anesurgery.placement.target import Target
from anesurgery.registry import reader_of

PROGRAM = "mlProgram"

WITHOUT_OPS: dict[str, str] = {
    "treeEnsembleClassifier": "a tree ensemble",
    "treeEnsembleRegressor": "a tree ensemble",
    "glmClassifier": "a generalized linear model",
    "glmRegressor": "a generalized linear model",
    "supportVectorClassifier": "a support vector machine",
    "supportVectorRegressor": "a support vector machine",
    "bayesianProbitRegressor": "a Bayesian probit regressor",
    "kNearestNeighborsClassifier": "a nearest neighbour classifier",
    "itemSimilarityRecommender": "an item similarity recommender",
    "classConfidenceThresholding": "a thresholding of class confidences",
    "oneHotEncoder": "a one-hot encoder",
    "imputer": "an imputer",
    "featureVectorizer": "a feature vectorizer",
    "dictVectorizer": "a dictionary vectorizer",
    "scaler": "a scaler",
    "categoricalMapping": "a categorical mapping",
    "normalizer": "a normalizer",
    "arrayFeatureExtractor": "an array feature extractor",
    "nonMaximumSuppression": "a non-maximum suppression model",
    "identity": "an identity model",
}
"""Kind of model -> its name. These have no tensor ops; Core ML runs them on the CPU."""

CLOSED: dict[str, str] = {
    "customModel": "a custom model: its code is in the app",
    "linkedModel": "a link to another model file; inspect that file",
    "serializedModel": "a serialized model, whose content cannot be read",
    "textClassifier": "a text classifier of the OS",
    "wordTagger": "a word tagger of the OS",
    "visionFeaturePrint": "Apple's image feature extractor, which is part of the OS",
    "soundAnalysisPreprocessing": "Apple's preprocessing of sound, which is part of the OS",
    "gazetteer": "a gazetteer of the OS",
    "wordEmbedding": "a word embedding of the OS",
    "audioFeaturePrint": "Apple's audio feature extractor, which is part of the OS",
}
"""Kind of model -> its name. What these run on is not in the file."""

InspectProgram = Callable[[Loaded, Target], Inspection]


def kind_of(model: Any) -> str:
    """The type of a model as the specification names it: "mlProgram", "pipeline", "neuralNetwork", ...

    Args:
        model: path, MLModel, MIL program or Loaded.

    Raises:
        LoadError: it cannot be read, or is not a model.
    """
    if _is_program(model):
        return PROGRAM
    return str(spec_of(model).WhichOneof("Type"))


def _is_program(model: Any) -> bool:
    """Is it an ML Program in memory, or a file of another format that is read into one?"""
    if isinstance(model, (str, os.PathLike)):
        return reader_of(Path(model)) is not None
    return isinstance(model, (Program, Loaded))


def spec_of(model: Any) -> Any:
    """The specification of a model on disk or of an MLModel.

    Raises:
        LoadError: it cannot be read, or is not a model.
    """
    if isinstance(model, ct.models.MLModel):
        return model.get_spec()
    if not isinstance(model, (str, os.PathLike)):
        raise LoadError(f"cannot inspect a {type(model).__name__}; give a path, an MLModel or a MIL Program")
    return read_spec(program.locate(Path(model).expanduser())[0])


def of_layers(model: Any) -> bool:
    """Is it a neural network, or a pipeline with one and without ML Programs?

    Raises:
        LoadError: it cannot be read.
    """
    spec = spec_of(model)
    parts = members(spec) if spec.WhichOneof("Type") in PIPELINES else ()
    return bool(networks_of(spec)) and all(part.WhichOneof("Type") != PROGRAM for _, part in parts)


def inspect_other(model: Any, target: Target, inspect_program: InspectProgram) -> Inspection | None:
    """Inspect whatever is no ML Program.

    Args:
        model: path, MLModel, MIL program or Loaded.
        target: chips, OS and compute units.
        inspect_program: called for each ML Program in a pipeline.

    Returns:
        None where the model is an ML Program itself.

    Raises:
        LoadError: it cannot be read, or is not a model.
    """
    if _is_program(model):
        return None
    if isinstance(model, (str, os.PathLike)) and is_chain(Path(model).expanduser()):
        model = load_chain(model)
    if isinstance(model, Chain):
        return _chain(model, target, inspect_program)
    spec = spec_of(model)
    if spec.WhichOneof("Type") == PROGRAM:
        return None
    inspection = _part(spec, target, _label(model), _Programs(model, inspect_program))
    return replace(inspection, findings=(*of_version(spec.specificationVersion, target), *inspection.findings))


def _chain(chain: Chain, target: Target, inspect_program: InspectProgram) -> Inspection:
    label = "the chain"
    parts = {}
    for number, chunk in enumerate(chain.chunks, 1):
        words = f"chunk {number} of {label}"
        inspection = (
            inspect_network(chunk.spec, target, words) if is_network(chunk) else inspect_program(chunk, target)
        )
        parts[f"chunk_{number}"] = replace(inspection, model=words)
    return _whole(parts, label, target, "a chain")


def _whole(parts: dict[str, Inspection], label: str, target: Target, kind: str, *notes: str) -> Inspection:
    """The inspection of models that run one after the other."""
    time, why = _time(parts)
    said = (f"{kind} of {len(parts)} models, which run one after the other", *notes, *why)
    return Inspection(label, target, (), notes=said, parts=parts, time=time)


def _time(parts: Mapping[str, Inspection]) -> tuple[Time | None, tuple[str, ...]]:
    """Of models that run one after the other, each with its fixed cost; or in words why there is none."""
    with_ops = {name: part for name, part in parts.items() if part.ops or part.parts}
    without = [name for name, part in with_ops.items() if part.time is None]
    times = [part.time for part in with_ops.values() if part.time is not None]
    if without or not times:
        return None, (f"{NO_TIME}there is none of {', '.join(without) or 'a part'}",)
    return total(times), ()


def _label(model: Any) -> str:
    return str(model) if isinstance(model, (str, os.PathLike)) else "the model"


class _Programs:
    """Inspects the ML Programs of one pipeline, whose weights lie in one folder."""

    def __init__(self, model: Any, inspect_program: InspectProgram) -> None:
        path = model.package_path if isinstance(model, ct.models.MLModel) else model
        self._path = None if path is None else Path(path).expanduser()
        self._inspect = inspect_program

    def __call__(self, spec: Any, target: Target, label: str) -> Inspection:
        if self._path is None:
            raise LoadError(f"{label} needs its weights; save the model and give the path")
        folder = program.locate(self._path)[1]
        loaded = program.from_spec(spec, self._path.resolve(), folder, None, graph_only=True)
        return replace(self._inspect(loaded, target), model=label)


def _part(spec: Any, target: Target, label: str, programs: _Programs) -> Inspection:
    kind = str(spec.WhichOneof("Type"))
    if kind == PROGRAM:
        return programs(spec, target, label)
    if kind in NETWORKS:
        return inspect_network(spec, target, label)
    if kind in PIPELINES:
        return _pipeline(PIPELINES[kind](spec), target, label, programs)
    return Inspection(label, target, (), notes=(_line(kind),))


def _pipeline(pipeline: Any, target: Target, label: str, programs: _Programs) -> Inspection:
    names = part_names(pipeline)
    parts = {
        name: _part(spec, target, f"{name} of {label}", programs)
        for name, spec in zip(names, pipeline.models, strict=True)
    }
    bare = [name for name, part in parts.items() if not part.ops and not part.parts]
    left_out = [f"without ops, and not counted in the status: {', '.join(bare)}"] if bare else []
    return _whole(parts, label, target, "a pipeline", *left_out)


def _line(kind: str) -> str:
    if kind in WITHOUT_OPS:
        return f"{WITHOUT_OPS[kind]} has no tensor ops; Core ML runs it on the CPU"
    what = CLOSED.get(kind, f"a model of type {kind}")
    return f"{what}; what it runs on cannot be told from the file"
